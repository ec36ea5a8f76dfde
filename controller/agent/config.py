"""What a run is given: its run.yaml and its environment."""

from __future__ import annotations

import re
from typing import Any

from .files import AgentError, inside, write_atomic, write_json
from .tree import file_hash


def write_config(run_id: str, text: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Place run.yaml, and the variables that every attempt of the run shall see, secrets among them.

    Returns:
        {"path": str, "sha256": str}: where run.yaml is, and its hash.
    """
    folder = inside("runs", run_id)
    write_json(folder / "env", checked_env(env or {}))
    write_atomic(folder / "run.yaml", text.encode())
    return {"path": str(folder / "run.yaml"), "sha256": file_hash(folder / "run.yaml")}


def checked_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise AgentError(f"no environment variable can be called {name!r}")
        if not isinstance(value, str) or "\0" in value:
            raise AgentError(f"no environment variable can hold what {name} is to hold")
    return env
