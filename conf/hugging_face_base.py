"""Fields of config.json: what we do with them, and those that all families have, or all with rotary positions."""

import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, get_args


class Field(NamedTuple):
    """One field of config.json."""

    default: Any  # the config class's: what an absent field means
    use: Literal["read", "ignored", "fixed"]
    note: str = ""  # ignored: why it changes no number. fixed: what another value would need
    allowed: tuple[Any, ...] = ()  # values of a fixed field besides its default
    type_: type | UnionType = object  # of a field that is read


def read(default: Any = None, type_: type | UnionType | None = None) -> Field:
    """Return a field whose values have the default's type, unless another is given. float: also whole numbers."""
    return Field(default, "read", type_=type_ or type(default))


def ignored(note: str, **defaults: Any) -> dict[str, Field]:
    return {name: Field(default, "ignored", note) for name, default in defaults.items()}


def fixed(default: Any, note: str, *allowed: Any) -> Field:
    return Field(default, "fixed", note, allowed)


class UnknownArchitectureError(ValueError):
    """config.json describes a model that the decoder does not support."""


def unsupported(name: str, value: Any, why: str) -> UnknownArchitectureError:
    """Return the error that names a field and its value."""
    text = repr(value)
    shown = text if len(text) <= 60 else f"{text[:57]}…"
    return UnknownArchitectureError(f"config.json: {name}: {shown} is not supported: {why}")


TYPE_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    Mapping: "a mapping",
    NoneType: "null",
}
"""What messages call the types of JSON."""


def require(name: str, value: Any, type_: type | UnionType) -> None:
    """Raise UnknownArchitectureError unless the value has the type, as transformers 5 does; it also refuses 1 for 1.0.

    https://github.com/huggingface/huggingface_hub/blob/main/src/huggingface_hub/dataclasses.py, type_validator
    """
    kinds = get_args(type_) or (type_,)
    if isinstance(value, bool):
        fits = bool in kinds or object in kinds
    elif isinstance(value, int | float) and float in kinds:
        fits = -math.inf < value < math.inf
    else:
        fits = isinstance(value, type_)
    if not fits:
        raise unsupported(name, value, f"{' or '.join(TYPE_WORDS[kind] for kind in kinds)} is required")


UNQUANTIZED = (
    "quantized weights cannot be read; download the repository that it was made from, which has no quantization_config"
)

GENERATION = ignored(
    "a setting of generation",
    max_length=20, min_length=0, do_sample=False, early_stopping=False, num_beams=1, temperature=1.0, top_k=50,
    top_p=1.0, typical_p=1.0, repetition_penalty=1.0, length_penalty=1.0, no_repeat_ngram_size=0,
    encoder_no_repeat_ngram_size=0, bad_words_ids=None, num_return_sequences=1, output_scores=False,
    return_dict_in_generate=False, forced_bos_token_id=None, forced_eos_token_id=None, remove_invalid_values=False,
    exponential_decay_length_penalty=None, suppress_tokens=None, begin_suppress_tokens=None, num_beam_groups=1,
    diversity_penalty=0.0, epsilon_cutoff=0.0, eta_cutoff=0.0, cache_implementation=None,
)  # fmt: skip

BASE = {
    "model_type": read(""),
    "architectures": read(None, list | None),
    **ignored(
        "describes the file",
        transformers_version=None, _name_or_path="", name_or_path="", _commit_hash=None, unsloth_fixed=False,
        unsloth_version=None, is_llama_config=True, _from_model_config=False,
    ),
    **ignored("describes files of other programs", **{"transformers.js_config": None}),
    **ignored(
        "transformers' own bookkeeping", _post_init_done=False, ignore_keys_at_rope_validation=None,
    ),
    **ignored("each tensor says its own type", dtype=None, torch_dtype=None),
    **ignored(
        "what a call returns, not what it computes",
        output_hidden_states=False, output_attentions=False, return_dict=True, torchscript=False, use_cache=True,
        output_past=True, use_return_dict=True,
    ),
    **ignored(
        "how it is computed, with the same result",
        chunk_size_feed_forward=0, attn_implementation=None, _attn_implementation=None, gradient_checkpointing=False,
        _attn_implementation_autoset=False, use_bfloat16=False, tf_legacy_loss=False, xla_device=None,
        _flash_attn_2_enabled=False, experts_implementation=None, _experts_implementation=None,
    ),
    **ignored(
        "a head that is not loaded",
        id2label=None, label2id=None, num_labels=None, problem_type=None, finetuning_task=None, classifier_dropout=None,
        task_specific_params=None, _num_labels=None,
    ),
    **ignored("encoder-decoder models only", is_decoder=False, tie_encoder_decoder=False, decoder_start_token_id=None),
    **ignored(
        "the tokenizer's",
        tokenizer_class=None, prefix=None, bos_token_id=None, pad_token_id=None, eos_token_id=None, sep_token_id=None,
    ),
    **ignored("of the initial weights", initializer_range=0.02),
    **GENERATION,
    "is_encoder_decoder": fixed(False, "the decoder has no encoder"),
    "add_cross_attention": fixed(False, "the decoder has no cross attention"),
    "cross_attention_hidden_size": fixed(None, "the decoder has no cross attention"),
    "pruned_heads": fixed(None, "all layers have the same heads", {}),
    "per_layer_config": fixed(None, "all layers have the same sizes", {}),
    "quantization_config": fixed(None, UNQUANTIZED),
    "quantization": fixed(None, UNQUANTIZED),  # of mlx-lm
    "compression_config": fixed(None, UNQUANTIZED),
    "auto_map": fixed(None, "the repository's own code would define the model"),
}  # fmt: skip

ROTARY = BASE | {
    **ignored("dropout, which training here does not use", attention_dropout=0.0, hidden_dropout=0.0),
    **ignored("noise of another training", neftune_noise_alpha=None),
    "hidden_size": read(4096),
    "num_hidden_layers": read(32),
    "num_attention_heads": read(32),
    "num_key_value_heads": read(32),
    "rms_norm_eps": read(1e-6),
    "tie_word_embeddings": read(False),
    "rope_parameters": read(None, Mapping | NoneType),  # transformers 5
    "rope_theta": read(10000.0, float | None),  # transformers 4, as rope_scaling
    "rope_scaling": read(None, Mapping | NoneType),
    "rope_interleaved": fixed(False, "the decoder rotates the halves of a head, as transformers does"),  # of nanotron
    "partial_rotary_factor": fixed(None, "the decoder rotates whole heads", 1.0),
    "original_max_position_embeddings": fixed(None, "set it in rope_parameters"),
}
