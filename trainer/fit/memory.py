"""The TPU compiler's verdict on one program: memory per chip, operations, time, and whether it fits."""

import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from conf.schema.infra.topology import find_topology
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile
from trainer.fit.remat import USABLE_HBM_FRACTION, fits, programs, with_model_overrides
from trainer.fit.schedule import parse
from trainer.fit.step_time import device_rates, step_time
from trainer.fit.topologies import CompilerError
from trainer.step.program import Program

GIB = 2**30


@dataclass(frozen=True)
class MemoryReport:
    """One program on one chip; memory in GiB, FLOPs over all chips, recomputation listed separately.

    Attributes:
        peak_gib: including all resident arrays.
        short_gib: excess of the peak over the usable memory; 0 if it fits.
        beside_gib: resident arrays that are not arguments.
        seconds: at the chip's rates, before `forecast` calibrates it; 0 if there is no schedule to read.
    """

    name: str
    fits: bool
    peak_gib: float
    short_gib: float
    argument_gib: float
    temp_gib: float
    beside_gib: float
    hbm_gib: float
    flops: float
    recomputed_flops: float
    compile_seconds: float
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the program's entry in `slipway fit --json`."""
        return asdict(self)


def measure_all(
    experiment: RunFile, mesh: Mesh, names: set[str], known: Iterable[MemoryReport] = ()
) -> list[MemoryReport]:
    """Measure the run's programs, or those with the given names, except those already known.

    A function listed under two names, like the sampler's, is compiled once.
    """
    verdicts: list[MemoryReport] = []
    before = {v.name: v for v in known}
    seen: dict[tuple[int, int], MemoryReport] = {}
    for program in programs(experiment, mesh):
        if names and program.name not in names:
            continue
        key = (id(program.function), program.resident_bytes)
        if program.name in before:
            verdict = before[program.name]
        elif key in seen:
            verdict = replace(seen[key], name=program.name, compile_seconds=0.0)
        else:
            verdict = seen[key] = measure(program, experiment, mesh)
        verdicts.append(verdict)
    return verdicts


def measure(program: Program, experiment: RunFile, mesh: Mesh) -> MemoryReport:
    """Measure one program. Raises CompilerError if the compiler rejects it for any reason except its size."""
    beside = program.resident_bytes / GIB
    argument, temp, peak, taken = 0.0, 0.0, beside, 0.0
    began = time.perf_counter()
    if program.function is not None:
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                compiled = program.function.lower(*program.arguments).compile()
            memory = compiled.memory_analysis()
            argument, temp = memory.argument_size_in_bytes / GIB, memory.temp_size_in_bytes / GIB
            peak += memory.peak_memory_in_bytes / GIB
            taken = _computed_seconds(compiled, experiment)
        except jax.errors.JaxRuntimeError as error:
            peak += requested_gib(str(error))
    seconds = time.perf_counter() - began
    flops, least = count_flops(program.name, experiment, mesh), 0.0
    if program.name == "update" and experiment.model.remat != "none":
        least = count_flops(program.name, with_model_overrides(experiment, remat="none"), mesh)
    hbm = (experiment.pod.hbm_bytes_per_chip or 0) / GIB
    is_small = fits(peak * GIB, experiment)
    return MemoryReport(
        name=program.name,
        fits=is_small,
        peak_gib=round(peak, 3),
        short_gib=0.0 if is_small else round(peak - USABLE_HBM_FRACTION * hbm, 3),
        argument_gib=round(argument, 3),
        temp_gib=round(temp, 3),
        beside_gib=round(beside, 3),
        hbm_gib=round(hbm, 3),
        flops=flops,
        recomputed_flops=flops - least if least else 0.0,
        compile_seconds=round(seconds, 1),
        seconds=taken,
    )


def _computed_seconds(compiled: Compiled, experiment: RunFile) -> float:
    """Return the seconds by the schedule; 0 if JAX cannot read it, as some of a compiler that is newer than JAX."""
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:
        text = None
    if text is None:
        return 0.0
    return step_time(parse(text), device_rates(find_topology(experiment.pod.accelerator_type))).total


def requested_gib(output: str) -> float:
    """Return the memory that the compiler's message requests. Raises CompilerError for any other message."""
    if "RESOURCE_EXHAUSTED" not in output:
        raise CompilerError(f"the TPU compiler rejects the program: {output.strip().splitlines()[0]}")
    found = re.search(r"\(([\d.]+)([GMK])\)?[^(]*exceeds available|Used ([\d.]+)([GMK]) of", output)
    if found is None:
        return float("inf")
    amount, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return float(amount) * {"G": 1.0, "M": 2**-10, "K": 2**-20}[unit]


def count_flops(name: str, experiment: RunFile, mesh: Mesh) -> float:
    """Count a program's operations over all chips with plain attention, since kernels are opaque."""
    plain = with_model_overrides(experiment, attention="plain")
    changed = plain.model != experiment.model
    if changed and isinstance(plain.loop, GrpoLoop) and plain.loop.keeps_groups_together:
        # kernels do not share prompts; these rows are no whole groups
        apart = plain.loop.model_copy(update={"micro_batch_size": plain.loop.rows + 1})
        plain = plain.model_copy(update={"loop": apart})
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return next(p for p in programs(plain, mesh) if p.name == name).flops()
