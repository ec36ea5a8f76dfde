"""Rotary positions of config.json: both spellings, those of layer types, the defaults of a class."""

import math
from typing import Any

import pytest

from tests.conf.test_config_json import YARN, read, refusal


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_both_spellings_of_rotary_parameters_give_the_same_model(kind):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    for scaled in ({"rope_type": "llama3", **scaling}, {"rope_type": "linear", "factor": 3.0}, YARN, {}):
        new = read(kind, rope_parameters={"rope_type": "default", **scaled, "rope_theta": 5e5})
        old = read(kind, rope_theta=5e5, rope_scaling=scaled or None)
        older = {"type" if key == "rope_type" else key: value for key, value in scaled.items()}
        both = read(kind, rope_parameters={**scaled, "rope_theta": 5e5}, rope_theta=5e5, rope_scaling=older or None)
        assert new == old == both
        assert (new.rope_scaling is None) == (not scaled)


def test_local_layers_have_their_own_rotary_parameters():
    def parameters(**local: Any) -> dict[str, Any]:
        return {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": local}

    found = read("gemma3_text", rope_parameters=parameters(rope_type="default", rope_theta=50.0))
    assert (found.rope_local_theta, found.rope_theta) == (50.0, 1e6)
    assert found.rope_scaling is not None
    assert read("gemma3_text", rope_scaling={"type": "linear", "factor": 8.0}, rope_local_base_freq=50.0) == found
    message = refusal("gemma3_text", rope_parameters=parameters(rope_type="linear", factor=2.0))
    assert "rope_parameters.sliding_attention: " in message
    assert "is not supported: the decoder does not scale the positions of local layers" in message
    assert "gemma3_text has one entry per layer type" in refusal("gemma3_text", rope_parameters=YARN)
    assert "llama has one for all layers" in refusal("llama", rope_parameters=parameters())


def test_gpt_oss_is_quantized_or_not_and_says_its_rotation_in_either_way():
    """As GptOssConfig() of transformers 4 and 5; without attention_bias only the experts and the router have biases."""
    found = read("gpt_oss")
    assert found.rope_scaling is not None
    assert (found.rope_scaling.kind, found.rope_scaling.truncate, found.rope_theta) == ("yarn", False, 150_000)
    assert found.rope_scaling.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    assert (found.attention_pattern, found.sliding_window, found.biases) == ("LG", 128, "all")
    new = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    assert read("gpt_oss", rope_parameters=new | {"rope_theta": 150_000}) == read("gpt_oss", rope_scaling=new) == found
    longer = read("gpt_oss", rope_parameters=new | {"factor": 64.0}).rope_scaling
    assert longer is not None
    assert longer.factor == 64
    assert read("gpt_oss", quantization_config={"quant_method": "mxfp4"}, experts_per_token=4) == found
    assert read("gpt_oss", attention_bias=False).biases == "mlp"


def test_yarn_has_the_attention_factor_of_transformers():
    """0.1 ln 4 + 1, and DeepSeek's ratio of two of them."""

    def factor(**fields: Any) -> float:
        scaling = read("llama", rope_scaling=YARN | fields).rope_scaling
        assert scaling is not None
        assert scaling.kind == "yarn"
        return scaling.attention_factor

    assert factor() == pytest.approx(1.1386294)
    assert factor(mscale=2.0, mscale_all_dim=1.0) == pytest.approx(1.2772589 / 1.1386294)
    assert factor(attention_factor=1.5) == 1.5
    assert factor(factor=1.0) == 1.0


def test_without_rope_parameters_ministral_3_has_those_of_its_class():
    """Ministral3Config()."""
    scaling = read("ministral3").rope_scaling
    assert scaling is not None
    assert scaling.kind == "yarn"
    found = (scaling.factor, scaling.original_max_position_embeddings, scaling.llama_4_scaling_beta)
    assert found == (16.0, 16384, 0.1)
    assert (read("ministral3").rope_theta, scaling.attention_factor) == (1e6, 1.0)
