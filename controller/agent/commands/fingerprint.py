"""What the program would read on this worker: fingerprints of the data, as the bundled trainer takes them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from ..fs import AgentError, safe_join
from ..process import run_tool
from .config import run_environment
from .venv import NO_VENV, venv_folder

if TYPE_CHECKING:
    from ..protocol import Fingerprints


def fingerprint_data(run_id: str, code: str, venv: str, timeout_seconds: float = 300.0) -> Fingerprints:
    """Return fingerprints of the files that run.yaml names, freshly taken by the trainer's own code and venv.

    Args:
        run_id: run whose run.yaml is on this worker.
        code: tree hash of the installed code, which contains the trainer.
        venv: fingerprint of an installed venv, or "none".
        timeout_seconds: limit for all of them.
    """
    run, folder = safe_join("runs", run_id), safe_join("code", code)
    for needed, path in (("run.yaml", run / "run.yaml"), ("the code", folder)):
        if not path.exists():
            raise AgentError(f"{needed} is missing")
    python = "python3" if venv == NO_VENV else f"{venv_folder(venv)}/bin/python"
    command = ["trainer.distributed.fingerprint", str(run / "run.yaml")]
    environment = run_environment(run, venv, {}, {})
    given = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), given)))
    printed = run_tool([python, "-m", *command], timeout=timeout_seconds, env=environment, folder=folder)
    return {"data": json.loads(printed.splitlines()[-1])}
