"""Startup scripts of TPU VMs: they run as programs on this machine, at each boot of an emulated VM.

https://cloud.google.com/compute/docs/instances/startup-scripts/linux
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

STARTUP_SCRIPT_KEY = "startup-script"
"""Key of a node's metadata."""
ABSENT_TOOLS = ("lsblk", "blkid", "mkfs.ext4", "mount")
"""Tools that do nothing on an emulated VM, whose script must not touch the disks of this machine."""


def startup_variables(home: Path, path: str) -> dict[str, str]:
    """Return the variables of a startup script that differ from those of a session with this PATH."""
    tools = home.parent / "sbin"
    tools.mkdir(exist_ok=True)
    for name in ABSENT_TOOLS:
        tool = tools / name
        if not tool.exists():
            tool.write_text("#!/bin/sh\n")
            tool.chmod(0o700)
    return {"PATH": os.pathsep.join([str(tools), path]), "SLIPWAY_HOMES": str(home)}


async def run_startup_script(folder: Path, script: str, variables: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start the script; its output goes to `startup.log` in the VM's folder."""
    program = folder / STARTUP_SCRIPT_KEY
    program.write_text(script)
    program.chmod(0o700)
    with (folder / "startup.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            str(program),
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=dict(variables),
        )


async def wait_for_script(process: asyncio.subprocess.Process) -> None:
    """Wait until the script ends; what it left in the background runs on."""
    await process.wait()
