"""The names of weights that patterns of a config can match are those of the trainer's tables."""

from typing import Any

import pytest

from conf.schema.training.loop_parts import Trm
from conf.schema.training.model import Lora, Model, read_model_section
from conf.schema.training.weight_names import unmatched_modules, weight_names
from tests.groups import load_group
from tests.paths import ROOT
from trainer.distributed.checksums import named_leaves
from trainer.models.weights import weight_table

MODELS = sorted({path.stem for path in (ROOT / "conf/model").glob("*.yaml")} - {"hf", "pretrained"})
MAHA = {"attention_form": "maha", "biases": "none", "attention_pattern": "G", "num_heads": 4, "num_kv_heads": 4}
CHANGES: tuple[dict[str, Any], ...] = (
    *({"biases": biases} for biases in ("none", "qkv", "attention", "mlp", "all")),
    *({"residual": residual} for residual in ("mhc", "mhc_lite", "nash_hc")),
    *({"norm": norm, "norm_embedding": True, "residual_scalars": True} for norm in ("rms_plain", "layer")),
    *({"mlp": mlp, "tie_word_embeddings": False} for mlp in ("gelu", "swiglu")),
    {"pre_norms": False, "post_norms": True, "qk_norm": "whole"},
    MAHA | {"dim": 64, "head_dim": 16},
    MAHA | {"dim": 64, "head_dim": 16, "maha": {"aggregation": "convex", "scales": 2}},
    {"lora": {"r": 2, "lora_alpha": 4, "target_modules": ["layers.*", "unembedding"]}, "tie_word_embeddings": False},
    {"lora": {"r": 2, "lora_alpha": 4, "target_modules": ["layers.gate"]}},
)


def assert_same(cfg: Model | Trm) -> None:
    names = weight_names(cfg)
    assert sorted(names) == sorted(named_leaves(weight_table(cfg)))
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_the_weights_of_its_table(name: str) -> None:
    assert_same(read_model_section(load_group(f"model/{name}")))


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "-".join(map(str, changes.values()))[:40])
def test_every_switch_adds_the_weights_that_it_adds_to_the_table(changes: dict[str, Any]) -> None:
    assert_same(read_model_section(load_group("model/tiny") | changes))


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "gpt_oss_20b"])
def test_adapters_of_experts_have_the_names_of_the_table(name: str) -> None:
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["layers.*"]}
    cfg = read_model_section(load_group(f"model/{name}") | {"lora": lora})
    assert_same(cfg)
    assert {"layers.expert_down_lora_b", "layers.query_lora_a"} <= {*weight_names(cfg)}
    told = Model(**load_group(f"model/{name}") | {"lora": lora | {"target_modules": ["gate_proj", "router"]}})
    [(_, meant), (_, none)] = unmatched_modules(told)
    assert meant.endswith("layers.expert_down, unembedding; did you mean layers.expert_gate?")
    assert none.endswith("layers.expert_down, unembedding")


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("q_proj", "did you mean layers.query?"),
        ("query", "did you mean layers.query?"),
        ("model.layers.0.mlp.down_proj", "did you mean layers.down?"),
        ("all-linear", "did you mean layers.*?"),
        ("lm_head", "choices: layers.query, "),
    ],
)
def test_a_module_of_peft_is_told_what_it_is_called_here(pattern: str, meant: str) -> None:
    lora = Lora(r=1, lora_alpha=1, target_modules=("layers.query", pattern))
    cfg = read_model_section(load_group("model/tiny"))
    assert isinstance(cfg, Model)
    [(key, said)] = unmatched_modules(cfg.model_copy(update={"lora": lora}))
    assert key == "model.lora.target_modules.1"
    assert said.startswith(f"{pattern!r} matches no matrix; ")
    assert meant in said
