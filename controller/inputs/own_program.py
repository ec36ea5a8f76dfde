"""A program given as words, not as a config: `slipway run -- python train.py` becomes overrides of `program=command`.

The same words in the same folder give the same overrides, so they mean the same run.
"""

import re
import sys
import tomllib
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema.topology import UnknownTypeError, find_topology, read_table, usual_type
from controller.config.compose import CONFIG_DIR, config_groups, quote_text
from controller.core.errors import ConfigError
from controller.inputs.git import repository_root
from controller.inputs.program_words import (
    ENTER,
    INTERPRETERS,
    SCRIPT_SUFFIXES,
    program_problem,
    script_of,
    shell_line,
    started,
    word_after,
)

PACKAGE_KEYS = frozenset({"env.packages", "env.requirements", "program.setup"})
PATH_KEYS = frozenset({"env.vars.PYTHONPATH", "env.vars.PATH", "experiment"})
"""Keys that may let a worker find what this machine does not."""
SLICE_KEYS = frozenset({"tpu", "tpu.accelerator_type"})
HERE_CLOUDS = ("local", "here")
"""Clouds on this machine: their workers use its packages, without a download."""
PLAIN_WORD = re.compile(r"-{0,2}[A-Za-z][\w./-]*", re.ASCII)
"""A word that Hydra's grammar takes for a text."""
PYTHON = re.compile(r"python(2|[23]\.\d+)")
DEFAULT_ZONE = "us-central1-a"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MAX_NAME_LENGTH = 42


@dataclass(frozen=True)
class OwnProgram:
    """A program, and what goes with it.

    Attributes:
        argv: its command line, relative to `folder`.
        folder: folder in which it starts, in the repository that is shipped.
        tpu: slice type, such as v5litepod-8; empty: that of the config.
        zone: zone of the pod; empty: that of the slice type.
        name: name of the run; empty: derived from the program.
        on_this_machine: whether it runs on emulated workers, whatever the other overrides say.
    """

    argv: tuple[str, ...]
    folder: Path
    tpu: str = ""
    zone: str = ""
    name: str = ""
    on_this_machine: bool = False

    def overrides(self, given: Sequence[str]) -> tuple[str, ...]:
        """Return the overrides of the program, followed by the user's.

        Raises:
            ConfigError: the program is not in the folder or would not be shipped, or the slice does not exist.
        """
        keys = {_key(word) for word in given}
        self._require_program(own_packages=not keys & (PACKAGE_KEYS | PATH_KEYS), certain="program.setup" not in keys)
        words = ["program=command", f"program.command={quote_words(self._started_in_folder())}"]
        if name := self.name or ("" if "run.name" in keys else program_name(self.argv)):
            words.append(f"run.name={name}")
        words += self._slice(keys, given)
        if not keys & PACKAGE_KEYS and "experiment" not in keys:
            on_this_machine = self.on_this_machine or any(f"cloud={kind}" in given for kind in HERE_CLOUDS)
            words += ["env.packages=image"] if on_this_machine else self.packages()
        elif "env.packages" not in keys and any(re.match(r"\+*env\.requirements=(?!null$)", word) for word in given):
            words.append("env.packages=requirements")
        return (*words, *given)

    def packages(self) -> list[str]:
        """Return the overrides that install what the nearest folder names: its lock, requirements or project."""
        for folder in self._folders():
            place = folder.relative_to(self._root).as_posix()
            inside = "" if place == "." else f"{place}/"
            lock = folder / "uv.lock"
            if lock.is_file() and (folder / "pyproject.toml").is_file():
                if "version" not in _toml(lock):
                    raise ConfigError(f"{lock}: is no lock of uv; run `uv lock` in its folder")
                sync = ["uv", "sync", "--frozen", "--active", "--inexact", "--no-dev", "--project", place]
                return ["env.packages=requirements", f"program.setup=[{quote_words(sync)}]", *_python(folder)]
            if (folder / "requirements.txt").is_file():
                file = f"{inside}requirements.txt"
                named = file if _is_plain(file) else quote_text(file)
                return ["env.packages=requirements", f"env.requirements={named}", *_python(folder)]
            if _project(folder):
                install = ["uv", "pip", "install", "-e", f"./{place}" if inside else "."]
                return ["env.packages=requirements", f"program.setup=[{quote_words(install)}]", *_python(folder)]
        return []

    @property
    def _root(self) -> Path:
        return repository_root(self.folder).resolve()

    def _folders(self) -> list[Path]:
        """Return the program's folder and its parents within the repository."""
        here = self.folder.resolve()
        return [here, *(folder for folder in here.parents if folder.is_relative_to(self._root))]

    def _started_in_folder(self) -> list[str]:
        """Return the command line that starts the program in its folder; workers start it in the repository's root."""
        place = self.folder.resolve().relative_to(self._root).as_posix()
        return [*self.argv] if place == "." else [*ENTER, place, *self.argv]

    def _slice(self, keys: Set[str], given: Sequence[str]) -> list[str]:
        if "cloud=here" in given and (self.tpu or self.zone):
            flag = f"--tpu {self.tpu}" if self.tpu else f"--zone {self.zone}"
            raise ConfigError(f"{flag}: cloud=here runs on this machine; leave {flag.partition(' ')[0]} out")
        if self.tpu and (twice := keys & SLICE_KEYS):
            raise ConfigError(f"--tpu {self.tpu}: {sorted(twice)[0]} is given too; remove one of them")
        if self.zone and "tpu.zone" in keys:
            raise ConfigError(f"--zone {self.zone}: tpu.zone is given too; remove one of them")
        words = slice_overrides(self.tpu, self.folder) if self.tpu else []
        if self.zone or "tpu.zone" in keys:
            words = [word for word in words if not word.startswith("tpu.zone=")]
        return [*words, *([f"tpu.zone={self.zone}"] if self.zone else [])]

    def _require_program(self, *, own_packages: bool, certain: bool) -> None:
        """Raise ConfigError unless the script that the words name is a file that will be shipped.

        own_packages: whether nothing but Slipway's packages and what the repository names is installed.
        certain: whether no command makes files first; else the check of the config warns.
        """
        if meant := shell_line(self.argv):
            raise ConfigError(f"{meant[0]}; use: slipway run -- {meant[1]}")
        bare = own_packages and not self.packages()
        problem = program_problem(self.argv, self.folder, self._root, bare=bare)
        if certain and problem:
            raise ConfigError(problem)


