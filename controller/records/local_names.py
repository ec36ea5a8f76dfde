"""Names of objects that become files on this machine, and those that do not.

Whoever can write to the bucket, the experiment too, chooses the names. So `get` writes none that leads out of the
folder, and none that a shell, git, direnv, an editor, Python, pytest or another tool reads from a folder by itself.
Most of those are hidden; of the hidden ones only those of known formats are written.
"""

import unicodedata
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

MAX_NAME_BYTES = 200
"""File systems allow 255; the rest is for the name of an unfinished download."""
MAX_PATH_BYTES = 2000
HIDDEN_DATA = frozenset(
    (".hydra", ".metadata", ".zarray", ".zattrs", ".zgroup", ".zmetadata", ".done", ".keep", ".gitkeep")
)
"""What Hydra, PyTorch, Zarr and programs write into their results."""
OBEYED = frozenset(("conftest.py", "sitecustomize.py", "usercustomize.py", "pyvenv.cfg", "hydra_plugins", "desktop.ini",
                    "autorun.inf", "agents.md", "claude.md", "gemini.md", "_darcs"))  # fmt: skip
"""What tools find by themselves in any folder that they walk through or are shown, though it is not hidden."""
OBEYED_AT_THE_TOP = frozenset((
    # Python, pytest and uv, and checkers whose settings name plugins
    "pyproject.toml", "setup.py", "setup.cfg", "pytest.ini", "pytest.toml", "tox.ini", "tox.toml", "mypy.ini",
    "pylintrc", "pylintrc.toml", "ruff.toml", "uv.toml", "uv.lock", "poetry.toml", "pdm.toml", "pixi.toml", "pipfile",
    "noxfile.py", "manage.py", "fabfile.py", "dodo.py", "tasks.py",
    # make and its kind, package managers, environments of a folder
    "makefile", "gnumakefile", "bsdmakefile", "justfile", "rakefile", "gemfile", "vagrantfile", "procfile",
    "sconstruct", "cmakelists.txt", "build.ninja", "meson.build", "taskfile.yml", "taskfile.yaml", "package.json",
    "bunfig.toml", "deno.json", "cargo.toml", "build.rs", "rust-toolchain", "rust-toolchain.toml", "go.mod",
    "flake.nix", "shell.nix", "default.nix", "devenv.nix", "devbox.json", "mise.toml", "tiltfile", "dockerfile",
    "compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml", "workspace", "module.bazel",
    "_vimrc", "_netrc", "build", "build.bazel", "workspace.bazel", "pom.xml", "build.gradle", "build.gradle.kts",
    "settings.gradle", "settings.gradle.kts", "gulpfile.js", "gruntfile.js", "snakefile", "earthfile", "wscript",
    # programs whose settings name code, commands or a server that gets a key
    "matplotlibrc", "ansible.cfg", "jupyter_config.json", "jupyter_notebook_config.json", "jupyter_server_config.json",
))  # fmt: skip
"""What tools read in the folder in which they are started. Results may have folders named `build` or `workspace`, but a
`shell.nix` may be a folder too."""
REPOSITORIES = frozenset((".git", ".hg", ".jj"))
"""Folders whose settings name commands, which a prompt of a shell is enough to run. Slipway ships none as code."""
BARE_REPOSITORY = "head"
"""The file by which git takes a folder for a bare repository, and obeys its `config`."""
OBEYED_ENDINGS = (
    ".code-workspace",
    ".pth",
    ".lnk",
    ".url",
    ".desktop",
    ".command",
    ".terminal",
    ".webloc",
    ".scf",
    ".library-ms",
    ".search-ms",
    ".searchconnector-ms",
)
OURS = "slipway"
"""What Slipway itself reads in the current folder: config files and modules of the user's own."""
RESERVED = frozenset(("con", "prn", "aux", "nul", "conin$", "conout$", "clock$")) | {
    f"{port}{number}" for port in ("com", "lpt") for number in "0123456789"
}
"""Devices of Windows, also with an ending."""
TESTS = ("test_*.py", "*_test.py")
"""What pytest imports, in whatever folder below."""
DOCTESTS = "test*.txt"
"""What pytest runs if it holds a prompt of Python's: a name that results may well have."""
MODULE_ENDINGS = ("py", "pyc", "pyd", "pyw", "so", "dylib")
IGNORED_CATEGORIES = ("Cf", "Mn")
"""Characters that do not show, some of which file systems leave out of a comparison: https://git-scm.com/docs/git-config
(core.protectHFS)."""


