"""docs/agents.md and SKILL.md: the keys of the documents, the exit codes, the front matter."""

import json
import re
from pathlib import Path

import pytest
import yaml

from controller.cli import main
from controller.cli.flags import JSON, VERBS, flags
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "agents.md").read_text()
SKILL = (ROOT / "SKILL.md").read_text()


def test_the_skill_has_a_name_a_description_and_leads_to_the_page() -> None:
    _, front, text = SKILL.split("---\n", 2)
    assert yaml.safe_load(front).keys() == {"name", "description"}
    assert yaml.safe_load(front)["name"] == "slipway"
    assert "](docs/agents.md)" in text


def test_every_verb_takes_json() -> None:
    assert all(JSON in flags(verb) for verb in VERBS)


def test_each_exit_code_of_the_readme_has_a_next_step() -> None:
    said = (ROOT / "README.md").read_text().partition("Exit codes: ")[2].partition("\n\n")[0]
    codes = set(re.findall(r"(?:^|· ?\n?)(\d+) [\w`]", said)) - {"130"}
    steps = re.findall(r"^\| ([\d, ]+) \|", PAGE, re.MULTILINE)
    assert codes == {code for step in steps for code in step.split(", ")} == {*map(str, range(10))}


def test_the_keys_of_a_plan_are_those_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SLIPWAY_HOME", "HOME", "CLOUDSDK_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path))
    main.run(["plan", "--json", "+experiment=quickstart", "cloud=gcp", "cloud.project=lab-tpu-7"])
    plan = json.loads(capsys.readouterr().out)
    [named] = re.findall(r"^\| `plan` \| (.*) \|$", PAGE, re.MULTILINE)
    keys = set(re.findall(r"`(\w+)`", named))
    there = {*plan, *plan["resources"][0], *plan["findings"][0]}
    assert keys <= there
    assert {row["action"] for row in plan["resources"]} == {"unknown"}
