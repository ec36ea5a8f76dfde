"""What the documents say exists: files, verbs, config keys and groups in their commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema.run.lifecycle import RecoveryPolicy
from controller.cli import main
from controller.cli.flags import VERBS
from controller.config.compose import config_groups
from controller.records import last_command
from controller.sweep.definition import define_sweep
from tests.paths import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
COMMAND = re.compile(
    r"^(?:\$ )?(?:slipway|python -m controller) (?!trainer\.)(?P<words>[^#\n…]+?)\s*(?:#.*)?$", re.MULTILINE
)
COMMANDS = sorted({m["words"] for page in PAGES for m in COMMAND.finditer(page.read_text())})
USER_FILE = re.compile(r"write `(?P<path>slipway/[\w/]+\.yaml)`:\n\n```yaml\n(?P<yaml>.*?)```", re.DOTALL)
"""A file that a page tells the reader to write."""


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
    for page in PAGES:
        for written in USER_FILE.finditer(page.read_text()):
            file = project / written["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(written["yaml"])
    (project / "train.py").touch()
    return project


@pytest.fixture
def as_after_init(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "a-project")


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.usefixtures("as_after_init")
def test_commands_are_understood(words: str) -> None:
    if "wandb" in words:
        pytest.importorskip("wandb")
    command = main.with_program(main.parse(shlex.split(words)))
    if getattr(command.flags, "plan", None):
        return  # a file of the reader's
    if command.verb == "rehearse":
        command = replace(command, overrides=(*command.overrides, "cloud=local"))
    if command.verb in last_command.VERBS and not command.overrides and not command.options.run_id:
        command = replace(command, overrides=("+experiment=quickstart",))  # they mean the last run
    if getattr(command.flags, "multirun", False):
        found = define_sweep(command.overrides, ROOT)
        assert found.jobs or found.space  # a search draws its runs later
    elif (
        command.verb in ("capacity", "orphans", "init", "witness", "runs", "report", "tensorboard")
        or command.options.run_id
        or getattr(command.flags, "sweep", None)
    ):
        assert command.options.cloud_config()
    elif command.verb != "localcloud" and VERBS[command.verb].config:
        _, findings = command.options.config(resolve=False)  # run:ID is a run of the reader's
        without = "fit" if command.verb == "fit" else ""  # the verb asks what the check says
        assert [str(f) for f in findings if f.severity == "error" and f.check != without] == []


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) >= 10


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
