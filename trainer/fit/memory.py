"""The TPU compiler's verdict on one program: memory per chip, operations, time, and whether it fits."""

import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from conf.schema.topology import Topology, find_topology
from conf.schema.training.loop import GrpoLoop, LmLoop
from conf.schema.training.model import Model
from conf.schema.training.run_yaml import RunFile
from trainer.distributed import mesh as meshes
from trainer.fit.remat import USABLE_HBM_FRACTION, fits, programs, with_model_overrides
from trainer.fit.schedule import parse
from trainer.fit.step_time import device_rates, has_rates, step_time
from trainer.step.program import Program


class CompilerError(RuntimeError):
    """The compiler is missing, does not know the slice, or rejects a program for a reason other than its size."""


def slice_mesh(experiment: RunFile) -> Mesh:
    """Return the run's mesh over abstract devices of its slice, in the run's order: a program depends on it.

    Raises CompilerError, or RunFileError if the mesh does not match the slice's devices.
    """
    require_compiler()
    slice_ = find_topology(experiment.pod.accelerator_type)
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is held, so two may compile at once
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": slice_.accelerator_type,
    }
    return meshes.build_mesh(experiment.mesh, _slice_devices(slice_))


def require_compiler() -> None:
    """Raise CompilerError if libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise CompilerError(
            "the TPU compiler is not installed: run `python -m pip install libtpu` (Linux on x86_64 only, 590 MB)"
        )


def _slice_devices(slice_: Topology) -> list[Any]:
    """Return the devices of a slice; v4's two cores are one device, as on hardware."""
    from jax.experimental import topologies

    options: dict[str, Any] = {"chip_config_name": "megacore"} if slice_.generation == "v4" else {}
    if slice_.chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    shape = slice_.shape or {4: "2x2"}.get(slice_.chips, "1x1")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=f"{slice_.generation}:{shape}", **options)
    except Exception as error:  # libtpu raises arbitrary exceptions
        raise CompilerError(f"the TPU compiler does not support {slice_.accelerator_type}: {error}") from None
    if len(found.devices) != slice_.devices:
        raise CompilerError(
            f"the TPU compiler reports {len(found.devices)} devices for {slice_.accelerator_type}, JAX {slice_.devices}"
        )
    return found.devices


GIB = 2**30


@dataclass(frozen=True)
class MemoryReport:
    """One program on one chip; memory in GiB, FLOPs over all chips, recomputation listed separately.

    Attributes:
        peak_gib: including all resident arrays.
        short_gib: excess of the peak over the usable memory; 0 if it fits.
        beside_gib: resident arrays that are not arguments.
        seconds: at the chip's rates, before `slices.predict` calibrates it; 0 if there is no schedule to read.
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

    A function listed under two names, like the sampler's, is compiled once. Each takes a minute if the model is large,
    so stderr tells when its compilation begins and what came of it.
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
            print(f"compiling {program.name} …", file=sys.stderr, flush=True)
            verdict = seen[key] = measure(program, experiment, mesh)
            need = f"{verdict.peak_gib:.2f} GiB of {verdict.hbm_gib:.2f}"
            print(f"{program.name}: {need}, {verdict.compile_seconds:.0f} s", file=sys.stderr, flush=True)
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
    """Return the seconds by the schedule; 0 if no forecast has a use for them (`slices.why_none`), or JAX cannot read
    the schedule of a compiler that is newer than it.
    """
    slice_ = find_topology(experiment.pod.accelerator_type)
    dense = isinstance(experiment.model, Model) and experiment.model.experts is None
    if not (isinstance(experiment.loop, LmLoop) and dense and has_rates(slice_)):
        return 0.0  # for a schedule that it cannot read, XLA prints a stack trace
    try:
        return step_time(parse(compiled.as_text() or ""), device_rates(slice_)).total
    except jax.errors.JaxRuntimeError:
        return 0.0


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
