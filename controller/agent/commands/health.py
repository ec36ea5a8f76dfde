"""Health check of the chips: runs `chip_check.py` on this worker, as one process of a JAX program on all workers."""

from __future__ import annotations

import json
import pkgutil
from typing import TYPE_CHECKING, Any

from ..fs import AgentError, agent_root, locked, write_json
from ..process import boot_id, run_tool
from ..program.state import active_attempt
from .venv import NO_VENV, program_env, venv_folder

if TYPE_CHECKING:
    from ..protocol import Health

STAGES = ("importing JAX", "joining the other workers", "finding the devices", "matrix product", "HBM", "all-reduce")
"""What `chip_check.py` does, in order; it writes each to a file as it begins."""
DONE = "done"


def check_health(venv: str, processes: int, timeout_seconds: float = 120.0) -> Health:
    """Check the chips of this worker together with those of all others; call it on all workers at the same time.

    A check that crashes or hangs is an answer too, because the stages of all workers show whose fault it is. A success
    is recorded for this boot, with the devices that JAX found.

    Args:
        venv: fingerprint of an installed venv that contains JAX.
        processes: number of workers.
        timeout_seconds: limit for the whole check.
    """
    boot = boot_id()
    with locked("devices"):
        if holder := active_attempt():
            raise AgentError(f"run {holder['run_id']} is using the devices")
        source = pkgutil.get_data(f"{__package__}", "chip_check.py")
        assert source is not None, "a module of this package"
        python = "python3" if venv == NO_VENV else f"{venv_folder(venv)}/bin/python"
        progress = agent_root() / "health-stage"
        progress.write_text(STAGES[0])
        argv = [python, "-c", source.decode(), str(processes), str(progress)]
        try:
            printed = run_tool(argv, timeout=timeout_seconds, env=program_env(venv, {}))
        except AgentError as error:
            return _unfinished(boot, progress.read_text(), str(error), error.detail)
        facts: dict[str, Any] = json.loads(printed.splitlines()[-1])
        done: Health = {"boot_id": boot, "stage": DONE, "problem": "", **facts}  # type: ignore[typeddict-item]
        if not done["faults"]:
            keys = ("boot_id", "backend", "local_devices", "devices", "kind")
            write_json(agent_root() / "devices.json", {key: done[key] for key in keys})
            write_json(agent_root() / "health.json", done)
    return done


def _unfinished(boot: str, stage: str, problem: str, stderr: str) -> Health:
    # The last line of a traceback has no indentation, and says what is wrong.
    spoken = [line for line in stderr.splitlines() if line.strip() and not line.startswith(" ")]
    return {
        "boot_id": boot,
        "stage": stage,
        "problem": problem if "did not finish" in problem or not spoken else spoken[-1][:400],
        "backend": "",
        "local_devices": 0,
        "devices": 0,
        "kind": "",
        "process": 0,
        "faults": [],
        "tflops": 0.0,
        "hbm_gb": 0.0,
        "seconds": 0.0,
    }
