"""A program given as words, not as a config: `slipway run -- python train.py` becomes overrides of `program=command`.

The same words in the same folder give the same overrides, so they mean the same run.
"""

import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import yaml

from conf.schema.topology import UnknownTypeError, find_topology
from controller.config.compose import CONFIG_DIR, config_groups, quote_text
from controller.core.errors import ConfigError
from controller.core.text import nearest_names
from controller.inputs.git import repository_root, run_git
from controller.inputs.modules import is_importable

INTERPRETERS = re.compile(r"^(python[\d.]*|bash|sh|dash|zsh)$")
VALUED_OPTIONS = ("-X", "-W")
"""Options of an interpreter that take the next word."""
SCRIPT_SUFFIXES = (".py", ".sh", ".bash", ".pl", ".jl")
PACKAGE_KEYS = frozenset({"env.packages", "env.requirements", "program.setup"})
PATH_KEYS = frozenset({"env.vars.PYTHONPATH", "env.vars.PATH", "experiment"})
"""Keys that may let a worker find what this machine does not."""
SLICE_KEYS = frozenset({"tpu", "tpu.accelerator_type"})
HERE_CLOUDS = ("local", "here")
"""Clouds on this machine: their workers use its packages, without a download."""
PLAIN_WORD = re.compile(r"-{0,2}[A-Za-z][\w./-]*", re.ASCII)
"""A word that Hydra's grammar takes for a text."""
SHELL_OPERATORS = frozenset(["&&", "||", "|", ";", "&", ">", ">>", "<", "<<", "<<<", "2>", "2>>", "2>&1", "&>", "|&"])
SHELL_WORDS = SHELL_OPERATORS | {
    *(".", "alias", "case", "cd", "do", "done", "elif", "else", "eval", "exec", "export", "fi", "for", "function"),
    *("if", "local", "popd", "pushd", "read", "set", "shift", "shopt", "source", "then", "trap", "ulimit", "umask"),
    *("unset", "until", "wait", "while"),
}
"""What a shell does itself; there is no such program. Builtins that are programs too, as `test`, are not among them."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
ON_WORKERS = frozenset(
    ["env", "nohup", "nice", "ionice", "stdbuf", "timeout", "time", "taskset", "numactl", "setsid", "xargs", "sudo"]
) | {"make", "gcloud", "gsutil", "docker", "uv", "uvx", "git", "curl", "nproc", "lscpu", "free"}
"""Programs that a TPU VM's image has, or Slipway puts there, whether this machine has them or not."""
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
        self._require_program(own_packages=not keys & (PACKAGE_KEYS | PATH_KEYS))
        words = ["program=command", f"program.command={quote_words(self._started_in_folder())}"]
        if name := self.name or ("" if "run.name" in keys else program_name(self.argv)):
            words.append(f"run.name={name}")
        words += self._slice(keys, given)
        if not keys & PACKAGE_KEYS and "experiment" not in keys:
            on_this_machine = self.on_this_machine or any(f"cloud={kind}" in given for kind in HERE_CLOUDS)
            words += ["env.packages=image"] if on_this_machine else self.packages()
        return (*words, *given)

    def packages(self) -> list[str]:
        """Return the overrides that install what the nearest folder names: its lock, requirements or project."""
        for folder in self._folders():
            place = folder.relative_to(self._root).as_posix()
            inside = "" if place == "." else f"{place}/"
            if (folder / "uv.lock").is_file() and (folder / "pyproject.toml").is_file():
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
        enter = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", place]
        return [*self.argv] if place == "." else [*enter, *self.argv]

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

    def _require_program(self, *, own_packages: bool) -> None:
        """Raise ConfigError unless the script that the words name is a file that will be shipped.

        own_packages: whether nothing but Slipway's packages and what the repository names is installed.
        """
        if not self.argv[0].strip():
            raise ConfigError("the program's name is empty; use: slipway run -- python train.py")
        if meant := shell_line(self.argv):
            raise ConfigError(f"{meant[0]}; use: slipway run -- {meant[1]}")
        script = _script(self.argv)
        if script is None:
            if own_packages and not self.packages():
                self._require_installed()
            return
        path = self.folder / script
        if Path(script).is_absolute():
            if path.resolve().is_relative_to(self._root):
                raise ConfigError(f"{script}: the workers do not have this path; name it relative to {self.folder}")
            return  # such as /usr/bin/env, which a worker has
        if not path.resolve().is_relative_to(self._root):
            raise ConfigError(f"{script}: is outside {self._root}, which is what the workers get")
        if not path.is_file():
            siblings = {entry.name for entry in path.parent.iterdir()} if path.parent.is_dir() else set[str]()
            near = nearest_names(path.name, {name for name in siblings if name.endswith(SCRIPT_SUFFIXES)})
            raise ConfigError(f"{script}: there is no such file in {self.folder}; there are {near or 'no programs'}")
        if run_git(["check-ignore", "--quiet", script], self.folder).returncode == 0:
            raise ConfigError(f"{script}: is ignored by git, so the workers would not get it; see .gitignore")

    def _require_installed(self) -> None:
        """Raise ConfigError for a program or module that the folder and this machine lack: nothing installs it."""
        first, cure = self.argv[0], "name the packages that have it with env.requirements=FILE"
        if not INTERPRETERS.match(Path(first).name):
            beside = Path(sys.executable).parent / first
            if "/" not in first and first not in ON_WORKERS and not beside.exists() and not shutil.which(first):
                raise ConfigError(
                    f"{first}: there is no such program on this machine or among Slipway's packages; {cure}, or its "
                    f"path on the workers, such as /usr/bin/{first}"
                )
            return
        module = _after(self.argv, "-m")
        if module is None or not re.fullmatch(r"\w+(\.\w+)*", module):
            return
        top, *inner = module.split(".")
        if not (self.folder / top).is_dir():
            if not (self.folder / f"{top}.py").is_file() and not is_importable(top):
                raise ConfigError(f"-m {module}: {self.folder} has no {top}, nor have Slipway's packages; {cure}")
            return
        target = self.folder.joinpath(top, *inner)
        file = target / "__main__.py" if target.is_dir() else target.with_suffix(".py")
        if not file.is_file():
            raise ConfigError(f"-m {module}: there is no {file.relative_to(self.folder)} in {self.folder}")


