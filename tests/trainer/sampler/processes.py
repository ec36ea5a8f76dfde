"""Responses drawn on eight devices by each of several processes, which are started with

python -m tests.trainer.sampler.processes PROCESSES RESULT.npz
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType

from conf.schema.training.model import Model
from conf.schema.training.run_yaml import PodFacts
from tests.groups import load_group
from trainer.distributed import runtime
from trainer.distributed.mesh import MESH_AXES
from trainer.models import weights
from trainer.sampler import Sampler, SamplerSettings, StopCriteria

PROMPTS = [np.random.default_rng(n).integers(0, 512, 3 + n).tolist() for n in range(5)]
SAMPLES, MAX_NEW_TOKENS = 3, 12
STOP_TOKENS = tuple(range(0, 512, 8))
"""So many tokens end a response that rows end at different times, and others take their slots."""


def sample_responses() -> dict[str, np.ndarray]:
    """Rows in the order in which they ended, with their tokens and log-probabilities end to end."""
    cfg = Model(**load_group("model/tiny") | {"dim": 32, "mlp_dim": 64, "sliding_window": 5})
    mesh = jax.make_mesh((4, 2, 1), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    sampler = Sampler(cfg, SamplerSettings(8, MAX_NEW_TOKENS, slots=8, chunk=4), mesh, StopCriteria(STOP_TOKENS))
    placed = weights.param_shardings(cfg, mesh)
    params = jax.jit(lambda key: weights.init_params(cfg, key), out_shardings=placed)(jax.random.key(0))
    found = list(sampler.generate(sampler.load_params(params), PROMPTS, SAMPLES, jax.random.key(1), 1.0))
    return {
        "rows": np.array([response.row for response in found]),
        "tokens": np.concatenate([response.tokens for response in found]),
        "logprobs": np.concatenate([response.logprobs for response in found]),
    }


def main(processes: int, result: Path) -> None:
    """Each process leaves its own file."""
    facts = {"accelerator_type": "v5litepod-8", "workers": processes, "devices": 8, "backend": "cpu"}
    runtime.join_processes(PodFacts(**facts, hbm_bytes_per_chip=None, bf16_flops_per_chip=None), timeout_seconds=300)
    np.savez(result.with_stem(f"{result.stem}-{jax.process_index()}"), **sample_responses())
    runtime.exit_together(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
