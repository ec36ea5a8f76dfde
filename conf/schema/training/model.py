"""The model: one decoder with switches, which conf/model/family/ sets. The files in conf/model/ set the sizes."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

import conf
from conf.reference import Reference
from conf.schema.base import LATER, LocalPath, Strict
from conf.schema.topology import read_table
from conf.schema.training.loop_parts import Trm
from conf.schema.training.rope import RopeScaling as RopeScaling


class HyperConnections(Strict):
    """Of `residual` other than plain."""

    streams: int = Field(default=4, ge=2, le=8, description="Residual streams of mhc (and mhc_lite: at most 5).")
    sinkhorn_iterations: int = Field(
        default=20, ge=1, le=1000, description="Of mhc and nash_hc: normalizations of columns, then rows, of H."
    )
    init_diag: bool = Field(
        default=True,
        description="Of nash_hc: H begins with 1 - 1 / (2 num_layers) on its diagonal. false: with 1 / dim everywhere, "
        "as published, which erases the skip connection.",
    )


class Maha(Strict):
    """Of `attention_form: maha`."""

    scales: int = Field(default=4, ge=1, le=8, description="Scale l has a token for 2^l positions.")
    aggregation: Literal["nash", "convex"] = Field(
        default="nash",
        description="Weights of the scales. nash: per position, by best responses to the others. convex: learned.",
    )
    nash_iterations: int = Field(default=3, ge=0, le=100, description="Best responses. 0: equal weights.")
    sparsity: float = Field(
        default=0.0,
        ge=0,
        description="Of convex: factor of the sum of the weights' absolute values, in each layer, in the training "
        "loss. They sum to 1, so it adds a constant and changes no gradient.",
    )


class Experts(Strict):
    """A feed-forward block of several, of which each token takes some. No token is dropped."""

    count: int = Field(ge=2, le=4096, description="Experts of a layer.")
    per_token: int = Field(ge=1, le=4096, description="Experts that a token takes, the likeliest of its router.")
    norm_topk_prob: bool = Field(description="Divide the shares of a token's experts by their sum.")
    shared_dim: Annotated[int, LATER] = Field(
        default=0, ge=0, le=1048576, description="Width of one that all tokens take, times a sigmoid gate. 0: none."
    )
    inner_dim: Annotated[int | None, LATER] = Field(
        default=None, ge=1, le=1048576, description="Width of each beside a block of mlp_dim (Gemma 4). null: mlp_dim."
    )

    @model_validator(mode="after")
    def _a_token_takes_some(self) -> "Experts":
        if self.per_token > self.count:
            raise ValueError(f"per_token ({self.per_token}) must be at most count ({self.count})")
        if self.inner_dim is not None and self.shared_dim:
            raise ValueError("inner_dim is beside a block, shared_dim beside none; set one of them")
        return self


class DeltaNet(Strict):
    """Gated DeltaNet (https://arxiv.org/abs/2412.06464): attention whose memory is one matrix per head."""

    num_key_heads: int = Field(ge=1, le=1024, description="Number of query and key heads. Must divide num_value_heads.")
    num_value_heads: int = Field(ge=1, le=1024, description="Number of value heads.")
    key_head_dim: int = Field(ge=1, le=1024, description="Width of a query or key head.")
    value_head_dim: int = Field(ge=1, le=1024, description="Width of a value head.")
    conv_kernel_dim: int = Field(ge=2, le=64, description="Tokens that the convolution before it mixes.")

    @model_validator(mode="after")
    def _heads_share_keys(self) -> "DeltaNet":
        if self.num_value_heads % self.num_key_heads:
            given = f"num_value_heads ({self.num_value_heads})"
            raise ValueError(f"{given} must be a multiple of num_key_heads ({self.num_key_heads})")
        return self


class Lora(Strict):
    """Adapters of frozen matrices (https://arxiv.org/abs/2106.09685). Names are those of PEFT's adapter_config.json."""

    r: int = Field(ge=1, le=65536, description="Rank of the adapters.")
    lora_alpha: float = Field(gt=0, description="Adapters are multiplied by lora_alpha / r.")
    use_rslora: bool = Field(default=False, description="Multiply by lora_alpha / sqrt(r) instead (arXiv 2312.03732).")
    target_modules: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        min_length=1,
        description="Patterns of the matrices that get an adapter, e.g. layers.query, layers.* or unembedding.",
    )
    base_dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="Dtype of the frozen weights. Adapters are float32."
    )
    adapter: LocalPath | None = Field(
        default=None, min_length=1, description="Folder of PEFT with the first values of the adapters. null: random."
    )

    @property
    def scale(self) -> float:
        """Factor of the adapters."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)


class Model(Strict):
    """A decoder: its sizes, the switches that differ between families, and how it is computed."""

    kind: Literal["decoder"] = Field(default="decoder", exclude=True, description="Language model.")
    num_layers: int = Field(ge=1, le=512, description="Number of decoder layers.")
    dim: int = Field(ge=2, le=65536, description="Width of the residual stream.")
    num_heads: int = Field(ge=1, le=1024, description="Number of query heads.")
    num_kv_heads: int = Field(ge=1, le=1024, description="Number of key and value heads. Must divide num_heads.")
    head_dim: int = Field(ge=2, le=1024, multiple_of=2, description="Width of one head.")
    mlp_dim: int = Field(ge=1, le=1048576, description="Width of the feed-forward layer, or of one expert.")
    global_head_dim: int | None = Field(
        default=None, ge=2, le=1024, multiple_of=2, description="head_dim of global layers. null: the same."
    )
    num_global_kv_heads: int | None = Field(
        default=None, ge=1, le=1024, description="num_kv_heads of global layers. null: the same."
    )
    num_kv_shared_layers: int = Field(
        default=0,
        ge=0,
        le=511,
        description="This many last layers take keys and values of the last layer before them with the same letter.",
    )
    use_double_wide_mlp: bool = Field(default=False, description="Those layers have mlp_dim twice.")
    per_layer_dim: int = Field(
        default=0, ge=0, le=65536, description="Width of an embedding of the tokens that each layer has. 0: none."
    )
    vocab_size: int = Field(ge=2, le=4194304, description="Number of token IDs, at least the tokenizer's.")

    family: (
        Literal["mistral", "ministral", "ministral3", "gemma", "smollm3", "olmo2", "granite", "phi3", "olmo3", "gemma4"]
        | Literal["qwen3_5", "qwen3_5_moe"]
        | None
    ) = Field(default=None, description="Whose config.json an export has. null: the first that can say these switches.")
    norm: Literal["rms", "rms_plus_one", "rms_plain", "layer"] = Field(
        description="rms: with a gain. rms_plus_one: gain 1 + weight. rms_plain: no weight. layer: LayerNorm with bias."
    )
    norm_eps: float = Field(gt=0, lt=1, description="Added to the mean square, or to the variance.")
    pre_norms: bool = Field(default=True, description="Normalize the input of attention and of the feed-forward block.")
    post_norms: bool = Field(description="Also normalize the output of attention and of the feed-forward block.")
    qk_norm: Literal["none", "before_rotation", "after_rotation", "whole"] = Field(
        description="Normalize query and key heads. whole: all heads together, before rotation."
    )
    value_norm: bool = Field(default=False, description="Normalize value heads, without a gain.")
    attention_k_eq_v: bool = Field(
        default=False, description="The values of global layers are their keys before norm and rotation."
    )
    attention_gate: Annotated[bool, LATER] = Field(
        default=False, description="Multiply what a head attends to by the sigmoid of a projection of its own."
    )
    delta_net: Annotated[DeltaNet | None, LATER] = Field(
        default=None, description="Sizes of the layers D of attention_pattern."
    )
    attention_sinks: Annotated[bool, LATER] = Field(
        default=False, description="Each head has a learned logit to attend to nothing."
    )
    layer_scalars: bool = Field(default=False, description="Multiply each layer's output by a constant of its weights.")
    mlp: Literal["geglu", "swiglu", "clamped_swiglu", "gelu", "relu2"] = Field(
        description="Feed-forward block; the -glu ones are gated. clamped_swiglu: of gpt-oss."
    )
    experts: Experts | None = Field(default=None, description="Experts in all layers. null: one feed-forward block.")
    router_aux_loss_coef: float = Field(
        default=0.0,
        ge=0,
        description="With experts, of loop=lm: factor of the loss that balances them "
        "(https://arxiv.org/abs/2101.03961), over the tokens that the devices compute together. 0: none.",
    )
    biases: Literal["none", "qkv", "attention", "mlp", "all"] = Field(
        description="Projections with a bias. attention: qkv and the output projection. mlp: the feed-forward "
        "block's, or the experts' and their router's."
    )
    position_embedding: Literal["rope", "learned"] = Field(description="Position embedding.")
    max_seq_len: int = Field(
        ge=1, le=16_777_216, description="Maximum sequence length, and size of the learned position table."
    )
    rope_theta: float = Field(gt=1, description="Base of the rotary frequencies.")
    rope_local_theta: float | None = Field(gt=1, description="Base in local layers. null: rope_theta.")
    rope_scaling: RopeScaling | None = Field(
        description="Extends the context beyond the trained length; with rope_local_theta in global layers only. "
        "null: none."
    )
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1, description="Share of a head that is rotated.")
    attention_pattern: str = Field(
        pattern=r"^[LGlgD]+$",
        max_length=512,
        description="Attention per layer, repeated. L: local, G: global, l and g: the same without rotary positions. "
        "D: delta_net.",
    )
    sliding_window: int = Field(
        ge=1, le=16_777_216, description="Tokens that a local layer attends to, including the current one."
    )
    query_pre_attn_scalar: float | None = Field(
        gt=0, le=65536, description="Queries are multiplied by query_pre_attn_scalar ** -0.5. null: head_dim."
    )
    attn_logit_softcap: float | None = Field(gt=0, description="Attention logits are capped to ± this. null: no cap.")
    final_logit_softcap: float | None = Field(gt=0, description="Output logits are capped to ± this. null: no cap.")
    scale_embedding: bool = Field(description="Multiply embeddings by the square root of dim.")
    embedding_multiplier: float = Field(default=1.0, gt=0, description="Multiply embeddings by this.")
    residual_multiplier: float = Field(
        default=1.0, gt=0, description="Multiply what attention and the feed-forward block add to the residual stream."
    )
    logits_scaling: float = Field(default=1.0, gt=0, description="Divide output logits by this.")
    norm_embedding: bool = Field(description="Normalize embeddings before the first layer.")
    residual_scalars: bool = Field(
        description="Each layer starts with x = a x + b x0, where a and b are learned scalars and x0 the embeddings."
    )
    residual: Literal["plain", "mhc", "mhc_lite", "nash_hc"] = Field(
        default="plain",
        description="plain: x + f(x). mhc: parallel streams, mixed by doubly stochastic matrices of each token. "
        "mhc_lite: by convex sums of permutations. nash_hc: learned mixing of channels (docs/nash-mhc.md).",
    )
    hyper: HyperConnections = Field(default=HyperConnections(), description="Settings of residual other than plain.")
    attention_form: Literal["causal", "maha"] = Field(
        default="causal",
        description="causal: one attention. maha: one at each of several resolutions, then a weighted sum; no sampler.",
    )
    maha: Maha = Field(default=Maha(), description="Settings of attention_form maha.")
    tie_word_embeddings: bool = Field(description="Use the embedding table as the output layer.")
    init: Literal["fan_in", "gpt2", "nanochat"] = Field(description="Distribution of the initial weights.")

    activation_dtype: Literal["float32", "bfloat16"] = Field(description="Dtype of activations. Weights are float32.")
    attention: Literal["auto", "plain", "splash", "cudnn"] = Field(
        description="auto: the fastest kernel that the backend has for this model. plain: the reference."
    )
    scan_layers: bool = Field(description="Compile one period of layers and loop over it, or unroll all layers.")
    remat: Literal["none", "products", "outputs", "offload", "attention", "full", "chunks", "auto"] = Field(
        description="What the backward pass keeps, from most to least. none: everything. products: all products with "
        "weights. outputs: attention's inputs and what attention and the feed-forward block add to the residual "
        "stream. offload: the same, in the memory of the TPU's host. attention: attention's inputs. full: each layer's "
        "input. chunks: as full, with the feed-forward block in chunks of 4,096 tokens, which is slow with mesh.fsdp. "
        "auto: the first that fits; never offload."
    )
    weights: LocalPath | None = Field(
        min_length=1,
        description="Initial weights: hf://OWNER/NAME, a folder of Hugging Face, `slipway export` or `python -m "
        "trainer.convert`, a checkpoint of a run RUN/checkpoints/STEP, or run:ID, run:ID@best, run:ID@STEP. "
        "null: random.",
    )
    lora: Lora | None = Field(
        default=None, description="Train adapters and freeze all weights. null: train all weights."
    )
    config_json: str | None = Field(
        default=None,
        min_length=1,
        description="Where the sizes and switches come from: a Hugging Face folder, here or assets://, or a repository "
        "such as google/gemma-2-2b, of which only config.json is read. null: this config has them.",
    )
    implementation: Reference | None = Field(
        description="module:name of a model family of your own, for the lm loop (docs/extend.md). null: our decoder."
    )
    logit_chunk: int = Field(ge=1, le=1048576, description="Positions per sequence whose logits exist at a time.")

    @model_validator(mode="after")
    def _heads_share_keys(self) -> "Model":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        return self

    @model_validator(mode="after")
    def _layers_have_keys(self) -> "Model":
        if self.num_heads % (self.num_global_kv_heads or 1):
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_global_kv_heads ({self.num_global_kv_heads})"
            )
        shared = self.num_kv_shared_layers
        letters = (self.attention_pattern * self.num_layers)[: self.num_layers]
        if shared and not {*letters[-shared:]} <= {*letters[:-shared]}:
            raise ValueError(f"num_kv_shared_layers ({shared}) leaves no layer with keys for some of the last ones")
        return self

    @model_validator(mode="after")
    def _rotation_suits_the_head(self) -> "Model":
        if self.rotated_dim < 2 or self.rotated_dim % 2:
            raise ValueError(f"partial_rotary_factor x head_dim must be an even number, not {self.rotated_dim}")
        if self.rope_scaling is not None and self.rope_scaling.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                if (found := len(getattr(self.rope_scaling, name))) != self.rotated_dim // 2:
                    raise ValueError(f"rope_scaling.{name} must have {self.rotated_dim // 2} numbers, not {found}")
        return self

    @model_validator(mode="after")
    def _forms_suit_the_model(self) -> "Model":
        if self.qk_norm == "whole" and self.norm == "rms_plain":
            raise ValueError("qk_norm whole needs a norm with weights, not rms_plain")
        if self.attention_form == "maha" or self.residual != "plain":
            for key in ("global_head_dim", "num_global_kv_heads", "num_kv_shared_layers", "per_layer_dim", "delta_net"):
                if getattr(self, key):
                    raise ValueError(f"{key} needs attention_form causal and residual plain")
        if (self.delta_net is not None) != ("D" in self.attention_pattern):
            raise ValueError("delta_net is of the layers D of attention_pattern: set both or none")
        if self.delta_net is not None and (self.num_kv_shared_layers or self.biases not in ("none", "mlp")):
            raise ValueError("delta_net needs num_kv_shared_layers 0 and no biases of attention")
        if self.residual == "mhc_lite" and self.hyper.streams > 5:
            raise ValueError(f"residual mhc_lite has streams! permutations: hyper.streams ({self.hyper.streams}) > 5")
        if self.attention_form == "maha":
            wanted = {"biases": "none", "attention_pattern": "G", "num_kv_heads": self.dim / self.head_dim}
            if self.attention_sinks:
                raise ValueError("attention_form maha needs attention_sinks false")
            for key, value in wanted.items():
                if getattr(self, key) != value:
                    raise ValueError(f"attention_form maha needs {key} {value:{'' if isinstance(value, str) else 'g'}}")
        if self.experts is not None:
            allowed = {"mlp": ("swiglu", "geglu", "clamped_swiglu"), "implementation": (None,)}
            for key, values in allowed.items():
                if (value := getattr(self, key)) not in values:
                    raise ValueError(f"experts: {key} {value} is not supported, only {', '.join(map(str, values))}")
            if self.remat == "chunks":
                raise ValueError("remat chunks is not supported with experts; use full")
            if self.use_double_wide_mlp and not self.has_dense_block:
                raise ValueError("use_double_wide_mlp needs a block beside the experts (experts.inner_dim)")
        elif self.router_aux_loss_coef:
            raise ValueError("router_aux_loss_coef is of experts, and the model has none; use 0")
        if self.lora is not None and (self.attention_form != "causal" or self.implementation is not None):
            raise ValueError("lora: only attention_form causal of Slipway's own decoder has adapters; use null")
        return self

    @property
    def max_sampled_len(self) -> int:
        """Tokens of the longest text that can be sampled: in longer ones, longrope has other keys for all tokens."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "longrope":
            return self.max_seq_len
        return min(self.max_seq_len, scaling.original_max_position_embeddings)

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward block has a gate."""
        return self.mlp.endswith("glu")

    @property
    def shared_dim(self) -> int:
        """Width of the expert that all tokens take. 0: there is none."""
        return 0 if self.experts is None else self.experts.shared_dim

    @property
    def has_dense_block(self) -> bool:
        """Whether layers have a feed-forward block that all tokens take."""
        return self.experts is None or self.experts.inner_dim is not None

    @property
    def rotated_dim(self) -> int:
        """Entries of a head that are rotated: its first ones."""
        return int(self.head_dim * self.partial_rotary_factor)


def _kind(value: Any) -> str:
    """Return the kind of a model; a decoder need not name it."""
    return value.get("kind", "decoder") if isinstance(value, dict) else getattr(value, "kind", "decoder")


AnyModel = Annotated[
    Annotated[Model, Tag("decoder")] | Annotated[Trm, Tag("trm")],
    Discriminator(_kind, custom_error_type="kind", custom_error_message="kind must be decoder or trm"),
]
"""What the trainer can train: `trainer.models.weights.weight_table` has the weights of each kind."""

KEYS_FREE_OF_WEIGHTS = {
    *("family", "activation_dtype", "attention", "scan_layers", "remat", "logit_chunk", "init", "max_seq_len"),
    *("weights", "config_json", "router_aux_loss_coef", "h_cycles", "l_cycles"),
}
"""Keys that may differ between the run that made some weights and one that starts from them."""


def different_weights(found: Model | Trm, wanted: Model | Trm) -> str:
    """Return the first key by which the weights of two models cannot be exchanged; empty if they can."""
    if found.kind != wanted.kind:
        return "kind"
    free = KEYS_FREE_OF_WEIGHTS - ({"max_seq_len"} if wanted.position_embedding == "learned" else set())
    keys = [key for key in type(wanted).model_fields if key not in free]
    different = [key for key in keys if getattr(found, key) != getattr(wanted, key)]
    if isinstance(found, Model) and isinstance(wanted, Model) and wanted.lora is not None:
        same = ("r", "scale", "target_modules")  # adapters begin anew on weights without them
        if found.lora is None or all(getattr(found.lora, key) == getattr(wanted.lora, key) for key in same):
            different = [key for key in different if key != "lora"]
    return next(iter(different), "")


def read_model_section(raw: Any) -> Model | Trm:
    """Return the section `model` of a config or a file. Raises ValidationError."""
    return TypeAdapter(AnyModel).validate_python(raw)


FAMILY_FOLDER = Path(conf.__file__).with_name("model") / "family"


def family_switches(name: str) -> dict[str, Any]:
    """Return all keys of `Model` except the sizes, as in conf/model/family/, without Hydra."""
    own = read_table(FAMILY_FOLDER / f"{name}.yaml")
    others = [line.removesuffix("@_here_") for line in own.pop("defaults", ()) if line != "_self_"]
    return {key: value for other in others for key, value in family_switches(other).items()} | own
