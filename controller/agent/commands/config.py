"""Inputs of a run: its run.yaml and its environment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..fs import AgentError, read_json, safe_join, write_atomic, write_json
from ..tree_hash import file_hash
from .venv import program_env

if TYPE_CHECKING:
    from ..protocol import WrittenConfig


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
