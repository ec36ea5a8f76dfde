"""Inputs that the section `env` names: a requirements file with its includes, and secrets.

Git repositories among the requirements are separated from what the workers install: the workers have no key to those
repositories, this machine does. https://pip.pypa.io/en/stable/reference/requirements-file-format/

Secrets are read from the sources in `env.secrets`, kept in memory, and sent only to the workers, over SSH's stdin. They
never enter the plan, a log, an argument list, the bucket, run.yaml or a run's id.
"""

import base64
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from controller.core.errors import ConfigError
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ForbiddenError, NotFoundError

GIT = re.compile(
    r"^((?P<name>[A-Za-z0-9][\w.-]*)\s*(?P<extras>\[[^\]]*\])?\s*@\s*)?"
    r"git\+(?P<place>[a-z+]+://\S+?)(#(?P<fragment>[^\s;]+))?(?P<marker>\s*;.*)?$"
)
LOCAL = re.compile(r"^(-e\b|--editable\b|\.|/|file:)|@\s*(file:|[./])|^\S+/$|^[^:@\s]+\.(whl|tar\.gz|zip)$")
LOCAL_PATH = re.compile(r"(-e[ =]*|--editable[ =]+|\S+\s*@\s*)?(file:(//)?)?(?P<path>[./][\w./-]*)$")
EDITABLE_ADDRESS = re.compile(r"(-e|--editable)[\s=]*(?=[\w.\[\]-]*\s*@?\s*(?!file:)[a-z][a-z+]*://)")
CONSTRAINT = re.compile(r"^(-c\b|--constraint\b)")
ADDRESS = re.compile(r"[a-z][a-z+]*://\S+", re.IGNORECASE)
COMMAND = re.compile(r"(uv |python\S* -m )?pip3? install\b|(conda|mamba|poetry|uv) (install|add)\b")
OPTION = re.compile(
    r"(-[if]|--((extra-)?index-url|find-links|no-index|no-binary|only-binary|pre|prefer-binary|require-hashes"
    r"|trusted-host|use-feature))(?![\w-])"
)
"""Options that uv takes in a requirements file."""
CONDA = re.compile(r"^(dependencies|channels):\s*$", re.MULTILINE)
REPAIRS = ((r"(?<![=<>!~])=(?!=)", "=="), (r"(?<=[\w*])\s+(?=[=<>!~])", ","), (r"(\[[^\]]*)$", r"\1]"), (r"\s*;.*", ""))
"""What is often wrong with a requirement, and what is meant."""
JOINED = "\0"
"""Stands for the end of a line that goes on in the next one."""
INCLUDE = re.compile(r"^(-r|--requirement)[\s=]*(?P<file>\S+)$")


@dataclass(frozen=True)
class GitRequirement:
    """A requirement on a git repository; `ref` None means the default branch."""

    line: str
    url: str
    ref: str | None
    subdirectory: str
    extras: str
    marker: str

    @property
    def pinned(self) -> bool:
        """Whether it names one commit."""
        return bool(self.ref and re.fullmatch(r"[0-9a-f]{40}", self.ref))


@dataclass(frozen=True)
class Requirements:
    """A parsed requirements file: `text` is for uv on the workers, `git` is built on this machine."""

    text: str
    git: tuple[GitRequirement, ...] = ()


def read_requirements(root: Path, name: str) -> Requirements:
    """Read `name` below `root`. Raises ConfigError if it is missing or a line means nothing on a worker."""
    lines = list(_lines_of(root, root / name, f"env.requirements: {name}", frozenset()))
    _require_versions(lines, name)
    git = tuple(found for line in lines if (found := _parse_git_requirement(line)))
    gone = {g.line for g in git}
    return Requirements("".join(f"{line}\n" for line in lines if line not in gone), git)


def _require_versions(lines: Iterable[str], name: str) -> None:
    """Raise ConfigError if no version of a package can be what the lines without a marker say of it."""
    wanted: dict[str, list[Requirement]] = {}
    for line in lines:
        if _is_requirement(text := re.split(r"\s--", line, maxsplit=1)[0].rstrip(" \\")):
            found = Requirement(text)
            if found.marker is None and found.url is None:
                wanted.setdefault(canonicalize_name(found.name), []).append(found)
    for found in wanted.values():
        if reduce(and_, (each.specifier for each in found)).is_unsatisfiable():
            listed = " and ".join(dict.fromkeys(str(each) for each in found))
            raise ConfigError(f"env.requirements: {name}: {listed}: no version satisfies all of this; change it")


