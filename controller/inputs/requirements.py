"""Read a requirements file with its includes, and separate the git repositories from what the workers install.

The workers have no key to those repositories; this machine does.
https://pip.pypa.io/en/stable/reference/requirements-file-format/
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

from controller.core.errors import ConfigError

GIT = re.compile(
    r"^((?P<name>[A-Za-z0-9][\w.-]*)\s*(?P<extras>\[[^\]]*\])?\s*@\s*)?"
    r"git\+(?P<place>[a-z+]+://\S+?)(#(?P<fragment>[^\s;]+))?(?P<marker>\s*;.*)?$"
)
LOCAL = re.compile(r"^(-e\b|--editable\b|\.|/|file:)|@\s*file:|^\S+/$")
CONSTRAINT = re.compile(r"^(-c\b|--constraint\b)")
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
    git = tuple(found for line in lines if (found := _parse_git_requirement(line)))
    gone = {g.line for g in git}
    return Requirements("".join(f"{line}\n" for line in lines if line not in gone), git)


def _lines_of(root: Path, path: Path, what: str, inside: frozenset[Path]) -> Iterator[str]:
    if not path.resolve().is_relative_to(root.resolve()):  # it may be somebody else's repository
        raise ConfigError(f"{what} includes {path}, which is outside the repository")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}: cannot read it: {getattr(error, 'strerror', None) or error}") from None
    if path.resolve() in inside:
        raise ConfigError(f"{what} includes itself")
    for raw in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        if not line:
            continue
        if include := INCLUDE.match(line):
            yield from _lines_of(root, path.parent / include["file"], what, inside | {path.resolve()})
        elif LOCAL.search(line):
            raise ConfigError(
                f"{what}: {line!r} is a local folder, which the workers do not have; to install the shipped code, set "
                "program.setup=[[uv, pip, install, -e, .]]"
            )
        elif CONSTRAINT.match(line):
            raise ConfigError(f"{what}: {line!r} is not supported; put the constraints into the file itself")
        else:
            yield " ".join(line.split())


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
