"""The training loops: one module per `loop.kind`.

Each has `run(experiment, mesh, log)` and `programs(experiment, mesh)`, which yields the programs it compiles.
"""

import importlib
from typing import Any


def load_loop(kind: str) -> Any:
    """Import and return the module of one loop; the others, with their dependencies, stay unloaded."""
    return importlib.import_module(f"trainer.loops.{kind}")