def _lines_of(root: Path, path: Path, what: str, inside: frozenset[Path]) -> Iterator[str]:
    if not path.resolve().is_relative_to(root.resolve()):  # it may be somebody else's repository
        raise ConfigError(f"{what}: is outside the repository")
    if path.resolve() in inside:
        raise ConfigError(f"{what}: includes itself")
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{what}: is not UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{what}: cannot read it: {error.strerror}") from None
    if CONDA.search(text):
        raise ConfigError(f"{what}: is an environment of conda; list its packages in a text file, one a line")
    if path.suffix in (".toml", ".lock"):
        cure = "list its packages in a text file, one a line"
        if path.name in ("pyproject.toml", "uv.lock"):
            cure = "a program after -- has its packages if env.packages and env.requirements are left out"
        raise ConfigError(f"{what}: is no requirements file; {cure}")
    number = 0
    for raw in text.replace("\\\n", f" {JOINED}").splitlines():
        first, number = number + 1, number + 1 + raw.count(JOINED)
        line = re.sub(r"(^|\s)#.*$", "", raw.replace(JOINED, "")).strip()
        if not line:
            continue
        if include := INCLUDE.match(line):
            named = f"{what} includes {include['file']}"
            yield from _lines_of(root, path.parent / include["file"], named, inside | {path.resolve()})
        elif problem := _line_problem(line, path.parent.resolve(), root.resolve()):
            raise ConfigError(f"{what}, line {first}: {line[:80]!r} {problem}")
        else:
            yield " ".join(line.split())


def _line_problem(line: str, folder: Path, root: Path) -> str:
    """Return why a line of a file in a folder means nothing to uv on a worker; empty if it may mean something."""
    if found := EDITABLE_ADDRESS.match(line):
        return f"is an address, which is installed as it is; write it without {found[1]}: {line[found.end() :]}"
    if LOCAL.search(line):
        named = line if re.fullmatch(r"[.\w][\w./-]*", line) else "-e, ."
        if place := LOCAL_PATH.match(line):
            if not (target := (folder / place["path"]).resolve()).is_relative_to(root):
                return "is a path outside of what is shipped; move it into the repository, or name it as git+https://…"
            inside = target.relative_to(root).as_posix()
            named = f"{'-e, ' * line.startswith(('-e', '--e'))}{'.' if inside == '.' else f'./{inside}'}"
        cure = f"to install what is shipped, set program.setup=[[uv, pip, install, {named}]]"
        return f"is a local path, which the workers do not have; {cure}"
    if CONSTRAINT.match(line):
        return "is not supported; put the constraints into the file itself"
    if OPTION.match(line) or GIT.match(line) or ADDRESS.match(line):
        return ""
    if COMMAND.match(line):
        return "is a command; write what it installs, one a line"
    if line.startswith("-"):
        return "is no option of a requirements file; write packages without a dash, one a line"
    wanted = re.split(r"\s--", line, maxsplit=1)[0]
    if _is_requirement(wanted):
        return ""
    for wrong, meant in REPAIRS:
        if _is_requirement(repaired := re.sub(wrong, meant, wanted)):
            return f"is no requirement; did you mean {repaired}?"
    return "is no requirement; write one a line, such as jax[tpu]>=0.7,<0.8"


def _is_requirement(text: str) -> bool:
    try:
        Requirement(text)
    except InvalidRequirement:
        return False
    return True


def _parse_git_requirement(line: str) -> GitRequirement | None:
    match = GIT.match(line)
    if match is None:
        return None
    fragment = parse_qs(match["fragment"] or "")
    scheme, _, rest = match["place"].partition("://")
    host, _, path = rest.partition("/")
    path, _, ref = path.partition("@")
    subdirectory = fragment.get("subdirectory", [""])[0]
    if subdirectory.startswith("/") or ".." in subdirectory.split("/"):
        raise ConfigError(f"env.requirements: {line!r}: subdirectory leads outside the repository")
    return GitRequirement(
        line=line,
        url=f"{scheme}://{host}/{path}",
        ref=ref or None,
        subdirectory=subdirectory,
        extras=match["extras"] or "",
        marker=match["marker"] or "",
    )


