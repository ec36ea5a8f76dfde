"""Choose how much of the forward pass to save for the backward pass if `model.remat` is auto."""

from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from conf.formats import RunFileError
from conf.schema.training.model import AnyModel, Model, read_model_section
from conf.schema.training.run_yaml import RunFile
from trainer.loops import load_loop
from trainer.step.program import Program

USABLE_HBM_FRACTION = 0.936
"""Usable fraction of a chip's memory: 15.0 of 16.02 GiB on v5e.

libtpu reserves 0.27 GiB there; the rest is for code, batches in transit, and fragmentation.
"""
REMAT_POLICIES = {
    "decoder": ("none", "products", "outputs", "attention", "full", "chunks"),
    "trm": ("none", "outputs", "full"),
}
"""From saving everything to recomputing everything, by the model's kind. `offload` takes the host's memory, which the
compiler does not know, so it is not among them."""


def resolve_remat(experiment: RunFile, mesh: Mesh) -> RunFile:
    """Return the experiment with the first remat policy whose update the compiler can fit on the devices.

    All processes compile the same program and reach the same result. Raises RunFileError if none fits.
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
        "model.remat: no policy makes the update fit; lower loop.micro_batch_size, or the batch of an update"
    )


def fits(peak: float, experiment: RunFile) -> bool:
    """Return whether a peak of this many bytes, including resident arrays, fits a chip of the run's pod."""
    hbm = experiment.pod.hbm_bytes_per_chip
    return hbm is None or peak <= USABLE_HBM_FRACTION * hbm


def remat_policies(model: AnyModel) -> tuple[str, ...]:
    """Return the policies that a model may have, as in REMAT_POLICIES."""
    has_experts = isinstance(model, Model) and model.experts is not None
    return tuple(p for p in REMAT_POLICIES[model.kind] if p != "chunks" or not has_experts)


def remat_candidates(experiment: RunFile) -> Iterator[RunFile]:
    """Yield the experiment with each policy that it allows."""
    remat, policies = experiment.model.remat, remat_policies(experiment.model)
    for policy in policies if remat == "auto" else (remat,):
        yield with_model_overrides(experiment, remat=policy)


def with_model_overrides(experiment: RunFile, **changes: str) -> RunFile:
    """Return the experiment with other values for some keys of the model; a kind of model without a key ignores it."""
    known = type(experiment.model).model_fields
    changed = read_model_section(experiment.model.model_dump() | {k: v for k, v in changes.items() if k in known})
    return experiment.model_copy(update={"model": changed})


def programs(experiment: RunFile, mesh: Mesh) -> Iterator[Program]:
    yield from load_loop(experiment.loop).programs(experiment, mesh)
