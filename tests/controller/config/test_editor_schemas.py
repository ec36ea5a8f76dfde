"""The schemas for editors judge every YAML file as `plan` does, and miss no typo."""

from __future__ import annotations

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
    return [
        error.message
        for error in Draft202012Validator({"$ref": f"{schema}.json"}, registry=KNOWN).iter_errors(document)
    ]


def files(schema: str) -> list[Path]:
    return [file for glob in FILE_PATTERNS[schema] for file in sorted(ROOT.glob(glob.format("conf")))]


@pytest.mark.parametrize("schema", FILE_PATTERNS)
def test_committed_files_are_right(schema: str) -> None:
    for file in files(schema):
        assert wrong(schema, OmegaConf.to_container(OmegaConf.load(file)) or {}) == [], file


def test_every_file_of_every_group_has_a_schema() -> None:
    tables = {"permissions.yaml", "prices.yaml", "regions.yaml", "tpu_types.yaml"}
    judged = [file for schema in FILE_PATTERNS for file in files(schema)]
    assert len(judged) == len(set(judged))
    assert {file.name for file in (ROOT / "conf").rglob("*.yaml") if file not in set(judged)} == tables
    assert set(config_groups()) <= {*FILE_PATTERNS, "experiment", "scale"}
    assert set(FILE_PATTERNS) == set(STORED)


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ("loop", {"stepss": 4}),
        ("loop", {"kind": "lm", "kl_coef": 0.1}),
        ("loop", {"loss_type": "grpoo"}),
        ("mesh", {"data": "two"}),
        ("tpu", {"capacity": ["spott"]}),
        ("config", {"loop": {"stepss": 4}}),
        ("config", {"optimizr": {}}),
        ("config", {"run": {"seed": -1}}),
        ("sweep", {"pods": 0}),
    ],
)
def test_mistakes_are_found(schema: str, document: Any) -> None:
    assert wrong(schema, document)


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ("loop", {"defaults": ["grpo", "_self_"], "kl_coef": "${oc.env:KL}"}),
        ("tpu", {"capacity": "spot"}),
        ("tpu", {"capacity": ["reserved", "spot"]}),
        ("config", {"optimizer": {"lr": "${oc.env:LR}"}, "data": None}),
    ],
)
def test_parts_and_interpolations_are_right(schema: str, document: Any) -> None:
    assert wrong(schema, document) == []


def test_other_repositories_name_the_installed_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["completion", "vscode"]) == 0
    mapping = json.loads(capsys.readouterr().out)["yaml.schemas"]
    assert all(Path(file).is_file() for file in mapping)
    assert mapping[str(FOLDER / "loop.json")] == ["conf/loop/**/*.yaml", "slipway/loop/**/*.yaml"]
    assert all((ROOT / file).is_file() for file in editor_settings(FOLDER.relative_to(ROOT))["yaml.schemas"])