MANAGER = "secretmanager:"
NETRC = "NETRC"
"""Programs expect this secret as a file: the value is its content, and on a worker the variable names the file."""


class Vault:
    """Secrets of one run. It has no repr of its values, so that nothing can print them by accident."""

    def __init__(
        self,
        sources: Mapping[str, str | None],
        environment: Mapping[str, str] | None = None,
        *,
        section: str = "env.secrets",
    ) -> None:
        """Store `sources`, by name as in `section` of the config, without reading them.

        `environment` is that of this process.
        """
        self._section = section
        self._environment = os.environ if environment is None else environment
        self._sources = {
            name: source for name, source in sources.items() if source and self._is_available(name, source)
        }
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Sorted names of the secrets that the workers will get."""
        return sorted(self._sources)

    @property
    def apis(self) -> list[str]:
        """APIs that must be enabled to read them."""
        asks = any(source.startswith(MANAGER) for source in self._sources.values())
        return ["secretmanager.googleapis.com"] if asks else []

    def load(self, google: GoogleClient) -> None:
        """Read all secrets that have not been read yet.

        Raises:
            ConfigError: a secret is not where the config says.
            ServiceDisabledError: Secret Manager is not enabled, or not everywhere yet.
        """
        with self._lock:
            for name, source in self._sources.items():
                if name not in self._values:
                    self._values[name] = self._read(name, source, google)

    def values(self) -> dict[str, str]:
        """Return the secrets that `load` has read, by name."""
        return dict(self._values)

    def _is_available(self, name: str, source: str) -> bool:
        """Return whether to deliver a secret. Only a variable passed on under its own name is optional."""
        value = self._environment.get(name)
        if source != "env" or not value:
            return source != "env"
        return name != NETRC or Path(value).expanduser().is_file()

    def _read(self, name: str, source: str, google: GoogleClient) -> str:
        key = f"{self._section}.{name}"
        if source.startswith(MANAGER):
            return _from_manager(key, source.removeprefix(MANAGER), google)
        if source.startswith("file:"):
            return _from_file(key, source.removeprefix("file:"), name)
        variable = source.removeprefix("env:") if source != "env" else name
        value = self._environment.get(variable, "")
        if not value:
            raise ConfigError(f"{key}: environment variable {variable} is not set; set it, or remove the key")
        return _from_file(key, value, name) if name == NETRC else value


def address_problem(url: str) -> str:
    """Return why an address is none of a webhook, without repeating it; empty if it is one."""
    if not url.isascii() or not url.isprintable() or " " in url:
        return "the address holds a space, a line break or a letter that no address has"
    try:
        parts = urlsplit(url)
        _ = parts.port  # is parsed only now
    except ValueError:
        return "the address has no valid host and port"
    if parts.scheme == "https" and parts.hostname:
        return ""
    if parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost"):
        return ""
    return "the address must begin with https://"


def _from_file(key: str, path: str, name: str) -> str:
    try:
        text = Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: cannot read {path}: {getattr(error, 'strerror', None) or 'not text'}") from None
    return text if name == NETRC else text.strip()


def _from_manager(key: str, name: str, google: GoogleClient) -> str:
    """Read a secret from Secret Manager.

    https://cloud.google.com/secret-manager/docs/reference/rest/v1/projects.secrets.versions/access
    """
    version = name if "/versions/" in name else f"{name}/versions/latest"
    try:
        answer = google.call("secretmanager", "projects.secrets.versions.access", name=version)
    except NotFoundError:
        message = f"{version} does not exist; create it with `gcloud secrets create`, or name another"
        raise ConfigError(f"{key}: {message}") from None
    except ForbiddenError as error:
        message = f"you may not read {version}; this requires roles/secretmanager.secretAccessor ({error.message})"
        raise ConfigError(f"{key}: {message}") from None
    try:
        return base64.b64decode(answer["payload"]["data"]).decode()
    except (KeyError, ValueError):
        raise ConfigError(f"{key}: {version} is not text") from None
