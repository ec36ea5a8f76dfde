"""git on this machine: which repository a folder is in, clones of others, and what git knows of the shipped code.

git must answer or say that there is no repository: anything else it says is shown, because a guess could send files
that it ignores.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.schema.program import Repository
from controller.core.errors import ConfigError

NO_REPOSITORY = "fatal: not a git repository (or any"
"""How git says that there is none. About a `.git` that leads nowhere it says `not a git repository: PLACE`."""
ELSEWHERE = {"GIT_DIR": "--absolute-git-dir", "GIT_WORK_TREE": "--show-toplevel"}
"""Variables that make git take another repository than that of the folder; the question whose answer they change."""
LOCAL_VARIABLES = (
    *ELSEWHERE,
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_NAMESPACE",
)
"""Variables of one repository, which a git hook sets: `git rev-parse --local-env-vars`."""
NOT_INSTALLED = "error: git is not installed: https://git-scm.com/downloads"


class UnreachableError(ConfigError):
    """A repository that cannot be reached now, though it may exist."""


def run_git(
    arguments: Sequence[str], folder: Path, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run git in a folder and return its output; exit code 127 and a message in stderr where it is not installed.

    Bytes that are no UTF-8 become surrogates.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LOCAL_VARIABLES}
    environment |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", **(variables or {})}
    command = ["git", *arguments]
    try:
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, check=False,
            encoding="utf-8", errors="surrogateescape",
        )  # fmt: skip
    except (FileNotFoundError, PermissionError) as error:
        if not folder.is_dir():
            raise
        message = NOT_INSTALLED if isinstance(error, FileNotFoundError) else f"error: cannot start git: {error}"
        return subprocess.CompletedProcess(command, 127, "", message)


def ask_git(arguments: Sequence[str], folder: Path, *, may_warn: bool = False) -> str:
    """Return what git answers. Raises ConfigError with its own words if it refuses, or warns of what it missed."""
    done = run_git(arguments, folder)
    warned = any(line.startswith("warning:") for line in done.stderr.splitlines())
    if done.returncode or (warned and not may_warn):
        command = next(word for word in arguments if not word.startswith("-"))
        raise ConfigError(f"code: `git {command}` in {folder}: {all_words(done.stderr)}")
    return done.stdout


def all_words(text: str) -> str:
    """Return what git said in one line; it often ends with the cure."""
    return " ".join(text.encode(errors="replace").decode().split()) or "git failed without a word"


def repository_root(folder: Path) -> Path:
    """Return the top of the git repository around a folder; the folder itself if there is none.

    Raises:
        ConfigError: as `find_repository`, or the environment names another repository.
    """
    for name, question in ELSEWHERE.items():
        value = os.environ.get(name)
        if value and (folder / value).resolve() != _path(run_git(["rev-parse", question], folder).stdout).resolve():
            message = f"the environment variable {name}={value} names another repository than that of {folder}"
            raise ConfigError(f"code: {message}; run `unset {name}`")
    return find_repository(folder) or folder


def find_repository(folder: Path) -> Path | None:
    """Return the top of the git repository around a folder; None if there is none.

    Raises:
        ConfigError: there is one, and git is not installed or refuses it.
    """
    top = run_git(["rev-parse", "--show-toplevel"], folder)
    if top.returncode == 0:
        return _path(top.stdout)
    there = next(_repositories_above(folder.absolute()), None)
    if there is None and (top.returncode == 127 or _says_none(top.stderr)):
        return None
    raise ConfigError(f"code: {there or folder} is a git repository, and git says: {all_words(top.stderr)}")


def _says_none(said: str) -> bool:
    """Return whether git says that there is no repository, be it below a trace or a warning."""
    return any(line.startswith(NO_REPOSITORY) for line in said.splitlines())


def _repositories_above(folder: Path) -> Iterator[Path]:
    """Yield the folders with a `.git`, from this one up; git does not look into those of GIT_CEILING_DIRECTORIES."""
    ceilings = os.environ.get("GIT_CEILING_DIRECTORIES", "").split(os.pathsep)
    for place in (folder, *folder.parents):
        if place != folder and str(place) in ceilings:
            return
        if os.path.lexists(place / ".git"):
            yield place


def _path(answer: str) -> Path:
    return Path(answer.removesuffix("\n"))


def checkout(repository: Repository, state: Path) -> Path:
    """Return the folder of a repository at its commit, cloned on first use.

    Raises:
        UnreachableError: it cannot be cloned.
        ConfigError: it has no such commit.
    """
    name = hashlib.sha256(repository.url.encode()).hexdigest()[:12]
    folder = state / "repositories" / f"{name}-{repository.commit[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        clone(repository.url, repository.commit, draft, "code.repository")
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # another process may have been faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def clone(url: str, ref: str | None, folder: Path, key: str) -> str:
    """Clone a commit, branch or tag into an empty folder, with its submodules, and return the commit.

    It is shallow where the server allows it.

    Raises:
        ConfigError: the clone failed; names `key`. UnreachableError if the server could not be reached.
    """
    message = f"{key}: {strip_password(url)}"
    if ref and ref.startswith("-"):  # git would take it for an option, and some of them run programs
        raise ConfigError(f"{message}: {ref!r} is not a valid branch, tag or commit")
    for argv in (["init", "--quiet"], ["remote", "add", "--", "origin", url]):
        run_git(argv, folder)
    one = run_git(["fetch", "--quiet", "--depth=1", "origin", ref or "HEAD"], folder)
    if one.returncode and ref:  # a server may refuse to send a commit that no branch ends with
        everything = ["fetch", "--quiet", "--tags", "origin", "+refs/heads/*:refs/remotes/origin/*"]
        one = run_git(everything, folder)
    if one.returncode:
        raise UnreachableError(f"{message}: cannot clone: {_last_line(one.stderr)}")
    for target in ("FETCH_HEAD", ref, f"origin/{ref}"):
        commit = run_git(["rev-parse", "--verify", "--quiet", f"{target}^{{commit}}"], folder).stdout.strip()
        if commit and (ref is None or target != "FETCH_HEAD" or len(ref) != 40 or commit == ref):
            break
    else:
        raise ConfigError(f"{message}: commit {ref} does not exist")
    if (done := run_git(["checkout", "--quiet", "--detach", commit], folder)).returncode:
        raise ConfigError(f"{message}: cannot check out: {_last_line(done.stderr)}")
    if (folder / ".gitmodules").is_file():
        done = run_git(["submodule", "--quiet", "update", "--init", "--recursive"], folder)
        if done.returncode:
            raise UnreachableError(f"{message}: cannot clone its submodules: {_last_line(done.stderr)}")
    return commit


def strip_password(url: str) -> str:
    """Return a URL without credentials, safe to print: an HTTPS URL may contain a token."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    user, at, name = host.rpartition("@")
    if not separator or not at or scheme == "ssh":
        return url
    return f"{scheme}://{name}{slash}{path}" if user else url


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1] if lines else "git failed")


