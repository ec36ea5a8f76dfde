"""docs/guides.yaml covers every line of the guides, and what it names exists; the page has a command for each."""

import pkgutil
import re
from importlib import import_module
from typing import Any, get_args

from pydantic import BaseModel

import controller.resources
from conf.schema.config import Config
from controller.checks.preflight import page as checks_page
from controller.cli import main
from controller.config.compose import config_groups
from controller.reconcile import Resource
from tests.groups import load_yaml
from tests.paths import ROOT

CONTENT = load_yaml(ROOT / "docs" / "guides.yaml")
ROWS: dict[str, dict[str, Any]] = CONTENT["rows"]
TESTS: dict[str, str] = CONTENT["tests"]
LINES = {0: 78, 1: 52, 2: 41, 3: 27, 4: 20}
"""How many lines each guide has, and below, how many contradictions there are."""
CONTRADICTIONS = 26


def models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in models(part)]


def is_key(dotted: str) -> bool:
    at: list[type[BaseModel]] = [Config]
    for part in dotted.split("."):
        fields = [model.model_fields[part].annotation for model in at if part in model.model_fields]
        if not fields:
            return False
        at = [found for annotation in fields for found in models(annotation)]
    return True


def kinds() -> set[str]:
    for module in pkgutil.iter_modules(controller.resources.__path__, "controller.resources."):
        import_module(module.name)
    found, left = set(), [Resource]
    while left:
        left += (one := left.pop()).__subclasses__()
        found.add(getattr(one, "kind", ""))
    return found


CHECKS = set(re.findall(r"^- `(\w+)`", checks_page(), re.MULTILINE))
KINDS = kinds()
EXISTS = {
    "key": is_key,
    "kind": KINDS.__contains__,
    "check": CHECKS.__contains__,
    "verb": main.VERBS.__contains__,
    "page": lambda name: (ROOT / name).is_file(),
    "file": lambda name: (ROOT / name).is_file(),
    **{group: config_groups()[group].__contains__ for group in ("experiment", "program", "scale", "tpu")},
    "none": bool,
}


def test_every_line_is_there_once_and_in_order() -> None:
    lines = [f"{guide}.{n}" for guide, count in LINES.items() for n in range(1, count + 1)]
    assert list(ROWS) == [*lines, *(f"C{n}" for n in range(1, CONTRADICTIONS + 1))]
    text = (ROOT / "docs" / "guides.yaml").read_text()
    names = re.findall(r'^  "?([\dC][\d.]*)"?: \{', text, re.MULTILINE)
    assert len(names) == len(set(names)) == len(ROWS)
    assert len(re.findall(r"^  \w+: tests/", text, re.MULTILINE)) == len(TESTS), "a test is named twice"


def test_what_covers_a_line_exists_and_every_row_names_tests_or_says_why_there_is_none() -> None:
    for name, row in ROWS.items():
        assert set(row) in ({"what", "by", "tests"}, {"what", "by", "untested"}), name
        assert row["by"], name
        for item in row["by"]:
            sort, _, subject = item.partition(" ")
            assert sort in EXISTS, (name, item)
            assert EXISTS[sort](subject), (name, item)
        assert row.get("tests") or row.get("untested"), name
    assert {test for row in ROWS.values() for test in row.get("tests", ())} == TESTS.keys()
    untested = [name for name, row in ROWS.items() if "untested" in row]
    assert untested == ["0.75", "0.78", "1.3", "1.51", "2.35", "2.36", "C10", "C23"]


def test_each_guide_is_one_command() -> None:
    page = (ROOT / "docs" / "guides.md").read_text()
    commands = re.findall(r"^```\n(slipway .*)\n```$", page, re.MULTILINE)
    assert len(commands) == page.count("\n## ") == len(LINES)
    assert all(main.parse(command.split()[1:]).verb == "up" for command in commands)
    assert f" {len(ROWS)} instructions and contradictions" in page
