"""Machines: this one has the programs, the disk space and the SSH config that a run needs; the workers' disks suffice.

With `cloud=here`, this one has the devices, and its Python the JAX that uses them.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from conf.schema.cloud import HereCloud
from conf.schema.config import Config
from conf.xla_flags import VARIABLES, complaint, ignored_words
from controller.checks.input_hugging_face import COMMANDS, HubSource, download_bytes, free_here, hub_sources
from controller.config.this_machine import Devices, find_devices
from controller.context import Context, format_size
from controller.core.errors import ConfigError
from controller.core.finding import Issue, check
from controller.core.text import plural
from controller.inputs.download import part_path, search_path
from controller.inputs.resolved_assets import ALWAYS_SKIPPED, path_exists
from controller.plan.build import Plan, missing_assets
from controller.plan.worker_steps import fetched_on_pod
from controller.resources.software import Venv
from controller.ssh.ssh_config import HostConfig, parse_hop

GB = 1e9
BOOT_DISK_GB = 100
"""Boot disk of a TPU VM: https://cloud.google.com/tpu/docs/attach-durable-block-storage."""
EXAMPLE_HOSTS = ("10.128.0.2", "192.0.2.2")
"""Addresses as workers may have them, inside a network and outside (RFC 5737)."""
MAX_FILES = 100_000
"""Files of an asset above which a plan warns, and stops to count."""
INSTALL = dict.fromkeys(COMMANDS, "pip install huggingface_hub") | {
    "gcloud": "https://cloud.google.com/sdk/docs/install",
    "git": "https://git-scm.com/downloads",
    "uv": "pip install uv",
}
JAX_INSTALL = {"gpu": "pip install 'jax[cuda13]'", "tpu": "pip install 'jax[tpu]'"}
PLUGINS = {
    "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin", "jax-rocm60-plugin"),
    "tpu": ("libtpu", "libtpu-nightly"),
}
"""Distributions with JAX's plugin for a backend, the usual one first."""


@check("tool", "error", "assets.KIND.NAME.build", "env.requirements", of_plan=True)
def programs_are_installed(plan: Plan, context: Context) -> Iterator[Issue]:
    """A build that cannot start, or a requirement that needs git, stops `up` halfway."""
    for asset in missing_assets(plan, context):
        recipe = asset.recipe
        if recipe is None or recipe.output.is_dir() or fetched_on_pod(plan.config, asset):
            continue
        words = [recipe.argv[0], *(word for word in COMMANDS if word in " ".join(recipe.argv[1:]).split())]
        for word in dict.fromkeys(words):
            if shutil.which(word, path=search_path()) is None and not path_exists(recipe.root / word):
                yield Issue(_not_installed(word), f"assets.{asset.path}.build")
    if _has_git_requirements(plan) and shutil.which("git") is None:
        yield Issue(_not_installed("git"), "env.requirements")


@check("laptop_disk", "error", "assets.KIND.NAME.build", "assets.KIND.NAME.files.FILE.url", also="note", of_plan=True)
def downloads_fit(plan: Plan, context: Context) -> Iterator[Issue]:
    """Downloads go through run.state_dir on this machine, and a full disk ends them after hours."""
    elsewhere = tuple(f"assets.{asset.path}." for asset in plan.assets if fetched_on_pod(plan.config, asset))
    sizes = Counter[str]()
    for source in hub_sources(plan, context):
        if not source.key.startswith(elsewhere):
            sizes[source.key] += _bytes_to_come(source)
    folder, free = free_here(plan)
    if sizes.total() > free:
        largest = max(sizes, key=lambda key: sizes[key])
        size = format_size(sizes.total())
        message = f"{size} are downloaded to {folder}, which has {format_size(free)} free"
        yield Issue(f"{message}; free some space, or set run.state_dir to a folder on a larger disk", largest)


@check("flags", "error", "env.vars.NAME", of_plan=True)
def flags_are_known(plan: Plan, context: Context) -> Iterator[Issue]:
    """At a flag that it does not know, jaxlib ends a program without an exception. This machine's jaxlib is asked if
    the pod gets the same one; else the trainer asks when it starts. libtpu alone knows the flags of LIBTPU_INIT_ARGS.
    """
    del context
    for name in VARIABLES:
        flags, key = plan.config.env.vars.get(name, ""), f"env.vars.{name}"
        try:
            ignored = ignored_words(flags)
        except ValueError as error:
            yield Issue(str(error), key)
            continue
        if ignored:
            yield Issue(f"flags begin with --, and {' '.join(ignored)} would be ignored; correct or remove it", key)
        elif name == "XLA_FLAGS" and flags.startswith("--") and _has_jaxlib_of(plan) and (said := _refusal(flags)):
            yield Issue(said, key)