def name_problem(path: str) -> str:
    """Return why an object of this path is not written to this machine; empty if it is."""
    parts = path.split("/")
    if not path or str(PurePosixPath(path)) != path or path.startswith("/") or ".." in parts or path == ".":
        return "leads out of the folder, or is another name of another file"
    if len(path.encode(errors="replace")) > MAX_PATH_BYTES:
        return "is too long"
    return next((problem for part in parts if (problem := _part_problem(part))), "") or _path_problem(parts)


def _part_problem(part: str) -> str:
    """Return why no file or folder gets this name, wherever it is."""
    if any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in part) or "\\" in part:
        return "has control characters, or a backslash"
    if len(part.encode()) > MAX_NAME_BYTES:
        return "is too long"
    name = _compared(part)
    if not name or name.partition(".")[0].rstrip() in RESERVED:
        return "is reserved on other systems"
    if part[0] == "-":
        return "would be taken for an option"
    if "~" in name and name.partition("~")[0] in ("git", "gi", "hg", "envrc", "vscode"):
        return "is the short name of a hidden folder"  # GIT~1 on Windows
    if name[0] == "." and name not in HIDDEN_DATA:
        return "is hidden, and tools obey such files"
    if any(fnmatchcase(name, test) for test in TESTS):
        return "would be imported by a pytest that finds it"
    return "is obeyed by tools that find it" if name in OBEYED or name.endswith(OBEYED_ENDINGS) else ""


def content_problem(name: str, content: Path) -> str:
    """Return why a file of this name and content is not kept; empty if it is."""
    if not fnmatchcase(_compared(name), DOCTESTS):
        return ""
    with content.open("rb") as lines:
        return "would be run by a pytest that finds it" if any(b">>>" in line for line in lines) else ""


def _path_problem(parts: list[str]) -> str:
    """Return why no file gets this path, though its names alone would do."""
    first = _compared(parts[0])
    if first in OBEYED_AT_THE_TOP and (len(parts) == 1 or "." in first):
        return "is obeyed by tools that are started there"
    if _compared(parts[-1]) == BARE_REPOSITORY:
        return "would make the folder a git repository"
    is_module = len(parts) == 1 and first.rpartition(".")[2] in MODULE_ENDINGS
    is_package = len(parts) > 1 and _compared(parts[1]).startswith("__init__.")
    if is_module or is_package:  # whatever it is called: `import numpy` takes a numpy.py
        return "would be imported by a Python that is started there"
    if (first, _compared(parts[-1])) == ("wandb", "settings"):
        return "is obeyed by tools that are started there"
    return "is read by Slipway if it is started there" if first == OURS else ""


def _compared(part: str) -> str:
    """Return a name as file systems that ignore case, accents' forms, trailing dots or streams may see it."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", part) if unicodedata.category(c) not in IGNORED_CATEGORIES)
    return plain.casefold().partition(":")[0].rstrip(". ").lstrip(" ")


def repository_problem(paths: Iterable[str]) -> str:
    """Return which path below a folder git or its kind obeys as soon as somebody looks there; empty if none does."""
    tops: set[str] = set()
    for path in paths:
        parts = [_compared(part) for part in path.split("/")]
        if REPOSITORIES.intersection(parts):
            return path
        tops.add(parts[0])
    return "HEAD" if {BARE_REPOSITORY, "objects", "refs"} <= tops else ""


def split_names(paths: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the paths that are written, and why each other one is not."""
    problems = {path: name_problem(path) for path in paths}
    kept = [path for path, problem in problems.items() if not problem]
    folders = {str(above) for path in kept for above in PurePosixPath(path).parents}
    problems |= dict.fromkeys(folders.intersection(kept), "is also the folder of other files")
    return [path for path in kept if not problems[path]], {path: why for path, why in problems.items() if why}