def shell_line(argv: Sequence[str]) -> tuple[str, str] | None:
    """Return why words are a line for a shell, and what to write after `--`; None if they start a program."""
    first = argv[0]
    if len(argv) == 1 and len(first.split()) > 1:
        try:
            words = shlex.split(first)
        except ValueError:
            words = []
        plain = words and not shell_line(words) and not set(first) & set("$`*?~\n")
        return f"{first!r} is one word, and no program's name", shlex.join(words if plain else ["bash", "-c", first])
    line = " ".join(word if word in SHELL_WORDS or word == first else shlex.quote(word) for word in argv)
    if len(first.split()) > 1:
        return f"{first!r} is no program's name", shlex.join(["bash", "-c", line])
    if ASSIGNMENT.match(first):
        return f"{first} is no program; `env` sets variables", shlex.join(["env", *argv])
    of_shell = [first] if first in SHELL_WORDS else [word for word in argv[:-1] if word in SHELL_OPERATORS]
    if of_shell:  # the last word may be the `;` of find
        return f"{of_shell[0]} is for a shell, and no shell reads these words", shlex.join(["bash", "-c", line])
    return None


def quote_words(words: Sequence[str]) -> str:
    """Return words as a list in Hydra's grammar, so that each arrives byte for byte; quoted only where needed."""
    return f"[{','.join(word if _is_plain(word) else quote_text(word) for word in words)}]"


def _is_plain(word: str) -> bool:
    return PLAIN_WORD.fullmatch(word) is not None and word.lower() not in ("null", "true", "false", "nan", "inf")


def program_name(argv: Sequence[str]) -> str:
    """Return a name for the run: `train` for `python src/train.py`, `python -m lab.train` and `torchrun train.py`."""
    module = _after(argv, "-m") if INTERPRETERS.match(Path(argv[0]).name) else None
    script = next((word for word in argv if word.endswith(SCRIPT_SUFFIXES)), argv[0])
    stem = module.rpartition(".")[2] if module else Path(_script(argv) or script).stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower())[:MAX_NAME_LENGTH].strip("-")
    return name or "run"


def slice_overrides(accelerator_type: str, folder: Path) -> list[str]:
    """Return the overrides that choose a slice by its type or by the name of its file.

    Raises:
        ConfigError: there is no such slice; names the nearest.
    """
    wanted = accelerator_type.replace("v5e-", "v5litepod-")
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


def _script(argv: Sequence[str]) -> str | None:
    """Return the file that the words start; None if they start a module, a text or a program of the worker."""
    if not INTERPRETERS.match(Path(argv[0]).name):
        return argv[0] if "/" in argv[0] else None
    words = iter(argv[1:])
    for word in words:
        if word in ("-m", "-c", "-"):
            return None
        if word in VALUED_OPTIONS:
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def _after(argv: Sequence[str], option: str) -> str | None:
    """Return the word after an interpreter's option."""
    at = list(argv).index(option) if option in argv else len(argv)
    return next(iter(argv[at + 1 :]), None) if _script(argv) is None else None


def _project(folder: Path) -> dict[str, object]:
    """Return the [project] table of pyproject.toml; empty if there is none."""
    file = folder / "pyproject.toml"
    try:
        return tomllib.loads(file.read_text()).get("project", {}) if file.is_file() else {}
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
    usual = PYTHONS.index(yaml.safe_load((CONFIG_DIR / "config.yaml").read_text())["env"]["python"])
    nearest = min(accepted, key=lambda version: abs(PYTHONS.index(version) - usual))
    return [] if nearest == PYTHONS[usual] else [f'env.python="{nearest}"']


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