def _has_jaxlib_of(plan: Plan) -> bool:
    """Return whether the run gets the jaxlib that this Python has, as far as that is known before it starts."""
    venv = next((resource for resource in plan.resources if isinstance(resource, Venv)), None)
    if venv is None or venv.packages == "none":
        return False
    if venv.packages == "image":
        return plan.config.program.kind == "trainer" and plan.config.cloud.kind != "gcp"
    pinned = re.search(r"^jaxlib==([^\s;]+)", venv.requirements, re.MULTILINE)
    return pinned is not None and pinned[1] == version("jaxlib")


@cache
def _refusal(flags: str) -> str:
    """Return what this Python's jaxlib says against XLA_FLAGS; empty if nothing."""
    parse = "from jaxlib import xla_client; xla_client.CompileOptions()"
    environment = os.environ | {"XLA_FLAGS": flags}
    ended = subprocess.run([sys.executable, "-c", parse], env=environment, capture_output=True, text=True, check=False)
    return complaint(ended.stderr, version("jaxlib")) if ended.returncode else ""


@check("ssh_config", "error", "ssh.method", also="warning", live=True, of_pods=True)
def ssh_config_can_be_read(config: Config, context: Context) -> Iterator[Issue]:
    """A mistake in ~/.ssh/config would be noticed when the first worker of a billed pod is reached."""
    if config.cloud.kind == "local":  # which brings an SSH config of its own
        return
    logins: list[tuple[str, str | None, int | None]] = [(host, config.ssh.user, None) for host in EXAMPLE_HOSTS]
    for host, user, port in logins:  # it grows by the gateways
        reader = HostConfig(None, user, port)
        try:
            hops = reader.lookup(host).get("proxyjump")
            logins += [hop for hop in map(parse_hop, hops.split(",") if hops else ()) if hop not in logins]
            if unused := reader.unused(host):
                yield Issue(
                    f"the SSH config says {', '.join(unused)} for {host}, which Slipway does not do", severity="warning"
                )
        except ConfigError as error:
            yield Issue(str(error))
            return


@check("worker_disk", "error", "env.min_free_gb", "assets.KIND.NAME.path", also="warning", of_pods=True)
def workers_disks_suffice(config: Config) -> Iterator[Issue]:
    """A TPU VM's boot disk has 100 GB, and nothing that is larger can be kept there."""
    if config.cloud.kind == "local":
        return
    if config.env.min_free_gb >= BOOT_DISK_GB:
        yield Issue(f"a worker's boot disk has {BOOT_DISK_GB} GB in all; set a smaller value")
    room = int((BOOT_DISK_GB - config.env.min_free_gb) * GB) if config.tpu.data_disk_gb is None else None
    for kind, name, asset in config.assets.iter_assets() if config.program.kind == "command" else ():
        if asset.path is None:
            continue
        size, files, complete = _measure_folder(Path(asset.path).expanduser(), room)
        more = "" if complete else "more than "
        if room is not None and size > room:
            message = (
                f"{more}{size / GB:.0f} GB do not fit on a worker's boot disk of {BOOT_DISK_GB} GB; read them from"
            )
            advice = f"{message} the bucket as they are needed" + (
                ", or set tpu.data_disk_gb" * (config.topology.workers == 1)
            )
            yield Issue(advice, f"assets.{kind}s.{name}.path", "warning")
        elif files > MAX_FILES:
            message = (
                f"more than {MAX_FILES:,} files, and each is hashed and uploaded by itself; pack them into larger files"
            )
            yield Issue(f"{message}, or set it to a smaller folder", f"assets.{kind}s.{name}.path", "warning")


def _bytes_to_come(source: HubSource) -> int:
    part = part_path(source.local) if source.local is not None else None
    here = part.stat().st_size if part is not None and part.is_file() else 0
    return max((download_bytes(source) or 0) - here, 0)


def _not_installed(word: str) -> str:
    how = f" ({INSTALL[word]})" if word in INSTALL else ""
    return f"{word} is not installed on this machine, or not on PATH; install it{how}"


def _has_git_requirements(plan: Plan) -> bool:
    from controller.resources.uploads.archives import Wheels

    return any(isinstance(resource, Wheels) for resource in plan.resources)


def _measure_folder(path: Path, room: int | None) -> tuple[int, int, bool]:
    """Return the bytes and the number of files at a path, and whether these are all.

    A folder with everything, such as a home, would take minutes: counting ends beyond `room` bytes or MAX_FILES files.
    """
    if not path_exists(path):
        return 0, 0, True  # `asset_here` reports it
    if path.is_file():
        return path.stat().st_size, 1, True
    size = files = 0
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name not in ALWAYS_SKIPPED]
        for name in names:
            file = Path(folder, name)
            if name not in ALWAYS_SKIPPED and file.is_file():
                files, size = files + 1, size + file.stat().st_size
        if files > MAX_FILES or (room is not None and size > room):
            return size, files, False
    return size, files, True


