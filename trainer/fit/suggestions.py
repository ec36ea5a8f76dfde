"""Overrides that make an experiment fit, tried in a fixed order until all of its programs do.

Order: save less for the backward pass, smaller chunks of logits, gradient accumulation, weights sharded over more
devices. None of them changes the results.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from conf.schema.infra.topology import find_topology
from conf.schema.training.loop import CustomLoop, PuzzleLoop
from conf.schema.training.model import Model
from conf.schema.training.run_yaml import RunFile
from trainer.distributed import mesh as meshes
from trainer.fit.memory import MemoryReport
from trainer.fit.remat import REMAT_POLICIES

Overrides = dict[str, Any]
"""Dotted keys and their values, as on the command line."""

MeasureFn = Callable[[RunFile, Overrides, set[str]], list[MemoryReport]]
"""Measures the experiment with overrides: the programs with the given names, or all if there are none."""

MIN_LOGIT_CHUNK = 16


def find_fix(
    experiment: RunFile, verdicts: Iterable[MemoryReport], judge: MeasureFn
) -> tuple[Overrides, list[MemoryReport]] | None:
    """Return the first overrides with which all programs fit, and their verdicts; None if none help.

    experiment: with an explicit `model.remat` policy; verdicts: the programs that do not fit are measured again. Each
    kind of fix is tried at its strongest first; if that is not enough, it stays and the next kind is added.
    """
    failing = {v.name for v in verdicts if not v.fits}

    def verdicts_with(overrides: Overrides, names: set[str]) -> list[MemoryReport]:
        return judge(with_overrides(experiment, overrides), overrides, names)

    taken: Overrides = {}
    for kind in (remat_candidates, logit_chunk_candidates, micro_batch_candidates, fsdp_candidates):
        options = [taken | option for option in kind(with_overrides(experiment, taken))]
        if not options:
            continue
        taken = options[-1]
        if not _all_fit(verdicts_with(taken, failing)):
            continue
        for option in options:
            if option is taken or _all_fit(verdicts_with(option, failing)):
                found = verdicts_with(option, set())
                if _all_fit(found):
                    return option, found
    return None


def format_overrides(overrides: Overrides) -> list[str]:
    return [f"{key}={value}" for key, value in overrides.items()]


def with_overrides(experiment: RunFile, overrides: Overrides) -> RunFile:
    """Return the experiment with other values for some keys."""
    raw = experiment.model_dump()
    for key, value in overrides.items():
        *sections, name = key.split(".")
        at = raw
        for section in sections:
            at = at[section]
        at[name] = value
    return RunFile.model_validate(raw)


def remat_candidates(experiment: RunFile) -> Iterator[Overrides]:
    """Yield policies that save less than the experiment's."""
    policies = REMAT_POLICIES[experiment.model.kind]
    kept = "outputs" if experiment.model.remat == "offload" else experiment.model.remat
    for policy in policies[policies.index(kept) + 1 :]:
        yield {"model.remat": policy}


def logit_chunk_candidates(experiment: RunFile) -> Iterator[Overrides]:
    """Yield half, a quarter and an eighth of the chunk."""
    if not isinstance(experiment.model, Model):
        return
    for share in (2, 4, 8):
        if experiment.model.logit_chunk // share >= MIN_LOGIT_CHUNK:
            yield {"model.logit_chunk": experiment.model.logit_chunk // share}


def micro_batch_candidates(experiment: RunFile) -> Iterator[Overrides]:
    """Yield fewer rows per device at a time, down to one."""
    if isinstance(experiment.loop, CustomLoop | PuzzleLoop):
        return
    sizes = meshes.axis_sizes(experiment.mesh, find_topology(experiment.pod.accelerator_type).devices)
    rows = experiment.loop.rows // (sizes["data"] * sizes["fsdp"])
    for size in range((experiment.loop.micro_batch_size or rows) - 1, 0, -1):
        if rows % size == 0:
            yield {"loop.micro_batch_size": size}


def fsdp_candidates(experiment: RunFile) -> Iterator[Overrides]:
    """Yield weights sharded over all devices that split the batch."""
    sizes = meshes.axis_sizes(experiment.mesh, find_topology(experiment.pod.accelerator_type).devices)
    if sizes["data"] > 1:
        yield {"mesh.data": 1, "mesh.fsdp": sizes["data"] * sizes["fsdp"]}


def _all_fit(verdicts: Iterable[MemoryReport]) -> bool:
    return all(v.fits for v in verdicts)
