"""Compile a program of the bundled trainer: `python -m tests.bench.tpu_compiler.ours PROGRAM SECTION.KEY=VALUE ...`."""

from __future__ import annotations

import sys

import jax

from tests.bench.forecast.rows import experiment_of
from trainer.fit import topologies
from trainer.fit.remat import programs, with_model_overrides
from trainer.models import attention


def main() -> None:
    name, *words = sys.argv[1:]
    experiment = experiment_of(words)
    mesh = topologies.slice_mesh(experiment)
    experiment = with_model_overrides(experiment, attention=attention.choose_kernel(experiment.model, "tpu"))
    program = next(p for p in programs(experiment, mesh) if p.name == name)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program.function.lower(*program.arguments).compile()


if __name__ == "__main__":
    main()
