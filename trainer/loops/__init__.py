"""The training loops: one module per `loop.kind`, or a function of the user's own.

Each has `run(experiment, mesh, log)` and `programs(experiment, mesh)`, which yields the programs it compiles.
"""

import importlib
from types import SimpleNamespace
from typing import Any, NoReturn

from jax.sharding import Mesh

from conf.formats import RunFileError
from conf.schema.training.loop import CustomLoop, Loop
from conf.schema.training.run_yaml import RunFile
from trainer.extension import load_extension


def load_loop(loop: Loop) -> Any:
    """Import and return the module of one loop; the others, with their dependencies, stay unloaded.

    Raises:
        RunFileError: a loop of the user's own cannot be imported or called.
    """
    if not isinstance(loop, CustomLoop):
        return importlib.import_module(f"trainer.loops.{loop.kind}")
    run = load_extension("loop", loop.run, "loop.run", loop.options)
    return SimpleNamespace(run=run, programs=_unknown_programs)


def _unknown_programs(experiment: RunFile, mesh: Mesh) -> NoReturn:
    raise RunFileError(
        "loop.run: what a loop of your own compiles is not known before it runs, so neither `slipway fit` nor "
        "model.remat=auto can use it"
    )
