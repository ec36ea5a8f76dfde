"""GRPO by Tunix on a CPU: what `tests.bench.peers.grpo` compares with. Needs google-tunix, and nothing of this project.

    python tests/bench/peers/tunix_grpo.py [--steps 15]

4 prompts x 8 samples, 64 + 64 tokens, a Gemma-2 of 4 layers x 128 with 512 tokens, random weights, float32. Prints one
JSON object: seconds of each step after the first ones, and CPU seconds per step.
"""

import argparse
import itertools
import json
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.gemma import model as gemma
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

WARM_STEPS, PROMPTS, SAMPLES, LENGTH, VOCAB = 3, 4, 8, 64, 512


class Characters:
    """One token per character, in the methods that Tunix asks of a tokenizer."""

    def encode(self, text: str, **options: Any) -> list[int]:
        del options
        return [3 + ord(character) for character in text]

    def decode(self, ids: list[int], **options: Any) -> str:
        del options
        return "".join(chr(max(0, int(i) - 3)) for i in ids)

    def bos_id(self) -> int:
        return 2

    def eos_id(self) -> int:
        return 1

    def pad_id(self) -> int:
        return 0


def policy(seed: int) -> gemma.Gemma:
    kinds = (gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL) * 2
    cfg = gemma.ModelConfig(
        num_layers=4, num_embed=VOCAB, embed_dim=128, hidden_dim=512, num_heads=4, head_dim=32, num_kv_heads=2,
        final_logit_softcap=30.0, use_post_attn_norm=True, use_post_ffw_norm=True, attention_types=kinds,
        attn_logits_soft_cap=50.0, sliding_window_size=4096,
    )  # fmt: skip
    return gemma.Gemma(cfg, rngs=nnx.Rngs(seed))


def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    del prompts, columns
    return [float(completion.count("1")) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    total, times = options.steps + WARM_STEPS, list[tuple[float, float]]()

    def batches() -> Any:
        for i in range(total):
            times.append((time.perf_counter(), time.process_time()))
            yield {"prompts": np.array([f"{i * PROMPTS + j:0{LENGTH - 2}d}=" for j in range(PROMPTS)])}
        times.append((time.perf_counter(), time.process_time()))

    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    training = rl_cluster.RLTrainingConfig(
        eval_every_n_steps=10 * total, max_steps=total, actor_optimizer=optax.adamw(1e-4),
        mini_batch_size=PROMPTS, train_micro_batch_size=PROMPTS,
    )  # fmt: skip
    rollout = RolloutConfig(
        max_tokens_to_generate=LENGTH, max_prompt_length=LENGTH, kv_cache_size=2 * LENGTH, temperature=1.0, top_p=1.0
    )
    with mesh:
        cluster = rl_cluster.RLCluster(
            actor=policy(0),
            reference=policy(0),
            tokenizer=Characters(),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh=dict.fromkeys(roles, mesh), training_config=training, rollout_config=rollout
            ),
        )
        learner = GRPOLearner(cluster, GRPOConfig(num_generations=SAMPLES, beta=0.04), reward)
        learner.train(batches())
        times.append((time.perf_counter(), time.process_time()))
    timed = times[WARM_STEPS:total]
    seconds = [after[0] - before[0] for before, after in itertools.pairwise(timed)]
    print(json.dumps({"seconds": seconds, "cpu_seconds_per_step": (timed[-1][1] - timed[0][1]) / len(seconds)}))


if __name__ == "__main__":
    main()
