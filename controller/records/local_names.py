"""Names of objects that become files on this machine, and those that do not.

Whoever can write to the bucket, the experiment too, chooses the names. So `get` writes none that leads out of the
folder, and none that a shell, git, direnv, an editor, Python, pytest or another tool reads from a folder by itself.
Most of those are hidden; of the hidden ones only those of known formats are written. What is obeyed at the top alone is
written below `ASIDE`.
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
READ_AT_THE_TOP: dict[str, tuple[str, ...]] = {
    "pytest reads its options and plugins, https://docs.pytest.org/en/stable/reference/customize.html":
        ("pyproject.toml", "pytest.ini", "pytest.toml", "tox.ini", "setup.cfg"),
    "mypy and pylint, which editors run, import plugins and run `init-hook`":
        ("mypy.ini", "pylintrc", "pylintrc.toml"),
    "matplotlib imports the backend, https://matplotlib.org/stable/users/explain/customizing.html":
        ("matplotlibrc",),
    "Jupyter reads its settings where it is started, https://docs.jupyter.org/en/latest/use/config.html":
        ("jupyter_config.json", "jupyter_notebook_config.json", "jupyter_server_config.json",
         "jupyter_lab_config.json"),
    "IPython before 8.0.1 runs what is in its `startup` (CVE-2022-21699)": ("profile_default",),
    "any uv takes the index of packages, https://docs.astral.sh/uv/concepts/configuration-files": ("uv.toml",),
    "the hook of a shell sets variables, https://mise.jdx.dev/configuration.html": ("mise.toml", "mise.local.toml"),
    "rustup takes the toolchain, also for a prompt that shows it, https://rust-lang.github.io/rustup/overrides.html":
        ("rust-toolchain", "rust-toolchain.toml"),
    "editors load a project that they are shown, and run its build":
        ("cargo.toml", "build.gradle", "build.gradle.kts", "settings.gradle", "settings.gradle.kts", "pom.xml",
         "cmakelists.txt", "gemfile"),
    "any Bun runs `preload`, https://bun.sh/docs/runtime/bunfig": ("bunfig.toml",),
    "any Ansible loads plugins, https://docs.ansible.com/ansible/latest/reference_appendices/config.html":
        ("ansible.cfg",),
    "Vim on Windows runs them with 'exrc', https://vimhelp.org/starting.txt.html": ("_vimrc", "_exrc", "_gvimrc"),
}  # fmt: skip
"""What tools that are started in a folder for something else read there, and obey, by what they do with it.

What acts only when it is named, such as the files of make, Docker, npm or Nix, is a result like any other.
"""
OBEYED_AT_THE_TOP = frozenset(name for names in READ_AT_THE_TOP.values() for name in names)
ASIDE = "top-level"
"""Folder in which that is written which only does harm at the top; no package of Python has such a name."""
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
    if problem := next((problem for part in parts if (problem := _part_problem(part))), ""):
        return problem
    if _compared(parts[-1]) == BARE_REPOSITORY:
        return "would make the folder a git repository"
    return top_problem(path)


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


def top_problem(path: str) -> str:
    """Return why no file gets this path, though below another folder it would."""
    parts = path.split("/")
    first = _compared(parts[0])
    if first in OBEYED_AT_THE_TOP or (first, _compared(parts[-1])) == ("wandb", "settings"):
        return "is obeyed by tools that are started there"
    is_module = len(parts) == 1 and first.rpartition(".")[2] in MODULE_ENDINGS
    is_package = len(parts) > 1 and _compared(parts[1]).startswith("__init__.")
    if is_module or is_package:  # whatever it is called: `import numpy` takes a numpy.py
        return "would be imported by a Python that is started there"
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


def split_names(paths: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return where each path is written, and why each other one is not."""
    places: dict[str, str] = {}
    problems: dict[str, str] = {}
    for path in paths:
        place = f"{ASIDE}/{path}" if top_problem(path) else path
        if problem := name_problem(place):
            problems[path] = problem
        else:
            places[path] = place
    for path in [path for path, place in places.items() if place != path and place in places]:
        problems[path] = f"{top_problem(path)}, and {places.pop(path)} is another file"
    folders = {str(above) for place in places.values() for above in PurePosixPath(place).parents}
    problems |= {path: "is also the folder of other files" for path, place in places.items() if place in folders}
    return {path: place for path, place in places.items() if path not in problems}, problems