def quote_words(words: Sequence[str]) -> str:
    """Return words as a list in Hydra's grammar, so that each arrives byte for byte; quoted only where needed."""
    return f"[{','.join(word if _is_plain(word) else quote_text(word) for word in words)}]"


def _is_plain(word: str) -> bool:
    return PLAIN_WORD.fullmatch(word) is not None and word.lower() not in ("null", "true", "false", "nan", "inf")


def program_name(argv: Sequence[str]) -> str:
    """Return a name for the run: `train` for `python src/train.py`, `python -m lab.train` and `torchrun train.py`."""
    module = word_after(argv, "-m") if INTERPRETERS.match(Path(argv[0]).name) else None
    script = next((word for word in argv if word.endswith(SCRIPT_SUFFIXES)), argv[0])
    stem = module.rpartition(".")[2] if module else Path(script_of(argv) or script).stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower())[:MAX_NAME_LENGTH].strip("-")
    return name or "run"


def slice_overrides(accelerator_type: str, folder: Path) -> list[str]:
    """Return the overrides that choose a slice by its type or by the name of its file.

    Raises:
        ConfigError: there is no such slice; names the nearest.
    """
    wanted = usual_type(accelerator_type)
    groups = config_groups(folder / "slipway").get("tpu", [])
    for name in (accelerator_type, wanted.replace("-", "_")):
        if name in groups:
            return [f"tpu={name}"]
    try:
        topology = find_topology(wanted)
    except UnknownTypeError as error:
        raise ConfigError(f"--tpu: {error}") from None
    zones = sorted(topology.zones, key=lambda zone: (zone != DEFAULT_ZONE, not zone.startswith("us-"), zone))
    return [f"tpu.accelerator_type={wanted}", *(f"tpu.zone={zone}" for zone in zones[:1])]


def _project(folder: Path) -> dict[str, object]:
    """Return the [project] table of pyproject.toml; empty if there is none."""
    file = folder / "pyproject.toml"
    return _toml(file).get("project", {}) if file.is_file() else {}


def _toml(file: Path) -> dict[str, Any]:
    """Return what a file of TOML holds. Raises ConfigError if it is none."""
    try:
        return tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None


def _python(folder: Path) -> list[str]:
    """Return the override for the Python nearest to the default that the project accepts; none if it accepts that."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    wanted = _project(folder).get("requires-python")
    if not isinstance(wanted, str):
        return []
    try:
        accepted = [version for version in PYTHONS if SpecifierSet(wanted).contains(f"{version}.99")]
    except InvalidSpecifier:
        raise ConfigError(f"{folder / 'pyproject.toml'}: requires-python: {wanted!r} is not a version range") from None
    if not accepted:
        raise ConfigError(
            f"{folder / 'pyproject.toml'}: requires-python: none of Python {', '.join(PYTHONS)} satisfies {wanted!r}; "
            "change it, or set env.packages and env.python yourself"
        )
    usual = PYTHONS.index(default_python())
    nearest = min(accepted, key=lambda version: abs(PYTHONS.index(version) - usual))
    return [] if nearest == PYTHONS[usual] else [f'env.python="{nearest}"']


def default_python() -> str:
    """Return the Python that workers get unless `env.python` says otherwise."""
    return read_table(CONFIG_DIR / "config.yaml")["env"]["python"]


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def other_python(argv: Sequence[str], version: str) -> str:
    """Return which word names another Python than that of the packages, of this version; empty if none does."""
    named = next((word for word in argv if PYTHON.fullmatch(word)), "python")
    if named.removeprefix("python") in ("", ".".join(version.split(".")[:2])):
        return ""
    return f"{named} is not the Python of the packages, which is {version}; write python"


def may_be_newer(argv: Sequence[str], version: str) -> bool:
    """Return whether words start a program of a newer Python than this one, which may have a newer syntax."""
    is_python = Path(started(argv, Path())[0][0]).name.startswith("python")
    return is_python and sys.version_info[:2] < tuple(map(int, version.split(".")[:2]))


def python_text(argv: Sequence[str], folder: Path) -> tuple[str, Path] | None:
    """Return the text behind Python's -c, and the folder where its imports begin; None without one."""
    words, folder = started(argv, folder)
    text = word_after(words, "-c") if Path(words[0]).name.startswith("python") else None
    return (text, folder) if text and "sys.path" not in text else None
