"""The tables of config.json against transformers' config classes: every field, every default."""

import json
from pathlib import Path
from typing import Any

import pytest

from conf.hugging_face.config_json import ARCHITECTURES, FAMILIES
from conf.hugging_face.fields import FIELDS

RECORDED = json.loads(Path(__file__).with_name("config_classes.json").read_text())
"""By version and model_type; `make_config_classes.py` wrote it."""


def differences(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config class that its table lacks or gives another default."""
    table = FIELDS[kind]
    of_file = {"model_type", "transformers_version"}
    return {
        name: (default, table[name].default if name in table else "not in the table")
        for name, default in fields.items()
        if name not in of_file and (name not in table or table[name].default != default)
    }


@pytest.mark.parametrize("version", RECORDED)
@pytest.mark.parametrize("kind", FIELDS)
def test_the_table_has_every_field_and_default_of_the_class(version, kind):
    assert len(RECORDED[version][kind]) > 10
    assert differences(kind, RECORDED[version][kind]) == {}


def test_the_table_fits_the_installed_transformers():
    pytest.importorskip("transformers")
    from tests.conf.hugging_face.make_config_classes import described

    assert {kind: found for kind, fields in described().items() if (found := differences(kind, fields))} == {}


def test_the_recording_has_both_spellings_of_rotary_parameters():
    assert {version.split(".")[0] for version in RECORDED} == {"4", "5"}
    for version, classes in RECORDED.items():
        wanted = {"4": {"rope_theta"}, "5": {"rope_parameters"}}[version.split(".")[0]]
        assert all(wanted <= classes[kind].keys() for kind in ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text"))


@pytest.mark.parametrize("kind", FIELDS)
def test_what_is_not_read_says_why(kind):
    assert not [name for name, field in FIELDS[kind].items() if (field.use == "read") == bool(field.note)]


def test_every_family_has_a_table():
    assert FIELDS.keys() == FAMILIES.keys() | {"gemma3"} == ARCHITECTURES.keys()
