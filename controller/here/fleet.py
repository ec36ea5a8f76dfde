"""The one worker of `cloud=here`: this machine, with the devices of one pod."""

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

from conf.schema.infra.cloud import HereCloud
from controller.config.this_machine import JAX_NAMES, Devices, find_devices
from controller.here.link import HERE, LocalLink
from controller.ssh.agent_link import build_bundle
from controller.ssh.connect import ConnectionParams
from controller.ssh.fleet import Fleet

PROBES = ("devices.json", "health.json")
"""What the agent remembers of the devices until the next boot."""
COMPUTE_ENGINE = Path("/sys/class/dmi/id/product_name")
PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""JAX_PLATFORMS by backend: JAX fails without the first one, where it would fall back to the CPU by itself."""


def open_fleet(cloud: HereCloud, state: Path) -> Fleet:
    """Return the connection to this machine's agent for the devices of `cloud`, a resolved one."""
    root = state / "here" / cloud.pod_name
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = agent_environment(cloud, root, os.environ, find_devices())
    write_python(root / "bin", sys.executable)
    _forget_old_probes(root, environment)
    params = ConnectionParams(cloud.pod_name, "", Path(), [HERE], lambda: ())
    return Fleet(params, links=[LocalLink(root, [sys.executable], environment, build_bundle())])


def agent_environment(cloud: HereCloud, root: Path, environment: Mapping[str, str], found: Devices) -> dict[str, str]:
    """Return the variables of the agent and of programs: the user's own, the devices, and where the agent lives."""
    indices, backend = cloud.indices, cloud.backend
    made = dict(environment)
    if made.get("MPLBACKEND", "").startswith("module://"):
        del made["MPLBACKEND"]  # of a notebook's kernel
    made |= {
        "SLIPWAY_AGENT_ROOT": str(root),
        "PATH": os.pathsep.join([str(root / "bin"), str(Path(sys.executable).parent), made.get("PATH", os.defpath)]),
    }
    if JAX_NAMES.get(found.told) != backend:
        made["JAX_PLATFORMS"] = PLATFORMS[backend]
    if backend == "cpu":
        made["JAX_NUM_CPU_DEVICES"] = str(len(indices))
    elif len(indices) < found.count(backend) or indices != tuple(range(len(indices))):
        made |= _some_devices(backend, indices, found)
    if backend != "tpu":
        made["SLIPWAY_SYSFS"] = str(root / "no-sysfs")  # huge pages are a matter of TPU VMs
    if not _is_google_vm():
        made["SLIPWAY_NO_METADATA"] = "1"
    if backend != "cpu":
        locks = [root.parent / "locks" / f"{backend}-{index}" for index in indices]
        made["SLIPWAY_DEVICE_LOCKS"] = os.pathsep.join(map(str, locks))
    return made


def _some_devices(backend: str, indices: tuple[int, ...], found: Devices) -> dict[str, str]:
    """Return variables that show a program only some of the devices.

    For TPUs: https://docs.cloud.google.com/tpu/docs/jax-quickstart-tpu-vm, one process per chip.
    """
    if backend == "gpu":
        names = found.visible or tuple(map(str, range(max(indices) + 1)))
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[i] if i < len(names) else str(i) for i in indices)}
    bounds = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"} if len(indices) == 1 else {}
    return {"TPU_VISIBLE_CHIPS": ",".join(map(str, indices)), **bounds}


def write_python(folder: Path, python: str) -> None:
    """Write `python` and `python3` that run this interpreter; a link would not be in its virtual environment."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n'
    for name in ("python", "python3"):
        file = folder / name
        if not file.is_file() or file.read_text() != text:
            draft = folder / f".{name}.{os.getpid()}"
            draft.write_text(text)
            draft.chmod(0o700)
            draft.replace(file)


def _forget_old_probes(root: Path, environment: Mapping[str, str]) -> None:
    """Have the devices probed again after JAX or the variables that it reads have changed."""
    versions = {
        name: each.version
        for each in distributions()
        if (name := each.metadata["Name"].lower()).startswith("jax") or name.startswith("libtpu")
    }
    told = {key: environment[key] for key in sorted(environment) if key.startswith(("JAX_", "CUDA_", "TPU_", "XLA_"))}
    facts = json.dumps([sys.executable, sorted(versions.items()), told])
    mark, digest = root / "probed", hashlib.sha256(facts.encode()).hexdigest()
    if mark.is_file() and mark.read_text() == digest:
        return
    for name in PROBES:
        (root / name).unlink(missing_ok=True)
    mark.write_text(digest)


def _is_google_vm() -> bool:
    try:
        return "Google" in COMPUTE_ENGINE.read_text()
    except OSError:
        return False
