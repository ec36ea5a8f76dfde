"""Environment: the workers get the Python, variables and trackers that the program needs."""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path, PurePath

from packaging.requirements import Requirement
from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import Version

from conf.schema.config import Config
from conf.schema.training.settings import TRACKERS
from controller.checks.names import iter_strings
from controller.checks.secrets import WANDB_KEY
from controller.config.run_yaml import PLACEHOLDER
from controller.context import Context
from controller.core.finding import Issue, check
from controller.inputs.code import NamedCode, UnfetchedSnapshot
from controller.inputs.own_program import default_python
from controller.inputs.resolved_assets import path_exists
from controller.inputs.setup_words import root_doubt
from controller.plan.build import Plan
from controller.resources.software import Venv

PROJECT_FILES = ("uv.lock", "pyproject.toml", "requirements.txt", "setup.py", "setup.cfg")
"""Files of which program.setup may install what they name."""
BRACES = re.compile(r"\$?\{+\s*[A-Za-z_][\w .-]*\}+|<[a-z_]+>|assets://[\w.-]+")
"""What may be meant to be filled in: {run_dir} in another spelling, or the address of an asset."""
OF_SHELL = re.compile(r"\$\{?[A-Z_][A-Z0-9_]*\b\}?|(?<![^\s=:])~/[\w.-]*")
"""What a shell would replace."""
ONE_SLASH = re.compile(r"(?<!\w)(gs|s3|hf):/(?!/)")
MAX_ARGUMENT_BYTES = 131_000
"""Bytes of an argument, or of a variable with its name: slightly below Linux's limit of 32 pages."""
COORDINATORS = {"JAX_COORDINATOR_ADDRESS", "COORDINATOR_ADDRESS", "MASTER_ADDR"}
"""Variables in which JAX, MaxText and torch expect the address of the first worker."""
LOCALHOST = re.compile(r"localhost|127\.|\[?::1\b|0\.0\.0\.0")
OLDEST_PYTHON = 11
"""N of the oldest Python 3.N that messages name."""
JAX_UNTIL = {8: "0.4.13", 9: "0.4.30", 10: "0.6.2", 11: "0.10.2"}
JAX_FROM = {12: "0.4.18", 13: "0.4.34", 14: "0.7.1"}
"""Last and first JAX for Python 3.N, by N, of the wheels on https://pypi.org/project/jaxlib, 2026-11-29."""
UNBOUNDED = "999"
JAX_LINE = re.compile(r"jax(lib)?(?![\w.-])", re.IGNORECASE)
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
"""Markers of a requirement that every worker meets."""


@check("requirements", "error", "env.requirements", "env.packages", "env.python", also="warning")
def requirements_are_named(config: Config) -> Iterator[Issue]:
    """A requirements venv needs its file, and a file that nothing reads is a mistake."""
    wanted = config.env.packages == "requirements"
    if wanted and config.env.requirements is None and not config.program.setup:
        yield Issue("env.packages=requirements needs a requirements file; set it, e.g. requirements.txt")
    elif not wanted and config.env.requirements is not None:
        message = f"{config.env.packages} ignores env.requirements={config.env.requirements}; use requirements"
        yield Issue(message, "env.packages")
    if config.cloud.kind == "gcp" and config.env.packages == "image" and config.env.python != default_python():
        said = "has no effect with env.packages=image, which has a Python of its own"
        yield Issue(said, "env.python", "warning")


@check("python", "error", "env.python", also="warning", of_plan=True)
def python_has_jax(plan: Plan, context: Context) -> Iterator[Issue]:
    """Each JAX is made for a few versions of Python. An old Python, such as the 3.10 of TPU VM images, gets an old JAX
    without a word if the requirements leave its version open.
    """
    del context
    for venv in (resource for resource in plan.resources if isinstance(resource, Venv)):
        if venv.packages in ("lock", "requirements"):
            whose = "the lock" if venv.packages == "lock" else "env.requirements"
            chips = plan.config.program.needs_chips and plan.config.cloud.kind == "gcp"
            yield from _jax_issues(venv.python, venv.requirements, whose, needs_chips=chips)


