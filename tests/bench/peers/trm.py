"""Updates of the tiny recursive model, in turns with its authors' PyTorch code, on the same cores: wall and CPU time.

    python -m tests.bench.peers.trm CLONE --torch PYTHON [--mixer mlp] [--batch 64] [--updates 4] [--cores 0,1]
                                    [--loaded]

CLONE: https://github.com/SamsungSAILMontreal/TinyRecursiveModels at e7b6871. --torch: a Python that has torch, einops
and pydantic. Both train the paper's model for 9 x 9 sudoku from random weights, in float32. Each process compiles, does
one update that does not count, and then waits for its turns; who begins changes with each round. Idle cores and
intervals are as in `tests.bench.lm`. Linux only: taskset.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.bench import lm
from tests.paths import ROOT

QUANTITIES = {"seconds": "examples per second", "cpu": "examples per CPU second"}

Taken = dict[str, float]
"""Seconds and CPU seconds of one update."""


class Trainer:
    """A process that does an update whenever it is told to."""

    def __init__(self, command: list[str], cores: str) -> None:
        env = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(len(cores.split(",")))}
        pipe = subprocess.PIPE
        command = ["taskset", "-c", cores, *command]
        self._process = subprocess.Popen(command, env=env, cwd=ROOT, stdin=pipe, stdout=pipe, bufsize=0)

    def update(self) -> Taken:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the next line finds
            self._process.stdin.write(b"update\n")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with exit code {self._process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        self._process.terminate()
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--torch", type=Path, required=True)
    parser.add_argument("--mixer", choices=("mlp", "attention"), default="mlp")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--loaded", action="store_true")
    options = parser.parse_args()
    sizes = [options.mixer, str(options.batch)]
    ours = [sys.executable, "-c", f"import sys; from tests.bench.peers import trm; trm.ours(*{sizes}, sys.stdin)"]
    script = Path(__file__).with_name("trm_torch.py")
    theirs = [str(options.torch), str(script), str(options.clone.resolve()), *sizes]
    trainers = {name: Trainer(command, options.cores) for name, command in (("slipway", ours), ("pytorch", theirs))}
    try:
        for trainer in trainers.values():
            trainer.update()
        rounds = [turn(trainers, number, options) for number in range(options.updates)]
    finally:
        for trainer in trainers.values():
            trainer.end()
    about = "on a LOADED machine: not a result" if options.loaded else "on idle cores"
    print(f"{options.mixer}, {options.updates} updates of {options.batch} examples each, {about}; medians:")
    for line in table(rounds, options.batch):
        print(line)


def turn(trainers: dict[str, Trainer], number: int, options: argparse.Namespace) -> dict[str, Taken]:
    """An update of each."""
    found: dict[str, Taken] = {}
    for name in list(trainers) if number % 2 == 0 else reversed(trainers):
        if not options.loaded:
            lm.wait_until_idle(options.cores)
        found[name] = trainers[name].update()
    print(json.dumps(found), flush=True)
    return found


def table(rounds: Sequence[dict[str, Taken]], batch: int) -> list[str]:
    """A line for each quantity, with our ratio to theirs."""
    lines = []
    for key, title in QUANTITIES.items():
        values = {name: [batch / each[name][key] for each in rounds] for name in ("slipway", "pytorch")}
        mean, low, high = lm.ratio(values["slipway"], values["pytorch"])
        medians = ", ".join(f"{name} {statistics.median(found):.3f}" for name, found in values.items())
        lines.append(f"{title}: {medians}; ratio {mean:.2f} (95 %: {low:.2f} to {high:.2f})")
    return lines


def ours(mixer: str, batch_size: str, turns: Iterable[str]) -> None:
    """Do an update per turn, compiled as the trainer compiles it, and print what it took."""
    import jax
    import numpy as np
    import yaml

    from conf.schema.training.run_yaml import RunFile
    from controller.config.compose import compose
    from controller.config.run_yaml import render
    from trainer.distributed import mesh as meshes
    from trainer.distributed import runtime
    from trainer.loops import puzzle
    from trainer.losses.puzzle import initial_carry
    from trainer.step import train_step

    words = ["+experiment=trm_sudoku", "cloud=local", "tpu=v5litepod_1", f"model.mixer={mixer}"]
    words += [f"loop.batch_size={batch_size}", "model.activation_dtype=float32", "model.remat=none"]
    words += ["model.position_embedding=rope"] if mixer == "attention" else []
    config, problems = compose(words)
    assert config is not None, problems
    run = RunFile.model_validate(yaml.safe_load(render(config, "bench", "bucket", {"sudoku": "sudoku"})))
    runtime.keep_freed_memory(run.pod)
    mesh, cfg, loop = meshes.build_mesh(run.mesh), run.model, run.loop
    update = next(p for p in puzzle.programs(run, mesh) if p.name == "update")
    compiled = update.function.lower(*update.arguments).compile()
    state: Any = train_step.init_state(cfg, run.optimizer, mesh, jax.random.key(0))
    placed: Any = jax.tree.map(lambda x: x.sharding, update.arguments)
    state = state._replace(carry=jax.jit(lambda: initial_carry(cfg, loop.rows), out_shardings=placed[0].carry)())
    made = np.random.default_rng(0)
    for _ in turns:
        began, cpu = time.perf_counter(), time.process_time()
        batch = {name: made.integers(1, 11, x.shape, np.int32) for name, x in update.arguments[1].items()}
        batch |= {name: np.zeros_like(batch[name]) for name in ("ids", "min_steps")}
        state, metrics = compiled(state, jax.device_put(batch, placed[1]))
        jax.block_until_ready((state, metrics))
        taken = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
