"""What a run is given: its run.yaml and its environment."""

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
    """Place run.yaml, and the variables that every attempt of the run shall see."""
    folder = safe_join("runs", run_id)
    write_json(folder / "env", {"variables": validate_env(env or {})})
    write_atomic(folder / "run.yaml", text.encode())
    return {"path": str(folder / "run.yaml"), "sha256": file_hash(folder / "run.yaml")}


def validate_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise AgentError(f"no environment variable can be called {name!r}")
        if not isinstance(value, str) or "\0" in value:
            raise AgentError(f"no environment variable can hold what {name} is to hold")
    return env


def run_environment(run: Path, venv: str, env: dict[str, str], own: dict[str, str]) -> dict[str, str]:
    """What a program of the run sees: `env` counts more than the variables of `write_config`, `own` more than both."""
    own = {"SLIPWAY_RUN_DIR": str(run), "SLIPWAY_RUN_ID": run.name, **own}
    usual = {"PYTHONFAULTHANDLER": "1"}  # a Python program that is aborted says where it was: see stacks.py
    kept = read_json(run / "env") or {"variables": {}}
    return program_env(venv, {**usual, **kept["variables"], **env, **own})