def _jax_issues(python: str, requirements: str, whose: str, *, needs_chips: bool) -> Iterator[Issue]:
    minor = int(python.split(".")[1])
    wanted = [*_jax_requirements(python, requirements)]
    last = JAX_UNTIL.get(max(minor, min(JAX_UNTIL)))
    refused = [line for line in wanted if not _has_jax(minor, line.specifier)]
    cures: dict[str, list[str]] = {}
    for line in refused:
        fitting = [other for other in range(OLDEST_PYTHON, max(JAX_FROM) + 1) if _has_jax(other, line.specifier)]
        nearest = min(fitting, key=lambda other: abs(other - minor), default=None)
        cure = f"use env.python=3.{nearest}" if nearest else "change it"
        ends = f"ends with {last}" if last else f"begins with {JAX_FROM[minor]}"
        cures.setdefault(f"JAX for Python 3.{minor} {ends}; {cure}", []).append(str(line))
    for line in wanted if needs_chips else ():
        if any(extra.startswith(("cuda", "rocm")) for extra in line.extras):
            yield Issue(f"{line} is JAX for GPUs, and finds no TPU; use jax[tpu]", "env.requirements")
    if minor > max(JAX_FROM) and whose == "the lock":
        told = f"no JAX for Python 3.{minor} is known here; choose one of 3.12 to 3.{max(JAX_FROM)}"
        yield Issue(told, severity="warning")
    for cure, lines in cures.items():
        yield Issue(f"{whose} wants {' and '.join(lines)}, but {cure}")
    is_open = all(line.specifier.contains(UNBOUNDED) for line in wanted) and bool(wanted or minor < OLDEST_PYTHON)
    if last and requirements and is_open and not refused:
        yield Issue(f"Python 3.{minor} silently limits JAX to {last}; choose 3.12 or later", severity="warning")


def _jax_requirements(python: str, requirements: str) -> Iterator[Requirement]:
    """Yield the lines that name JAX with its versions and are meant for this Python."""
    full = python if python.count(".") > 1 else f"{python}.0"
    where = {"python_version": ".".join(python.split(".")[:2]), "python_full_version": full, **LINUX}
    for line in requirements.splitlines():
        if not JAX_LINE.match(line):
            continue
        found = Requirement(line.split(" --")[0].rstrip(" \\"))
        if found.url is None and (found.marker is None or found.marker.evaluate(where)):
            yield found


def _has_jax(minor: int, wanted: SpecifierSet) -> bool:
    """Return whether some JAX for Python 3.`minor` may satisfy these bounds."""
    last, first = JAX_UNTIL.get(max(minor, min(JAX_UNTIL))), JAX_FROM.get(minor)
    lower = [_version(clause) for clause in wanted if clause.operator in (">=", ">", "==", "~=")]
    upper = [_above(clause) for clause in wanted if clause.operator in ("<=", "<", "==", "~=")]
    is_new_enough = last is None or wanted.contains(last) or all(version < Version(last) for version in lower)
    is_old_enough = first is None or wanted.contains(first) or all(version > Version(first) for version in upper)
    return is_new_enough and is_old_enough


def _version(clause: Specifier) -> Version:
    return Version(clause.version.removesuffix(".*"))


def _above(clause: Specifier) -> Version:
    """Return the version that a clause ends with: 0.6 for ==0.5.* and for ~=0.5.0."""
    version = _version(clause)
    release = version.release[:-1] if clause.operator == "~=" else version.release
    if clause.operator == "~=" or clause.version.endswith(".*"):
        return Version(".".join(map(str, (*release[:-1], release[-1] + 1))))
    return version


@check("trainer_packages", "error", "env.packages")
def trainer_has_jax(config: Config) -> Iterator[Issue]:
    """The bundled trainer needs the packages in its lock file; TPU VM images have no JAX. An image of your own may."""
    if config.program.kind != "trainer" or config.cloud.kind != "gcp" or "/" in (config.tpu.runtime_version or ""):
        return
    if config.env.packages in ("none", "image"):
        yield Issue(
            f"program=trainer needs JAX, which a TPU VM's image lacks, and {config.env.packages} installs nothing; "
            "choose lock"
        )


