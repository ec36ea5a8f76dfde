"""GRPO by Tunix on a CPU until it is right: what `tests.bench.peers.accuracy` compares with. Needs google-tunix, and
nothing of this project.

    python tests/bench/peers/tunix_accuracy.py TASK

TASK is the folder that the comparison makes. Prints a line of JSON for each evaluation.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from arithmetic_task import Progress, Task, is_right
from flax import nnx
from safetensors.numpy import load_file
from tunix.models.gemma import model as gemma
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

BOS = "<bos>"
BLOCK_NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Hugging Face's names by Tunix's."""


class Bytes:
    """The byte-level tokenizer of the policy, in the methods that Tunix asks of a tokenizer."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def encode(self, text: str, **options: Any) -> list[int]:
        del options
        return list(text.encode())

    def decode(self, ids: list[int], **options: Any) -> str:
        del options
        return bytes(int(i) for i in ids if int(i) < 256).decode(errors="replace")

    def dedup_bos_ids(self, ids: list[int]) -> list[int]:
        return ids

    def bos_id(self) -> int:
        return self._config["bos_token_id"]

    def eos_id(self) -> int:
        return self._config["eos_token_id"]

    def pad_id(self) -> int:
        return self._config["pad_token_id"]


def policy(task: Task) -> gemma.Gemma:
    """The exported policy as a module of Tunix."""
    given = json.loads((task.policy / "config.json").read_text())
    # in Tunix 0.1.7 the mask of sliding attention is off by the padding before a prompt
    assert set(given["layer_types"]) == {"full_attention"}, "attention that Tunix computes as we do"
    assert given["query_pre_attn_scalar"] == given["head_dim"], "Tunix divides by the root of head_dim"
    cfg = gemma.ModelConfig(
        num_layers=given["num_hidden_layers"], num_embed=given["vocab_size"], embed_dim=given["hidden_size"],
        hidden_dim=given["intermediate_size"], num_heads=given["num_attention_heads"], head_dim=given["head_dim"],
        num_kv_heads=given["num_key_value_heads"], final_logit_softcap=given["final_logit_softcapping"],
        attn_logits_soft_cap=given["attn_logit_softcapping"], use_post_attn_norm=True, use_post_ffw_norm=True,
        attention_types=(gemma.AttentionType.GLOBAL,) * given["num_hidden_layers"],
    )  # fmt: skip
    model = gemma.Gemma(cfg, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    ours = weights(load_file(task.policy / "model.safetensors"), cfg)
    theirs = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for name, leaf in theirs.items():
        assert leaf.shape == ours[name].shape, name
        leaf.set_value(jax.numpy.asarray(ours[name]))
    nnx.update(model, state)
    return model


def weights(saved: dict[str, np.ndarray], cfg: gemma.ModelConfig) -> dict[str, np.ndarray]:
    """Weights by Tunix's names, from Hugging Face's."""
    heads, groups, dim, width = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.embed_dim
    found = {
        "embedder.input_embedding": saved["model.embed_tokens.weight"],
        "final_norm.scale": saved["model.norm.weight"],
    }
    for i in range(cfg.num_layers):

        def of(name: str, i: int = i) -> np.ndarray:
            return saved[f"model.layers.{i}.{name}.weight"]

        keys, values = (of(f"self_attn.{k}_proj").reshape(groups, dim, width).transpose(0, 2, 1) for k in "kv")
        block = {
            "attn.q_einsum.w": of("self_attn.q_proj").reshape(heads, dim, width).transpose(0, 2, 1),
            "attn.kv_einsum.w": np.stack([keys, values]),
            "attn.attn_vec_einsum.w": of("self_attn.o_proj").reshape(width, heads, dim).transpose(1, 2, 0),
        }
        block |= {f"mlp.{name}_proj.kernel": of(f"mlp.{name}_proj").T for name in ("gate", "up", "down")}
        block |= {f"{mine}.scale": of(theirs) for mine, theirs in BLOCK_NORMS.items()}
        found |= {f"layers.{i}.{name}": value for name, value in block.items()}
    return found


def reward(prompts: list[str], completions: list[str], answer: Any, **columns: Any) -> list[float]:
    del prompts, columns
    return [float(is_right(text, str(right))) for text, right in zip(completions, answer, strict=True)]


def cluster_of(task: Task, words: Bytes, mesh: jax.sharding.Mesh) -> rl_cluster.RLCluster:
    given = task.settings
    adam = optax.adamw(task_rate(task), b2=given["b2"], eps=1e-8, weight_decay=0.0)
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    prompts = given["prompts_per_step"]
    training = rl_cluster.RLTrainingConfig(
        eval_every_n_steps=10 * given["steps"], max_steps=given["steps"], mini_batch_size=prompts,
        actor_optimizer=optax.chain(optax.clip_by_global_norm(given["max_grad_norm"]), adam),
        train_micro_batch_size=given["micro_batch_size"] // given["group_size"], rollout_micro_batch_size=prompts,
        compute_logps_micro_batch_size=prompts,
    )  # fmt: skip
    sizes = {"max_tokens_to_generate": given["max_new_tokens"], "max_prompt_length": given["max_prompt_length"]}
    sizes["kv_cache_size"] = sum(sizes.values())
    rollout = {
        rl_cluster.Mode.TRAIN: RolloutConfig(**sizes, temperature=given["temperature"], top_p=1.0),
        rl_cluster.Mode.EVAL: RolloutConfig(**sizes, temperature=0.0, top_p=None),
    }
    return rl_cluster.RLCluster(
        actor=policy(task), reference=policy(task), tokenizer=words,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh), training_config=training, rollout_config=rollout
        ),
    )  # fmt: skip


def task_rate(task: Task) -> optax.Schedule:
    """The schedule as a table: optax calls it with a traced number."""
    table = jax.numpy.asarray([task.learning_rate(update) for update in range(task.settings["steps"])])
    return lambda update: table[jax.numpy.minimum(update, len(table) - 1)]


def main() -> None:
    task = Task(Path(sys.argv[1]))
    given, words = task.settings, Bytes(json.loads((Path(sys.argv[1]) / "policy/config.json").read_text()))
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        cluster = cluster_of(task, words, mesh)
        grpo = GRPOConfig(num_generations=given["group_size"], beta=given["kl_coef"], epsilon=given["clip"])
        learner = GRPOLearner(cluster, grpo, reward)

        def respond(rows: Any) -> list[str]:
            asked = [row["prompt"].removeprefix(BOS) for row in rows]
            return cluster.generate(asked, mode=rl_cluster.Mode.EVAL).text

        progress = Progress(task, respond)
        progress.evaluate(0)
        progress.restart()

        def batches() -> Iterator[dict[str, np.ndarray]]:
            rows, many = task.train, given["prompts_per_step"]
            for update in range(given["steps"] + 1):
                done = cluster.actor_trainer.train_steps
                assert done == update, (done, update)
                if update and progress.is_due(update) and progress.evaluate(update):
                    return  # no more batches: the training ends
                batch = rows[update * many : (update + 1) * many]
                if batch:
                    asked = [row["prompt"].removeprefix(BOS) for row in batch]
                    yield {"prompts": np.array(asked), "answer": np.array([row["answer"] for row in batch])}

        learner.train(batches())


if __name__ == "__main__":
    main()