@check("here_devices", "error", "cloud.backend", "cloud.devices")
def devices_are_here(config: Config) -> Iterator[Issue]:
    """Without the devices that the run names, JAX would fail, or run on the CPU without a word."""
    cloud = config.cloud
    if isinstance(cloud, HereCloud) and cloud.backend != "cpu":
        yield from missing_devices(cloud, find_devices())


def missing_devices(cloud: HereCloud, found: Devices) -> Iterator[Issue]:
    """Yield what a backend other than cpu lacks on a machine with these devices."""
    count = found.count(cloud.backend)
    if cloud.backend == "gpu" and found.told == "rocm":
        return  # AMD's devices are not counted
    if not count:
        where = {
            "gpu": "no NVIDIA GPU: /dev has no nvidia0, or CUDA_VISIBLE_DEVICES hides it. Does `nvidia-smi` list it? "
            "A container needs --gpus all",
            "tpu": "no TPU: neither /dev/accel* nor /dev/vfio/* is one. A container needs --privileged",
        }
        yield Issue(f"this machine has {where[cloud.backend]}; cloud.backend=cpu runs without")
    elif max(cloud.indices) >= count:
        listed = ", ".join(map(str, cloud.indices))
        noun = "GPU" if cloud.backend == "gpu" else "TPU device"
        yield Issue(
            f"this machine has {plural(count, noun)}, numbered from 0, but {listed} is asked for", "cloud.devices"
        )


@check("here_folder", "error", "cloud.folder")
def folder_is_writable(config: Config) -> Iterator[Issue]:
    """Records are written there."""
    cloud = config.cloud
    if not isinstance(cloud, HereCloud) or cloud.folder is None:
        return
    folder = Path(cloud.folder).expanduser()
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not there.is_dir():
        yield Issue(f"{there} is {'a file' if there.exists() else 'a link to nothing'}; name a folder")
    elif not os.access(there, os.W_OK):
        yield Issue(f"nothing can be written to {there}; name another folder")


@check("here_jax", "error", "cloud.backend", "cloud.python", also="warning")
def jax_is_here(config: Config) -> Iterator[Issue]:
    """A backend needs its plugin of JAX: without it, JAX runs on the CPU or fails."""
    cloud = config.cloud
    if not isinstance(cloud, HereCloud) or cloud.python != "current":
        return
    yield from missing_packages(config.program.kind == "trainer", cloud.backend, installed_jax(), dict(os.environ))


def installed_jax() -> dict[str, str]:
    """Return the versions of JAX and its plugins in the Python that runs Slipway."""
    found: dict[str, str] = {}
    for name in ("jax", "jaxlib", *(name for names in PLUGINS.values() for name in names)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def missing_packages(
    needs_jax: bool, backend: str, versions: dict[str, str], environment: dict[str, str]
) -> Iterator[Issue]:
    """Yield what a program lacks among these packages; only the bundled trainer certainly needs JAX."""
    severity = None if needs_jax else "warning"
    if "jax" not in versions or "jaxlib" not in versions:
        if needs_jax:
            absent = "JAX" if "jax" not in versions else "jaxlib"
            command = JAX_INSTALL.get(backend, "pip install jax")
            yield Issue(
                f"the Python that runs Slipway has no {absent}: run `{command}`, or set cloud.python=env",
                "cloud.python",
            )
        return
    plugins = PLUGINS.get(backend, ())
    if not plugins or any(name in versions for name in plugins):
        return
    if backend == "tpu" and "TPU_LIBRARY_PATH" in environment:
        return
    what = "plugin for CUDA" if backend == "gpu" else "libtpu"
    older = " (`jax[cuda12]` for a driver older than 580)" if backend == "gpu" else ""
    yield Issue(
        f"JAX {versions['jax']} is installed without its {what}: run `{JAX_INSTALL[backend]}`{older}, or set "
        "cloud.backend=cpu",
        severity=severity,
    )


@check("here_bastion", "error", "recovery.driver")
def laptop_drives(config: Config) -> Iterator[Issue]:
    """Without a cloud there is no second machine to take over a run."""
    if config.cloud.kind == "here" and config.recovery.driver == "bastion":
        yield Issue("a bastion is a VM on Google Cloud; with cloud=here set it to laptop")


@check("here_lock", "error", "cloud.python")
def lock_serves_the_backend(config: Config) -> Iterator[Issue]:
    """The bundled lock is that of TPU VMs: on a GPU, JAX would have no plugin."""
    cloud = config.cloud
    if not isinstance(cloud, HereCloud) or cloud.python != "env" or cloud.backend != "gpu":
        return
    if config.env.packages == "lock":
        yield Issue(
            "the bundled lock has no CUDA plugin: set it to current, or set env.packages=requirements and "
            "env.requirements to a file with jax[cuda13]"
        )
