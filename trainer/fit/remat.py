"""How much of the forward pass is kept for the backward pass, where the config leaves it open (`model.remat: auto`)."""

from __future__ import annotations

from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from conf.schema.training.model import Model
from conf.schema.training.run_yaml import RunFile, RunFileError
from trainer.loops.registry import load_loop
from trainer.step.program import Program

USABLE_HBM_FRACTION = 0.936
"""Share of the chip's memory that a program may use: 15.0 of 16.02 GiB on v5e. libtpu keeps 0.27 there for itself; the
rest is for code, for batches on their way, and for what fragments between buffers."""
REMAT_POLICIES = ("none", "products", "outputs", "attention", "full")
"""From nothing to everything computed again."""


def resolve_remat(experiment: RunFile, mesh: Mesh) -> RunFile:
    """The experiment with the first policy with which its update fits the devices: the compiler refuses the others.

    All processes compile the same program and come to the same end. Raises RunFileError where none fits.
    """
    if experiment.model.remat != "auto":
        return experiment
    for candidate in remat_candidates(experiment):
        update = next(p for p in programs(candidate, mesh) if p.name == "update")
        try:
            memory = update.function.lower(*update.arguments).compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            continue
        if fits(memory.peak_memory_in_bytes + update.resident_bytes, experiment):
            return candidate
    raise RunFileError(
        "model.remat: the update fits with no policy; make loop.micro_batch_size or loop.prompts_per_step smaller"
    )


def fits(peak: float, experiment: RunFile) -> bool:
    """Do so many bytes, everything that lies there included, fit a chip of the run's pod?"""
    hbm = experiment.pod.hbm_bytes_per_chip
    return hbm is None or peak <= USABLE_HBM_FRACTION * hbm


def remat_candidates(experiment: RunFile) -> Iterator[RunFile]:
    """The experiment with each policy that it allows."""
    remat = experiment.model.remat
    yield from (
        with_model_overrides(experiment, remat=policy) for policy in (REMAT_POLICIES if remat == "auto" else (remat,))
    )


def with_model_overrides(experiment: RunFile, **changes: str) -> RunFile:
    """The same experiment with other values for some keys of the model."""
    changed = Model.model_validate(experiment.model.model_dump() | changes)
    return experiment.model_copy(update={"model": changed})


def programs(experiment: RunFile, mesh: Mesh) -> Iterator[Program]:
    """What the run's loop compiles."""
    yield from load_loop(experiment.loop.kind).programs(experiment, mesh)
