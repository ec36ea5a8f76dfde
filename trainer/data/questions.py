"""The questions that an experiment asks, by `data.kind`."""

from __future__ import annotations

import jax

from conf.data import ArithmeticData, Gsm8kData
from conf.loop import GrpoLoop
from conf.runfile import RunFile, RunFileError
from trainer.data.arithmetic import Arithmetic
from trainer.data.gsm8k import Gsm8k
from trainer.data.problem import Problems


def of(experiment: RunFile, loop: GrpoLoop) -> Problems:
    """The source of the experiment's problems. Raises RunFileError where it has none, or its files are no such."""
    data = experiment.data
    if isinstance(data, ArithmeticData):
        return Arithmetic(experiment.seed)
    if isinstance(data, Gsm8kData):
        found = Gsm8k(data, experiment.seed, loop.prompt_length)
        if found.too_long and jax.process_index() == 0:
            print(f"{found.too_long} questions are longer than loop.prompt_length and left out", flush=True)
        return found
    raise RunFileError(f"data.kind: the grpo loop asks questions; {data.kind} has none: choose arithmetic or gsm8k")
