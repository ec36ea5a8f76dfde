"""The schemas for editors judge every YAML file as `plan` does, and miss no typo."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from omegaconf import OmegaConf
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from controller.cli import main
from controller.config.compose import config_groups
from controller.config.editor_schemas import FILE_PATTERNS, FOLDER, ROOT, editor_settings

STORED = {file.stem: json.loads(file.read_bytes()) for file in FOLDER.glob("*.json")}
KNOWN = Registry().with_resources(
    [(f"{name}.json", Resource.from_contents(schema, DRAFT202012)) for name, schema in STORED.items()]
)


def wrong(schema: str, document: Any) -> list[str]:
    validator = Draft202012Validator({"$ref": f"{schema}.json"}, registry=KNOWN)
    return [error.message for error in validator.iter_errors(document)]


def files(schema: str) -> list[Path]:
    return [file for glob in FILE_PATTERNS[schema] for file in sorted(ROOT.glob(glob.format("conf")))]


def test_every_file_of_every_group_has_a_schema_and_is_right() -> None:
    for schema in FILE_PATTERNS:
        for file in files(schema):
            assert wrong(schema, OmegaConf.to_container(OmegaConf.load(file)) or {}) == [], file
    tables = {"permissions.yaml", "prices.yaml", "regions.yaml", "tpu_types.yaml"}
    judged = [file for schema in FILE_PATTERNS for file in files(schema)]
    assert len(judged) == len(set(judged))
    assert {file.name for file in (ROOT / "conf").rglob("*.yaml") if file not in set(judged)} == tables
    assert set(config_groups()) <= {*FILE_PATTERNS, "experiment", "scale"}
    assert set(FILE_PATTERNS) == set(STORED)


@pytest.mark.parametrize(
    ("schema", "document", "right"),
    [
        ("loop", {"stepss": 4}, False),
        ("loop", {"kind": "lm", "kl_coef": 0.1}, False),
        ("loop", {"loss_type": "grpoo"}, False),
        ("mesh", {"data": "two"}, False),
        ("tpu", {"capacity": ["spott"]}, False),
        ("config", {"loop": {"stepss": 4}}, False),
        ("config", {"optimizr": {}}, False),
        ("config", {"run": {"seed": -1}}, False),
        ("sweep", {"pods": 0}, False),
        ("loop", {"defaults": ["grpo", "_self_"], "kl_coef": "${oc.env:KL}"}, True),
        ("tpu", {"capacity": "spot"}, True),
        ("tpu", {"capacity": ["reserved", "spot"]}, True),
        ("config", {"optimizer": {"lr": "${oc.env:LR}"}, "data": None}, True),
    ],
)
def test_mistakes_are_found_and_parts_and_interpolations_are_right(schema: str, document: Any, right: bool) -> None:
    assert (wrong(schema, document) == []) is right


def test_other_repositories_name_the_installed_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["completion", "vscode"]) == 0
    mapping = json.loads(capsys.readouterr().out)["yaml.schemas"]
    assert all(Path(file).is_file() for file in mapping)
    assert mapping[str(FOLDER / "loop.json")] == ["conf/loop/**/*.yaml", "slipway/loop/**/*.yaml"]
    assert all((ROOT / file).is_file() for file in editor_settings(FOLDER.relative_to(ROOT))["yaml.schemas"])
