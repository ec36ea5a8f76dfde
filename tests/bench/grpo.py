"""Seconds of a whole step of GRPO on CPU, and of rollouts.

    python -m tests.bench.grpo [--steps 40] [--rounds 5] [--cores 0,1]

4 prompts x 8 samples, 64 + 64 tokens, a Gemma-2-style decoder of 4 layers x 128, vocabulary 512. The step is that of
`python -m trainer`: rollout, rewards, log-probabilities of policy and reference, update. Linux only: taskset.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.paths import ROOT

MODEL = ["model=tiny", "model.num_layers=4", "model.dim=128", "model.num_heads=4", "model.num_kv_heads=2",
         "model.head_dim=32", "model.mlp_dim=512", "model.vocab_size=512"]  # fmt: skip
LOOP = [
    "loop=grpo",
    "loop.prompts_per_step=4",
    "loop.group_size=8",
    "loop.max_prompt_length=64",
    "loop.max_new_tokens=64",
]
LONG = 1984
"""Tokens after which a long response is cut off; they are 256 on average."""
TAIL = 256
"""Tokens after which a response is cut off where lengths have a long tail; they are then 32 on average."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--rollouts", action="store_true", help=argparse.SUPPRESS)  # the part that taskset starts
    options = parser.parse_args()
    if options.rollouts:
        rollouts(options.rounds)
        return
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        lines = steps(options.steps, options.cores, Path(folder))
    seconds = sorted(line["step_time"] for line in lines[5:])
    print(f"{'whole step, median':<44}{statistics.median(seconds):8.3f} s")
    print(f"{'whole step, fastest tenth':<44}{seconds[len(seconds) // 10]:8.3f} s")
    for name in ("rollout", "reward", "score", "update", "other"):
        print(f"{f'  {name}, median':<44}{statistics.median(line[f'{name}_time'] for line in lines[5:]):8.3f} s")
    sys.stdout.flush()
    command = [sys.executable, "-m", "tests.bench.grpo", "--rollouts", "--rounds", str(options.rounds)]
    subprocess.run(["taskset", "-c", options.cores, *command], env=environment(), cwd=ROOT, check=True)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def steps(count: int, cores: str, folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics of the trainer, as it runs on a worker with one device, one for each step."""
    (folder / "run.yaml").write_text(yaml.safe_dump(run_file(count, folder)))
    env = environment() | {"SLIPWAY_RUN_DIR": str(folder / "local")}
    command = ["taskset", "-c", cores, sys.executable, "-m", "trainer", str(folder / "run.yaml")]
    subprocess.run(command, env=env, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "local/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] == "grpo"]


def run_file(count: int, folder: Path) -> dict[str, Any]:
    """run.yaml on one CPU device."""
    from controller.config.compose import compose
    from controller.config.run_yaml import render

    words = ["program=trainer", "cloud=local", "tpu=v5litepod_1", "data=arithmetic", "optimizer=adamw", *MODEL, *LOOP]
    words += [f"loop.steps={count}", "loop.eval_prompts=1", "loop.eval_interval=1000", "loop.warm_start_steps=1"]
    config, problems = compose([*words, "logging.log_interval=1", "checkpoint.save_interval=1000"])
    assert config is not None, problems
    raw = yaml.safe_load(render(config, "bench", "bucket", {}))
    pod = {"accelerator_type": "v5litepod-1", "workers": 1, "devices": 1, "backend": "cpu"}
    return raw | {"dir": str(folder / "run"), "pod": raw["pod"] | pod}


def rollouts(rounds: int) -> None:
    """In turns, so that whatever else the machine does meets all of them."""
    import jax
    import numpy as np

    from conf.schema.training.model import Model
    from tests.groups import load_group
    from trainer.distributed import mesh
    from trainer.models import weights
    from trainer.sampler import Sampler, SamplerSettings, StopCriteria

    sizes = dict(word.removeprefix("model.").split("=") for word in MODEL[1:])
    cfg = Model(**load_group("model/tiny") | {name: int(size) for name, size in sizes.items()})
    devices = jax.make_mesh((1,) * 4, mesh.MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4)
    params, key = jax.jit(weights.init_params, static_argnums=0)(cfg, jax.random.key(0)), jax.random.key(1)
    random = np.random.default_rng(0)
    prompts = random.integers(0, 512, (16, 64)).tolist()

    def drawing(response: int, ends: tuple[int, ...], chunk: int) -> Callable[..., None]:
        sampler = Sampler(cfg, SamplerSettings(64, response, slots=32, chunk=chunk), devices, StopCriteria(ends))
        copy = sampler.load_params(params)
        return lambda asked, samples: [None for _ in sampler.generate(copy, asked, samples, key, 1.0)]

    plain, long = drawing(64, (), 64), drawing(LONG, (0, 1), 64)
    tail = drawing(TAIL, tuple(range(16)), 16)  # 16 of 512 tokens end a response
    works = {
        "rollout of 32 rows, prompts shared": lambda: plain(prompts[:4], 8),
        "128 rows of long-tailed length, refilled": lambda: tail(prompts, 8),
        "32 rows of up to 1,984 tokens, 256 on average": lambda: long(prompts[:4], 8),
    }
    for name, seconds in timed(works, rounds).items():
        print(f"{name:<44}{statistics.median(seconds):8.3f} s")


def timed(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each work in each round, after one that compiles."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if turn:
                found[name].append(time.perf_counter() - began)
    return found


if __name__ == "__main__":
    main()
