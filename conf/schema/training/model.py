"""What a model is: one decoder with switches. conf/model/family/ sets the switches, the files beside it the sizes."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, model_validator

import conf
from conf.schema.base import Strict


class LinearRopeScaling(Strict):
    """Positions are divided by `factor` (https://arxiv.org/abs/2306.15595); Gemma 3 does so in its global layers."""

    kind: Literal["linear"]
    factor: float = Field(ge=1, description="longer contexts by this factor")


class Llama3RopeScaling(Strict):
    """Llama 3.1's: slow frequencies are divided by `factor`, fast ones stay, those between are blended.

    https://arxiv.org/abs/2407.21783, section 3.2; figures as in the published config.json.
    """

    kind: Literal["llama3"]
    factor: float = Field(ge=1, description="longer contexts by this factor")
    low_freq_factor: float = Field(
        gt=0, description="waves longer than original_max_position_embeddings / this are slowed"
    )
    high_freq_factor: float = Field(gt=0, description="waves shorter than original_max_position_embeddings / this stay")
    original_max_position_embeddings: int = Field(ge=1, description="tokens of the context before it was made longer")


class Model(Strict):
    """A decoder. Sizes first, then the switches in which the families differ, then how it is computed."""

    num_layers: int = Field(ge=1, le=512, description="number of decoder layers")
    dim: int = Field(ge=2, le=65536, description="width of the residual stream")
    num_heads: int = Field(ge=1, le=1024, description="number of query heads")
    num_kv_heads: int = Field(ge=1, le=1024, description="number of key and value heads; divides num_heads")
    head_dim: int = Field(ge=2, le=1024, multiple_of=2, description="width of one head")
    mlp_dim: int = Field(ge=1, le=1048576, description="width of the feed-forward layer")
    vocab_size: int = Field(ge=2, le=4194304, description="number of token ids; at least the tokenizer's")

    norm: Literal["rms", "rms_plus_one", "rms_plain", "layer"] = Field(
        description="rms: with a gain; rms_plus_one: gain 1 + weight; rms_plain: no weight; layer: LayerNorm with bias"
    )
    norm_eps: float = Field(gt=0, lt=1, description="added to the mean square, or to the variance")
    post_norms: bool = Field(description="norm the output of attention and of the feed-forward block as well")
    qk_norm: Literal["none", "before_rotation", "after_rotation"] = Field(description="norm each head of query and key")
    mlp: Literal["geglu", "swiglu", "gelu", "relu2"] = Field(description="feed-forward block; the -glu ones are gated")
    biases: Literal["none", "qkv", "all"] = Field(description="which products have a bias")
    position_embedding: Literal["rope", "learned"] = Field(description="how a token knows where it is")
    max_seq_len: int = Field(
        ge=1, le=16_777_216, description="longest sequence; size of the table of learned positions"
    )
    rope_theta: float = Field(gt=1, description="base of the rotary position frequencies")
    rope_local_theta: float | None = Field(gt=1, description="that of local layers; null: the same")
    rope_scaling: Annotated[LinearRopeScaling | Llama3RopeScaling, Field(discriminator="kind")] | None = Field(
        description="for contexts longer than those first trained on; global layers only; null: none"
    )
    attention_pattern: str = Field(
        pattern=r"^[LG]+$", max_length=512, description="attention of the layers in turn, repeated: L local, G global"
    )
    sliding_window: int = Field(
        ge=1, le=16_777_216, description="tokens that a local layer sees, the current one included"
    )
    query_pre_attn_scalar: float | None = Field(
        gt=0, le=65536, description="queries are multiplied by query_pre_attn_scalar ** -0.5; null: head_dim"
    )
    attn_logit_softcap: float | None = Field(gt=0, description="attention logits are capped to +- this; null: no cap")
    final_logit_softcap: float | None = Field(gt=0, description="output logits are capped to +- this; null: no cap")
    scale_embedding: bool = Field(description="multiply embeddings by the root of dim")
    norm_embedding: bool = Field(description="norm embeddings before the first layer")
    residual_scalars: bool = Field(
        description="each layer begins with x = a x + b x0: two learned scalars, x0 the embeddings"
    )
    tie_word_embeddings: bool = Field(description="the output layer is the embedding table")
    init: Literal["fan_in", "gpt2", "nanochat"] = Field(description="distribution of the first values")

    activation_dtype: Literal["float32", "bfloat16"] = Field(description="type of activations; weights are float32")
    attention: Literal["auto", "plain", "splash", "cudnn"] = Field(
        description="auto: the fastest kernel that the backend has for this model; plain: the reference"
    )
    scan_layers: bool = Field(description="one compiled period of layers in a loop (short compile), or all unrolled")
    remat: Literal["none", "products", "outputs", "attention", "full", "auto"] = Field(
        description="kept for the backward pass, from all to little: everything; all products with weights; "
        "what attention needs, and what it and the feed-forward block give the residual stream; what attention needs; "
        "the layer's input. auto: the first of these that fits"
    )
    weights: str | None = Field(
        min_length=1,
        description="folder of first values: of `python -m trainer.convert`, or Hugging Face's; null: random ones",
    )
    logit_chunk: int = Field(ge=1, le=1048576, description="positions of each sequence whose logits exist at a time")

    @model_validator(mode="after")
    def _heads_share_keys(self) -> "Model":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        return self


FAMILY_FOLDER = Path(conf.__file__).with_name("model") / "family"


def family_switches(name: str) -> dict[str, Any]:
    """All keys of `Model` but the sizes, as in conf/model/family/, read without Hydra."""
    return yaml.safe_load((FAMILY_FOLDER / f"{name}.yaml").read_text())
