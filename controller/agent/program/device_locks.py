"""Locks on devices of a machine without a pod, where several agents may start programs at the same time.

A program inherits the locked files, so the kernel releases a lock when the last of its processes has ended.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ..fs import AgentError

VARIABLE = "SLIPWAY_DEVICE_LOCKS"
"""Names one file per device, separated by `:`; without it nothing is locked."""


def lock_devices(run_id: str) -> list[int]:
    """Lock the devices and return the descriptors of the files, which programs inherit.

    Raises:
        AgentError: another run has one of them.
    """
    held: list[int] = []
    for path in device_lock_files():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        held.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = path.read_text() or "RUN"
            release_devices(held)
            raise AgentError(
                f"{path.name} is in use by {holder}: wait for its end, end it (`slipway cancel --run {holder}`), or "
                "choose other devices (cloud.devices)"
            ) from None
    for descriptor in held:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, run_id.encode(), 0)
        os.set_inheritable(descriptor, True)
    return held


def release_devices(held: list[int]) -> None:
    for descriptor in held:
        os.close(descriptor)


def device_lock_files() -> list[Path]:
    return [Path(path) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]
