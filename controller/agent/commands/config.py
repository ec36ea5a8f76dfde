"""Inputs of a run: its run.yaml, its environment, and fingerprints of the data that its program would read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..fs import AgentError, read_json, safe_join, write_atomic, write_json
from ..process import run_tool
from ..tree_hash import file_hash
from .venv import NO_VENV, program_env, venv_folder

if TYPE_CHECKING:
    from ..protocol import Fingerprints, WrittenConfig


def write_config(run_id: str, text: str, env: dict[str, str] | None = None) -> WrittenConfig:
    """Write run.yaml and the environment variables of every attempt of the run."""
    folder = safe_join("runs", run_id)
    write_json(folder / "env", {"variables": validate_env(env or {})})
    write_atomic(folder / "run.yaml", text.encode())
    return {"path": str(folder / "run.yaml"), "sha256": file_hash(folder / "run.yaml")}


def validate_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise AgentError(f"{name!r} is not a valid name of an environment variable")
        if not isinstance(value, str) or "\0" in value:
            raise AgentError(f"the value of environment variable {name} is not valid")
    return env


def run_environment(run: Path, venv: str, env: dict[str, str], own: dict[str, str]) -> dict[str, str]:
    """Return a program's environment; `own` overrides `env`, which overrides the variables of `write_config`."""
    own = {"SLIPWAY_RUN_DIR": str(run), "SLIPWAY_RUN_ID": run.name, **own}
    usual = {
        "PYTHONFAULTHANDLER": "1",  # an aborted Python program prints its stacks: see stack_dump.py
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # no gRPC probe of each bucket; what the tests run
    }
    kept = read_json(run / "env") or {"variables": {}}
    return program_env(venv, {**usual, **kept["variables"], **env, **own})


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