@check("trackers", "error", "logging.trackers", "logging.wandb", "env.vars.NAME", also="warning")
def trackers_are_possible(config: Config) -> Iterator[Issue]:
    """Besides its package, W&B needs a key unless it is offline, and other trackers an address."""
    wanted, section = config.logging.all_trackers, config.logging.wandb
    key = "logging.trackers" if section is None else "logging.wandb"
    mode = section.mode if section else config.env.vars.get("WANDB_MODE", "online")
    if "wandb" in wanted and mode == "online" and not _is_passed_on(config, WANDB_KEY):
        yield Issue(
            f"{WANDB_KEY} is not set; set it (https://wandb.ai/authorize), point env.secrets.{WANDB_KEY} to a "
            f"file or Secret Manager, or use {'mode: offline' if section else 'env.vars.WANDB_MODE=offline'}",
            key,
        )
    needs = {"mlflow": ("MLFLOW_TRACKING_URI", "an address"), "trackio": ("TRACKIO_SPACE_ID", "the name of a Space")}
    for name, (variable, what) in needs.items():
        if name in wanted and not _is_passed_on(config, variable):
            message = f"{name} writes to a file among the run's results, since {variable} is not set for the workers"
            cure = f"env.secrets.{variable}=env passes yours on" if os.environ.get(variable) else f"it holds {what}"
            yield Issue(f"{message}; {cure}", "logging.trackers", "warning")
    server, key = config.env.vars.get("MLFLOW_TRACKING_URI", ""), "env.vars.MLFLOW_TRACKING_URI"
    if "mlflow" in wanted and server and "://" not in server and not server.startswith(("/", "databricks", "{")):
        yield Issue(f"{server} is a folder to mlflow; an address begins with https:// or http://", key, "warning")
    elif "mlflow" in wanted and LOCALHOST.match(server.partition("://")[2]) and config.cloud.kind == "gcp":
        yield Issue(f"{server} is worker 0 itself there, not this machine; name one that it can reach", key, "warning")
    if "trackio" in wanted and _is_passed_on(config, "TRACKIO_SPACE_ID") and not _is_passed_on(config, "HF_TOKEN"):
        yield Issue("a Space needs HF_TOKEN, which is not set; set it", "logging.trackers", "warning")


def _is_passed_on(config: Config, name: str) -> bool:
    """Return whether the program gets a variable."""
    source = config.env.secrets.get(name)
    return name in config.env.vars or bool(source and (source != "env" or os.environ.get(name)))


@check("tracker_package", "error", "logging.trackers", "logging.wandb", of_plan=True)
def tracker_packages_are_installed(plan: Plan, context: Context) -> Iterator[Issue]:
    """A tracker needs its package in the program's Python; without it, a billed run goes on untracked."""
    del context
    config = plan.config
    section = config.logging.wandb
    for name in config.logging.all_trackers:
        if name not in TRACKERS or (name == "tensorboard" and config.program.kind == "trainer"):
            continue
        key = "logging.trackers" if section is None or name != "wandb" else "logging.wandb"
        for venv in (resource for resource in plan.resources if isinstance(resource, Venv)):
            if problem := _lacks_package(plan, venv, name):
                yield Issue(f"{name} needs its package, {problem}", key)


def _lacks_package(plan: Plan, venv: Venv, name: str) -> str:
    """Return why the workers lack a tracker's package, with the cure; empty if they have it, or nobody can know."""
    config = plan.config
    setup = " ".join(word for argv in config.program.setup for word in argv)
    named = [path for file, path in plan.snapshot.paths.items() if PurePath(file).name in PROJECT_FILES and setup]
    text = "\n".join([venv.requirements, setup.replace(" ", "\n"), *(path.read_text() for path in named)])
    if re.search(rf"^\W*(name = \W)?{name}\b", text, re.MULTILINE | re.IGNORECASE):
        return ""
    by_setup = f"program.setup=[[uv, pip, install, {name}]]"
    if venv.packages == "requirements":
        if isinstance(plan.snapshot, UnfetchedSnapshot | NamedCode) or venv.wheels:
            return ""
        return f"which is not in env.requirements; add it, or use {by_setup}"
    if venv.packages == "lock":
        return f"which env.packages=lock lacks; use {by_setup}"
    if config.cloud.kind == "gcp":
        own_image = "/" in (config.tpu.runtime_version or "")
        return "" if own_image else f"which the image of the workers lacks; use {by_setup}"
    if find_spec(name) is not None:
        return ""
    return f"which this machine lacks, whose packages the workers use: pip install {name}"


