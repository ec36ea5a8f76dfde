"""The tables of fields beside what transformers has written, read and given as defaults."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest

from conf.config_json import ARCHITECTURES, FAMILIES, WITH_IMAGES
from conf.hugging_face_fields import FIELDS

RECORDED = json.loads(Path(__file__).with_name("config_classes.json").read_text())
"""By version and model_type; `make_config_classes.py` wrote it."""


WRITTEN: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("written_fields.json").read_text())["families"]
"""By model_type, what 24 versions from 2.0 on wrote, with types, and their models read: `make_written_fields.py`."""
READ_AND_IGNORED = {
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout", "summary_last_dropout"),
    *("classifier_dropout", "hidden_dropout", "num_labels", "problem_type", "summary_proj_to_labels"),
    *("summary_use_proj", "initializer_range", "output_attentions", "output_hidden_states", "use_cache"),
    *("output_past", "use_return_dict", "_attn_implementation", "_flash_attn_2_enabled"),
    "pad_token_id",  # the embedding's row that gets no gradient
    "pretraining_tp",  # splits products
    "reorder_and_upcast_attn",  # softmax in float32
    "n_ctx",  # the size of the causal mask, as n_positions
    *("image_token_id", "image_token_index", "mm_tokens_per_image", "vision_config", "projector_hidden_act"),
    *("multimodal_projector_bias", "spatial_merge_size", "vision_feature_layer"),
    *("audio_config", "audio_token_id", "video_token_id", "vision_start_token_id"),
    "dtype",  # of Qwen 3.5's norms before they are read
}
"""Fields that a model of transformers reads and that change no logits of the decoder without dropout."""
OF_EXPERTS = {
    "router_aux_loss_coef",
    "output_router_logits",
    "intermediate_size",
    "sliding_window",
    "max_window_layers",
}
"""Further ones where all layers have experts and no layer a window: of another loss, and of other layers."""


@pytest.mark.parametrize("kind", FIELDS)
def test_types_are_those_of_the_config_class(kind):
    """A number that is no whole one may be written as one; transformers 4 took that, and no other than itself is it."""
    words = {"bool": bool, "int": int, "float": float, "list[str]": list, "dict": Mapping, "None": NoneType}
    words |= {"dict[str, Any]": Mapping, "list[int]": list}
    typed = {
        name: type_ for name, type_ in WRITTEN[kind]["written"].items() if type_ and FIELDS[kind][name].use == "read"
    }
    assert len(typed) > 2
    for name, annotation in typed.items():
        named = {words[word] for word in annotation.removesuffix(" | int").split(" | ") if word in words}
        assert set(get_args(FIELDS[kind][name].type_) or (FIELDS[kind][name].type_,)) == named, name


@pytest.mark.parametrize("kind", FIELDS)
def test_what_transformers_has_ever_written_is_known_and_what_is_ignored_changes_nothing(kind):
    written, used = WRITTEN[kind]["written"], WRITTEN[kind]["read"]
    assert len(written) > 25
    assert [name for name in written if name not in FIELDS[kind]] == []
    ignored = {name for name, field in FIELDS[kind].items() if field.use == "ignored"}
    assert ignored & set(used) <= READ_AND_IGNORED | (OF_EXPERTS if "num_experts_per_tok" in written else set())


def differences(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config class that its table lacks or gives another default."""
    table = FIELDS[kind]
    of_file = {"model_type", "transformers_version", "per_layer_config"}  # made of Gemma 4's sizes of global layers
    return {
        name: (default, table[name].default if name in table else "not in the table")
        for name, default in fields.items()
        if name not in of_file and (name not in table or table[name].default != default)
    }


@pytest.mark.parametrize("kind", FIELDS)
def test_the_table_has_every_field_and_default_of_the_class(kind):
    for version, classes in RECORDED.items():
        if kind in classes and (kind != "ministral3" or version.startswith("5.")):
            assert len(classes[kind]) > 10
            of_training = {"router_aux_loss_coef": (0.9, 0.001)} if (kind, version[0]) == ("gpt_oss", "4") else {}
            assert differences(kind, classes[kind]) == of_training, version
    assert not [name for name, field in FIELDS[kind].items() if (field.use == "read") == bool(field.note)], "says why"


def test_the_table_fits_the_installed_transformers():
    pytest.importorskip("transformers")
    from tests.conf.make_config_classes import described

    assert {kind: found for kind, fields in described().items() if (found := differences(kind, fields))} == {}


def test_the_recording_has_both_spellings_of_rotary_parameters():
    assert {version.split(".")[0] for version in RECORDED} == {"4", "5"}
    for version, classes in RECORDED.items():
        wanted = {"4": {"rope_theta"}, "5": {"rope_parameters"}}[version.split(".")[0]]
        assert all(wanted <= classes[kind].keys() for kind in ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text"))

    assert FIELDS.keys() == FAMILIES.keys() | WITH_IMAGES.keys() == ARCHITECTURES.keys()
