"""The expert that all tokens take, of Qwen 3.5: what optimizers, adapters and counts make of it, and runs.

test_experts.py computes it and reads its files; test_decoder.py and those beside it compare the whole model.
"""

from pathlib import Path

import numpy as np
import pytest
from etils import epath
from pydantic import TypeAdapter

from conf.schema.training.layer_kinds import attended_entries
from conf.schema.training.model import Model
from conf.schema.training.optimizer import Optimizer
from conf.schema.training.run_yaml import RunFile
from conf.schema.training.weight_names import adapted_matrices
from controller.checks.fit import matrix_weights
from controller.run.estimate import token_flops
from tests.groups import load_group
from tests.trainer.lives import train
from tests.trainer.models.reference_models import described
from trainer.models import experts
from trainer.optimizer.rules import update_rules
from trainer.pretrained import run_weights
from trainer.telemetry.throughput import model_flops


def test_an_expert_of_all_tokens_is_a_matrix_like_others_and_has_adapters():
    cfg, own = described("qwen3_5_moe"), ("gate", "up", "down", "shared_gate")
    for name, of_experts, of_layers in (
        ("muon", "muon", "muon"),
        ("adafactor", "adafactor_experts", "adafactor_layers"),
    ):
        rules = update_rules(TypeAdapter(Optimizer).validate_python(load_group(f"optimizer/{name}")), cfg)
        assert {rules[f"layers.{matrix}"].direction for matrix in experts.MATRICES} == {of_experts}
        assert {rules[f"layers.{matrix}"].direction for matrix in ("router", *own)} == {of_layers}
    adapted = {path.removeprefix("layers.") for path in adapted_matrices(cfg)}
    assert adapted >= {"gate", "up", "down", "delta_query", "query_gate", *experts.MATRICES}
    assert not adapted & {"router", "shared_gate"}


def test_a_token_is_counted_with_the_expert_of_all_tokens():
    """Of Qwen3.5-35B-A3B."""
    cfg = Model(**load_group("model/qwen3_5_35b_a3b"))
    recurrent = 2048 * (2 * 16 * 128 + 3 * 32 * 128 + 2 * 32)
    attention = 30 * recurrent + 10 * 2048 * 256 * (3 * 16 + 2 * 2)
    expert, routed = 3 * 2048 * 512, 2048 * (256 + 1)
    assert matrix_weights(cfg) == attention + 40 * (257 * expert + routed)
    assert matrix_weights(cfg, per_token=True) == attention + 40 * (9 * expert + routed)
    assert token_flops(cfg, 1) == pytest.approx(model_flops(cfg, 1, 1), rel=1e-3)
    kernels = 30 * 4 * (2 * 16 * 128 + 32 * 128)
    active = matrix_weights(cfg, per_token=True) + kernels + 248320 * 2048
    assert model_flops(cfg, 1, 1) / 6 - 2 * attended_entries(cfg, 1) == active


DELTA = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8, "conv_kernel_dim": 4}
BIASES = ("sink_logits", "router_bias", "expert_gate_bias", "expert_up_bias", "expert_down_bias")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "own", "learned"),
    [
        ("gpt_oss_20b", {"sliding_window": 8}, BIASES),
        ("qwen3_5_35b_a3b", {"attention_pattern": "DG", "delta_net": DELTA, "experts": {"shared_dim": 24}}, ()),
    ],
)
@pytest.mark.parametrize("loop", ["lm", "grpo"])
def test_runs_train_sinks_and_experts_with_biases_or_one_of_all_tokens(loop, name, own, learned, request, tmp_path):
    """grpo: three supervised updates, rollouts with a window shorter than a prompt, and updates on shared prompts."""
    raw = request.getfixturevalue(f"{loop}_run")
    own = own | {"experts": {"count": 4, "per_token": 2, "norm_topk_prob": True} | own.get("experts", {})}
    own |= {"dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 32}
    own |= {"num_layers": 2, "vocab_size": raw["model"]["vocab_size"], "max_seq_len": 64, "activation_dtype": "float32"}
    model = load_group(f"model/{name}") | own
    lines = train(raw | {"model": model}, tmp_path)
    assert {line["phase"] for line in lines} >= ({"grpo", "warm_start"} if loop == "grpo" else {"train"})
    assert all(np.isfinite(line["loss"]) for line in lines if line.get("loss") is not None)
    end = RunFile.model_validate(raw | {"model": model})
    step = max(int(folder.name) for folder in (Path(end.dir) / "checkpoints").iterdir() if folder.name.isdigit())
    cfg = end.decoder
    layers = run_weights.read_params(epath.Path(end.dir) / "checkpoints" / str(step), cfg)["layers"]
    for weight in learned:
        assert np.abs(np.asarray(layers[weight])).max() > 0, weight