MAX_FILE_BYTES = 1_000_000
MAX_FILES = 2_000
MAX_DIFF_BYTES = 10_000_000
DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD", "--")


def collect_git_status(root: Path, exclude: tuple[str, ...], secrets: Iterable[str]) -> tuple[dict[str, Any], str]:
    """Return the document for git.json, and the changes since the commit as a patch.

    Args:
        root: the repository.
        exclude: patterns as in .gitignore; matching files are neither shown nor named.
        secrets: values that are removed from the patch.
    """
    found = run_git(["rev-parse", "--show-toplevel"], root)
    if found.returncode and not _says_none(found.stderr):
        return {"commit": None, "why": all_words(found.stderr)}, ""
    if not found.stdout or _path(found.stdout).resolve() != root.resolve():
        return {"commit": None, "why": "the code is not in a git repository of its own"}, ""
    with _watching_all_files(root) as index:

        def git(*arguments: str) -> str:
            return _git(root, *arguments, **index)

        commit = git("rev-parse", "--verify", "--quiet", "HEAD").strip() or None
        changed = _shown(git("diff", "--name-only", "-z", "HEAD"), exclude) if commit else []
        shown = [name for name in changed if _fits_patch(root / name)][:MAX_FILES]
        diff = git(*DIFF, *shown) if shown else ""
        if not _is_utf8(diff):
            shown = [name for name in shown if _is_utf8(git(*DIFF, name))]
            diff = git(*DIFF, *shown) if shown else ""
    if len(diff) > MAX_DIFF_BYTES:
        shown, diff = [], ""
    for secret in secrets:
        diff = diff.replace(secret, "*" * len(secret))
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    document = {
        "commit": commit,
        "branch": _git(root, "symbolic-ref", "--quiet", "--short", "HEAD").strip() or None,
        "remote": strip_password(_git(root, "remote", "get-url", "origin").strip()) or None,
        "dirty": bool(changed),
        "changed": [_printable(name) for name in changed[:MAX_FILES]],
        "untracked": [_printable(name) for name in _shown(untracked, exclude)[:MAX_FILES]],
        "patch": "diff.patch" if diff else None,
        "not_in_patch": [_printable(name) for name in sorted(set(changed) - set(shown))[:MAX_FILES]],
    }
    return document, diff


@contextmanager
def _watching_all_files(root: Path) -> Iterator[dict[str, str]]:
    """Yield variables with which git compares the files that are here and that it was told to take for unchanged."""
    told = [
        entry for entry in _git(root, "ls-files", "-v", "-z").split("\0") if entry[:1].islower() or entry[:1] == "S"
    ]
    names = [name for entry in told if os.path.lexists(root / (name := entry[2:]))]
    if not names:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        theirs = root / _path(_git(root, "rev-parse", "--git-path", "index"))
        shutil.copy2(theirs, index["GIT_INDEX_FILE"])  # with its time, which tells git what may be newer than the index
        for flag in ("--no-assume-unchanged", "--no-skip-worktree"):
            for start in range(0, len(names), 1000):
                _git(root, "update-index", flag, "--", *names[start : start + 1000], **index)
        yield index


def _shown(answer: str, exclude: tuple[str, ...]) -> list[str]:
    import pathspec

    spec = pathspec.GitIgnoreSpec.from_lines(exclude)
    return sorted(name for name in answer.split("\0") if name and not spec.match_file(name))


def _fits_patch(path: Path) -> bool:
    """Return whether a change can be in the patch: that of a submodule cannot."""
    return not path.is_dir() and (not path.is_file() or path.stat().st_size <= MAX_FILE_BYTES)


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _printable(name: str) -> str:
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _git(root: Path, *arguments: str, **variables: str) -> str:
    """Return git's output; empty if git fails or is not installed."""
    done = run_git(["-c", "core.quotepath=off", *arguments], root, variables)
    return done.stdout if done.returncode == 0 else ""
