"""What the documents say exists: files, verbs, config keys and groups in their commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from conf.schema.run.lifecycle import RecoveryPolicy
from controller.cli import main
from controller.config.compose import config_groups
from controller.sweep.definition import define_sweep
from tests.conftest import deep
from tests.docs.commands import steps_of, verb_of
from tests.paths import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
STEPS = [step for page in PAGES for step in steps_of(page.read_text())]
COMMANDS = sorted({step.words for step in STEPS if not step.file and verb_of(step.words) and "…" not in step.words})
COMMANDS = [words for words in COMMANDS if "calculator_env" not in words]  # a module of the reader's
if find_spec("wandb") is None:
    COMMANDS = [words for words in COMMANDS if "wandb" not in words]
NEED_NO_CONFIG = ("help", "version", "completion")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_no_page_holds_a_merge_conflict(page: Path) -> None:
    assert not re.findall(r"^(?:<{7}|>{7}|={7})(?: .*)?$", page.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `slipway init` has written cloud=mine and tpu=mine, and the reader the files of the pages."""
    project = tmp_path_factory.mktemp("project")
    for group, base in (("cloud", "gcp"), ("tpu", "v5litepod_16")):
        file = project / "slipway" / group / "mine.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(f"defaults: [{base}, _self_]\n")
    for step in STEPS:
        if step.file:
            (file := project / step.file).parent.mkdir(parents=True, exist_ok=True)
            file.write_text(step.words)
    (project / "train.py").touch()
    return project


@pytest.fixture
def as_after_init(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "a-project")


@pytest.mark.parametrize("are_sweeps", [False, *deep(True)])
def test_commands_are_understood(are_sweeps: bool, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "a-project")
    commands = {words: main.parse(shlex.split(words)[1:]) for words in COMMANDS}
    meant = {words: command for words, command in commands.items() if ("-m " in words) == are_sweeps}
    assert len(meant) >= (12 if are_sweeps else 150)
    known: dict[object, list[str]] = {}
    for command in meant.values():
        key = (command.verb in ("rehearse", "fit") and command.verb, command.overrides, command.remainder)
        if key not in known:
            known[key] = what_is_wrong(command)
    assert [found for found in known.values() if found] == []


def what_is_wrong(command: main.Command) -> list[str]:
    """Compose what a command means, and return the errors."""
    if command.remainder:
        command = main.with_program(command)
    if command.verb == "rehearse":
        command = replace(command, overrides=(*command.overrides, "cloud=local"))
    if not any(word.startswith(("+experiment=", "program=")) for word in command.overrides):
        assert command.verb in NEED_NO_CONFIG or command.options.cloud_config()
        return []
    if getattr(command.flags, "multirun", False):
        found = define_sweep(command.overrides, ROOT)
        return [] if found.jobs or found.space else [f"{command.overrides}: no runs"]  # a search draws its runs later
    _, findings = command.options.config(resolve=False)  # run:ID is a run of the reader's
    asked = "fit" if command.verb == "fit" else ""  # the verb asks what the check says
    return [f"{command.overrides}: {one}" for one in findings if one.severity == "error" and one.check != asked]


def test_every_experiment_says_command_time_and_result() -> None:
    for name in config_groups()["experiment"]:
        header = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
        assert header.startswith("# @package _global_\n")
        for word in ("command:", "time:", "result:"):
            assert word in header, name


@pytest.mark.parametrize("page", ["README.md", "docs/comparison.md"])
def test_the_number_of_failures_is_that_of_the_policy(page: str) -> None:
    [number] = re.findall(r"(\d+) kinds of failure", (ROOT / page).read_text())
    assert int(number) == len(RecoveryPolicy.model_fields)


def test_help_and_readme_name_the_same_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split()).partition("exit codes ")[2]
    page = " ".join((ROOT / "README.md").read_text().split()).partition("Exit codes: ")[2].partition(" ## ")[0]
    said = [re.findall(r"(?:^|[,·] )(\d+) [\w`]", words) for words in (text, page)]
    assert said[0] == said[1] == [*map(str, range(10)), "130"]
