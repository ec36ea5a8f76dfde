"""Does it fit? The TPU compiler's answer, on a machine without a TPU.

    python -m trainer.fit run.yaml [--json] [--only update,decode]

Compiles what the run would compile, for the slice it would run on, with libtpu, and reports per chip: arguments,
temporaries, the peak with everything else that lies there, against the chip's memory. Exit codes: 0 all fits, 2 not, or
it cannot be told.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from conf.runfile import RunFile, RunFileError, load
from conf.topology import Topology, topology
from trainer import mesh as meshes
from trainer.program import Program
from trainer.remat import candidates, fits, programs, with_model

GIB = 2**30


class CannotTellError(RuntimeError):
    """The compiler is missing, or does not know the slice."""


@dataclass(frozen=True)
class Verdict:
    """One program on one chip; memory in GiB, FLOPs over all chips, recomputed ones apart."""

    name: str
    fits: bool
    peak_gib: float
    argument_gib: float
    temp_gib: float
    beside_gib: float
    hbm_gib: float
    flops: float
    recomputed_flops: float
    compile_seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.fit", description=__doc__)
    parser.add_argument("run", type=Path, help="run.yaml")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--only", default="", help="names of programs, separated by commas")
    options = parser.parse_args(arguments)
    try:
        experiment = load(options.run)
        mesh = mesh_for(experiment)
        chosen, verdicts = judge(experiment, mesh, set(filter(None, options.only.split(","))))
    except (RunFileError, CannotTellError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(
            json.dumps(
                {
                    "accelerator_type": experiment.pod.accelerator_type,
                    "remat": chosen.model.remat,
                    "programs": [asdict(v) for v in verdicts],
                },
                indent=1,
            )
        )
    else:
        print("\n".join(lines(experiment, chosen, verdicts)))
    return 0 if all(v.fits for v in verdicts) else 2


def mesh_for(experiment: RunFile) -> Mesh:
    """The run's mesh over the devices of its slice, which are not here. Raises CannotTellError."""
    if importlib.util.find_spec("libtpu") is None:
        raise CannotTellError(
            "the TPU compiler is not installed: python -m pip install libtpu (Linux on x86_64 only, 590 MB)"
        )
    slice_ = topology(experiment.pod.accelerator_type)
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is held, so that two may compile at once
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": slice_.accelerator_type,
    }
    sizes = meshes.resolve(experiment.mesh, slice_.devices)
    devices = np.array(_devices(slice_)).reshape(tuple(sizes.values()))
    return Mesh(devices, meshes.AXES, axis_types=(AxisType.Auto,) * len(meshes.AXES))


def _devices(slice_: Topology) -> list[Any]:
    """v4's two cores are one device, as on a real one; slices of one chip say so."""
    from jax.experimental import topologies

    options: dict[str, Any] = {"chip_config_name": "megacore"} if slice_.generation == "v4" else {}
    if slice_.chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    shape = slice_.shape or "1x1"
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=f"{slice_.generation}:{shape}", **options)
    except Exception as error:  # libtpu raises what it likes
        raise CannotTellError(f"the TPU compiler does not know {slice_.accelerator_type}: {error}") from None
    if len(found.devices) != slice_.devices:
        raise CannotTellError(
            f"the TPU compiler sees {len(found.devices)} devices on {slice_.accelerator_type}, JAX {slice_.devices}"
        )
    return found.devices


def judge(experiment: RunFile, mesh: Mesh, only: set[str]) -> tuple[RunFile, list[Verdict]]:
    """Compile every program, or those of some names. With `model.remat: auto`, the update decides which policy all of
    them have: the one that recomputes least among those with which it fits."""
    chosen, verdicts = with_model(experiment, attention="splash"), dict[str, Verdict]()
    if experiment.model.remat == "auto":
        for candidate in candidates(chosen):
            chosen = candidate
            update = next(p for p in programs(chosen, mesh) if p.name == "update")
            verdicts["update"] = compiled(update, chosen, mesh)
            if verdicts["update"].fits:
                break
    wanted = [p for p in programs(chosen, mesh) if not only or p.name in only]
    return chosen, [verdicts.get(p.name) or compiled(p, chosen, mesh) for p in wanted]


def compiled(program: Program, experiment: RunFile, mesh: Mesh) -> Verdict:
    """What the compiler says of one program."""
    hbm = (experiment.pod.hbm_bytes_per_chip or 0) / GIB
    beside = program.bytes_beside / GIB
    began = time.perf_counter()
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            memory = program.function.lower(*program.arguments).compile().memory_analysis()
        argument, temp = memory.argument_size_in_bytes / GIB, memory.temp_size_in_bytes / GIB
        peak = memory.peak_memory_in_bytes / GIB + beside
    except jax.errors.JaxRuntimeError as error:
        argument, temp, peak = 0.0, 0.0, wanted_gib(str(error)) + beside
    seconds = time.perf_counter() - began
    flops, least = _flops(program.name, experiment, mesh), 0.0
    if program.name == "update" and experiment.model.remat != "none":
        least = _flops(program.name, with_model(experiment, remat="none"), mesh)
    return Verdict(
        name=program.name,
        fits=fits(peak * GIB, experiment),
        peak_gib=round(peak, 3),
        argument_gib=round(argument, 3),
        temp_gib=round(temp, 3),
        beside_gib=round(beside, 3),
        hbm_gib=round(hbm, 3),
        flops=flops,
        recomputed_flops=flops - least if least else 0.0,
        compile_seconds=round(seconds, 1),
    )


def lines(experiment: RunFile, chosen: RunFile, verdicts: list[Verdict]) -> list[str]:
    """The verdicts for people."""
    title = f"{experiment.pod.accelerator_type}, remat {chosen.model.remat}; GiB per chip, FLOPs of all chips"
    head = f"{'program':<12}{'fits':<6}{'peak':>8}{'of':>8}{'arguments':>11}{'temps':>8}{'beside':>8}"
    rows = [
        f"{v.name:<12}{'yes' if v.fits else 'NO':<6}{v.peak_gib:>8.2f}{v.hbm_gib:>8.2f}{v.argument_gib:>11.2f}"
        f"{v.temp_gib:>8.2f}{v.beside_gib:>8.2f}{v.flops:>11.2e}{v.recomputed_flops:>12.2e}{v.compile_seconds:>7.0f} s"
        for v in verdicts
    ]
    return [title, f"{head}{'FLOPs':>11}{'recomputed':>12}{'compile':>9}", *rows]


def _flops(name: str, experiment: RunFile, mesh: Mesh) -> float:
    """Counted on the plain attention: what happens inside a kernel cannot be seen."""
    plain = with_model(experiment, attention="plain")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return next(p for p in programs(plain, mesh) if p.name == name).flops()


def wanted_gib(words: str) -> float:
    """How much the compiler says it would have needed. Raises CannotTellError for any other complaint."""
    if "RESOURCE_EXHAUSTED" not in words:
        raise CannotTellError(f"the TPU compiler refuses the program: {words.strip().splitlines()[0]}")
    found = re.search(r"\(([\d.]+)([GMK])\)?[^(]*exceeds available|Used ([\d.]+)([GMK]) of", words)
    if found is None:
        return float("inf")
    amount, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return float(amount) * {"G": 1.0, "M": 2**-10, "K": 2**-20}[unit]


if __name__ == "__main__":
    sys.exit(main())