WELL_KNOWN = (
    *("JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DEBUG_NANS", "JAX_LOG_COMPILES", "JAX_DISABLE_JIT", "XLA_FLAGS"),
    *("JAX_COMPILATION_CACHE_DIR", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_COORDINATOR_ADDRESS", "LIBTPU_INIT_ARGS"),
    *("TPU_STDERR_LOG_LEVEL", "TPU_MIN_LOG_LEVEL", "TF_CPP_MIN_LOG_LEVEL", "PJRT_DEVICE", "HF_TOKEN", "HF_HOME"),
    *("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_MODE", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
)
"""Variables that JAX and what runs beside it read."""


@check("platforms", "error", "env.vars.NAME", also="warning")
def jax_finds_its_platform(config: Config) -> Iterator[Issue]:
    """JAX fails without a platform that JAX_PLATFORMS names: https://docs.jax.dev/en/latest/config_options.html."""
    for name in sorted(config.env.vars.keys() - {*WELL_KNOWN}):
        if near := difflib.get_close_matches(name.upper(), WELL_KNOWN, n=1, cutoff=0.92):
            yield Issue(
                f"neither JAX nor what runs beside it reads it; did you mean {near[0]}?", f"env.vars.{name}", "warning"
            )
    for variable in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        named = {name.strip() for name in config.env.vars.get(variable, "").split(",")} - {""}
        key, here = f"env.vars.{variable}", config.cloud.kind != "gcp"
        if others := sorted(named - {"tpu", "cpu"}):
            if config.cloud.kind != "here":
                has = "emulated workers have CPUs only" if here else "a TPU VM has tpu and cpu only"
                yield Issue(f"{others[0]}: {has}, and JAX would fail; leave it out", key)
        elif named == {"cpu"} and not here and config.program.needs_chips:
            yield Issue("cpu leaves the TPU chips unused, which are billed; leave it out", key, "warning")
        elif "tpu" in named and config.cloud.kind == "local":
            yield Issue("tpu: emulated workers have CPUs only, and JAX would fail; leave it out", key, "warning")


@check("coordinator", "warning", "env.vars.NAME")
def coordinator_is_one_worker(config: Config) -> Iterator[Issue]:
    """Localhost is another machine on each worker."""
    for name in sorted(COORDINATORS & config.env.vars.keys()) if config.topology.workers > 1 else ():
        if LOCALHOST.match(config.env.vars[name]):
            told = f"is another machine on each of the {config.topology.workers} workers, which would wait for the rest"
            yield Issue(f"{config.env.vars[name]} {told}; leave it out: on TPUs JAX finds them", f"env.vars.{name}")


@check("long_word", "error", "env.vars.NAME", "program.command", "program.setup")
def arguments_fit_a_process(config: Config) -> Iterator[Issue]:
    """Linux limits the length of arguments and variables: https://man7.org/linux/man-pages/man2/execve.2.html."""
    plain = config.model_dump(mode="json", include={"env": {"vars"}, "program": {"command", "setup"}})
    for key, text in iter_strings(plain, ""):
        if len(text.encode()) > MAX_ARGUMENT_BYTES:
            size = len(text.encode())
            yield Issue(f"has {size} bytes, but the limit is {MAX_ARGUMENT_BYTES}; put it into a file", key)


@check("unexpanded", "warning", "env.vars.NAME", "program.command", "program.setup")
def no_shell_is_needed(config: Config) -> Iterator[Issue]:
    """No shell reads variables and the program's words, so `$NAME` and `~` stay as they are."""
    for key, text in _given_texts(config):
        if found := OF_SHELL.search(text):
            cure = "bash -c '…' has a shell" if key.startswith("program.") else "write what it stands for"
            cure = "leave it out, since the worker's own PATH follows" if found[0] == "$PATH" == f"${key[9:]}" else cure
            yield Issue(f"{found[0]} stays as it is, since no shell reads it; {cure}", key)


@check("unlike_here", "warning", "env.vars.NAME", "program.command", "program.setup", "ssh.user")
def words_suit_workers(config: Config) -> Iterator[Issue]:
    """Workers lack this machine's paths and root's rights, and nobody answers there. `gs:/` is no address."""
    if config.cloud.kind != "here" and config.ssh.user == "root":
        yield Issue("Google's images let nobody log in as root; name another, who can use sudo", "ssh.user")
    for key, argv in _commands(config) if config.cloud.kind != "here" and config.ssh.user != "root" else ():
        if argv and (doubt := root_doubt(argv)):
            yield Issue(doubt, key)
    for key, text in _given_texts(config):
        if found := ONE_SLASH.search(text):
            yield Issue(f"{found[0]}… lacks a slash; write {found[1]}://", key)
        elif config.cloud.kind == "gcp" and (found := _own_path(text, config.ssh.user)):
            told = f"{found} is a path of this machine, which the workers lack"
            yield Issue(f"{told}; name one in the repository, or an asset", key)


def _commands(config: Config) -> list[tuple[str, tuple[str, ...]]]:
    """Return the words that start programs, by their keys."""
    return [("program.command", config.program.command), *(("program.setup", argv) for argv in config.program.setup)]


def _given_texts(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what no shell reads, by its key: variables, and the words that start programs."""
    yield from ((f"env.vars.{name}", value) for name, value in config.env.vars.items())
    for key, argv in _commands(config):
        yield from ((key, word) for option, word in pairwise(("", *argv)) if not re.fullmatch("-[a-z]*c", option))


def _own_path(text: str, user: str) -> str:
    """Return the first path of this machine's home or working folder; empty if there is none.

    It exists here, and workers have no such folder.
    """
    folders = {Path.cwd(), Path.home()} - {Path("/"), Path("/root"), Path("/home", user)}
    for part in re.split(r"[\s,;'\"=]+", text):
        is_own = part.startswith("/") and not folders.isdisjoint(Path(part).parents)
        if is_own and ":" not in part and path_exists(Path(part)):  # HOST:CONTAINER, or a list of folders
            return part
    return ""


@check("variable_reserved", "error", "env.vars.NAME")
def variables_are_not_reserved(config: Config) -> Iterator[Issue]:
    """Variables that slipway sets override secrets and variables of the same name."""
    for name in config.env.vars:
        if name.startswith("SLIPWAY_"):
            yield Issue("names that start with SLIPWAY_ are reserved; choose another", f"env.vars.{name}")


@check("asset_named", "error", "env.vars.NAME", "program.command", "program.setup", also="warning")
def placeholders_name_assets(config: Config) -> Iterator[Issue]:
    """`{assets.models.NAME}` becomes the URL of the asset's copy in the bucket, so the asset must exist."""
    known = {f"assets.{kind}s.{name}" for kind, name, _ in config.assets.iter_assets()}
    places = ("bucket", "run_id", "run_dir", *known)
    texts = {f"env.vars.{name}": value for name, value in config.env.vars.items()}
    texts["program.command"] = " ".join(config.program.command)
    texts["program.setup"] = " ".join(word for argv in config.program.setup for word in argv)
    for key, text in texts.items():
        for word in PLACEHOLDER.findall(text):
            if word.startswith("assets.") and word not in known:
                choices = ", ".join(sorted(known)) or "none"
                yield Issue(f"{{{word}}}: no such asset; choices: {choices}", key)
        for word in {*BRACES.findall(text)}:
            meant = next(iter(_meant_places(word, places)), "")
            if meant and word != meant:
                said = (
                    f"{word}: write {meant} alone" if meant in word else f"{word} stays as it is; did you mean {meant}?"
                )
                yield Issue(said, key, "warning")
            elif word.startswith("{assets.") and not PLACEHOLDER.fullmatch(word):
                yield Issue(f"{word} stays as it is; choices: {', '.join(sorted(places))}", key, "warning")


def _meant_places(word: str, places: Sequence[str]) -> Iterator[str]:
    """Yield the placeholders that a word may mean in another spelling, or by the name of an asset."""
    plain = {re.sub(r"[\W_]+", "", place): f"{{{place}}}" for place in places}
    yield from (
        plain[near] for near in difflib.get_close_matches(re.sub(r"[\W_]+", "", word.lower()), plain, cutoff=0.7)
    )
    parts = re.split(r"\W+", word.strip("${}<> "))
    yield from (place for place in plain.values() if parts[1:] and place[1:-1].split(".")[2:] == parts[-1:])
