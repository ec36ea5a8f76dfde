"""Which runs a verb means; without words the last run of the folder, or the last sweep."""

from pathlib import Path

import pytest

from controller.cli import main
from controller.core.errors import ConfigError
from controller.records.last_command import LastCommand, load, save
from controller.records.table import select_runs

pytestmark = pytest.mark.usefixtures("home")
ROWS = [
    {"run": "q-1", "sweep": "q-aaaa", "name": "q", "overrides": ["sweep=seeds"]},
    {"run": "q-2", "sweep": "q-bbbb", "name": "q", "overrides": ["++sweep=seeds"]},
    {"run": "q-3", "sweep": "q-cccc", "name": "q", "overrides": []},
    {"run": "../../etc", "sweep": "../q", "name": "q", "overrides": []},
]


def names(**asked: object) -> tuple[str, list[str]]:
    name, rows = select_runs(ROWS, **asked)  # pyright: ignore[reportArgumentType]
    return name, [row["run"] for row in rows]


def test_by_id_by_name_and_the_newest() -> None:
    assert names(sweep="q-aaaa") == ("q-aaaa", ["q-1"])
    assert names(sweep="seeds") == ("q-bbbb", ["q-2"])
    assert names(sweep="q") == ("q-cccc", ["q-3"])
    assert names() == ("q-cccc", ["q-3"])
    assert names(runs=["q-2", "q-1"]) == ("runs", ["q-1", "q-2"])
    assert names(runs=["q-2"]) == ("q-2", ["q-2"])
    assert names(where=["name=q"], last=2) == ("runs", ["q-2", "q-3"])
    samplers = {"run": "q-4-sampler-1", "sweep": "", "name": "q", "overrides": [], "samples_for": "q-4"}
    trainer = {"run": "q-4", "sweep": "", "name": "q", "overrides": []}
    assert select_runs([*ROWS, trainer, samplers])[0] == "q-4", "the newest run is none of samplers"
    assert (
        select_runs([samplers])[0] == select_runs([*ROWS, trainer, samplers], ["q-4-sampler-1"])[0] == "q-4-sampler-1"
    )
    boards = {"q-dddd": ["q-1", "q-3", "q-9"]}  # a sweep has runs that an earlier one made
    assert names(sweep="q-dddd", boards=boards) == ("q-dddd", ["q-1", "q-3"])
    assert names(sweep="q-aaaa", boards=boards) == ("q-aaaa", ["q-1"])
    for run, sweep, what in (["../../etc"], "", "run"), ([], "../q", "sweep"):
        with pytest.raises(ConfigError, match=f"no such {what}"):
            select_runs(ROWS, run, sweep=sweep)


SWEEP = LastCommand(("cloud=local",), sweep="q-5f0c0000", sweep_words=("cloud=local", "run.seed=0,1"))


def test_what_is_saved_is_loaded_in_that_folder_only() -> None:
    for command in (LastCommand(("a=1",)), LastCommand(("cloud=local",), run="q-1"), SWEEP):
        save(command, Path.cwd())
        assert load(Path.cwd()) == command
    assert load(Path("other")) == LastCommand()


def test_a_run_or_a_sweep_is_meant_by_its_words_or_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    save(LastCommand(("cloud=local",), run="q-1"), Path.cwd())
    command = main.with_recalled(main.parse(["logs"]))
    assert (command.overrides, command.flags.run) == (("cloud=local",), "q-1")
    assert capsys.readouterr().err == "last run of this folder: --run q-1 cloud=local\n"
    save(SWEEP, Path.cwd())
    command = main.with_recalled(main.parse(["status"]))
    assert (command.flags.sweep, command.overrides) == ("q-5f0c0000", ())
    assert capsys.readouterr().err == "last sweep of this folder: -m cloud=local run.seed=0,1\n"
    for words in (["status", "--all"], ["orphans"]):
        assert main.with_recalled(main.parse(words)).overrides == ("cloud=local",)


@pytest.mark.parametrize("verb", ["logs", "down", "get"])
def test_other_verbs_do_not_take_the_run_before_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(SWEEP, Path.cwd())
    assert main.run([verb]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert words.startswith("error: the last command of this folder was the sweep q-5f0c0000; ")
    naming = f"{verb} ID" if verb == "get" else f"{verb} --run ID"
    assert f" {naming} means one of its runs" in words
    assert ("`slipway down -m cloud=local run.seed=0,1` deletes its pods" in words) == (verb == "down")


@pytest.mark.parametrize(("verb", "naming"), [("logs", "logs --run ID"), ("export", "export ID")])
def test_the_message_says_how_the_verb_takes_one(verb: str, naming: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([verb]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert words.startswith(f"error: no run was started from this folder; give {verb} its overrides")
    assert f"or name a run: {naming} (`slipway runs` lists them)" in words
    assert main.parse(naming.replace("ID", "q-1").split()).options.run_id == "q-1"
    assert main.run(["get", "logs"]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert words.startswith("error: get: 'logs' is not the id of a run; name the run before the path: `slipway get RUN")
