"""The table of runs: conditions, order, exports, what differs; and which runs a verb means, with words or without."""

import csv
import io
import json
import math
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.strict_json import dumps
from controller import api
from controller.cli import main
from controller.cli.verbs.reports import compose_config
from controller.core.errors import ConfigError
from controller.core.events import Event
from controller.core.json_documents import DamagedRecordError
from controller.records import index
from controller.records.index import LastCommand, load_last_command, save_last_command
from controller.records.ledger import Alert, AlertRecord, Result
from controller.records.recorder import program_name, read_run_record, row_from_record, run_folder
from controller.records.table import as_csv, diff_records, filter_rows, flat, format_table, select_runs
from tests.conf.test_strict_json import strict
from tests.golden import golden

ROWS = [
    {"run": "a-1", "created": 1.0, "state": "finished", "overrides": ["x=1", "+experiment=q"], "metrics": {"acc": 0.9}},
    {"run": "a-2", "created": 2.0, "state": "failed", "overrides": ["x=2", "+experiment=q"], "metrics": {}},
    {"run": "b-3", "created": 3.0, "state": "finished", "overrides": ["x=3", "+experiment=q"], "metrics": {"acc": 0.5}},
]


def names(*conditions: str, sort: str | None = None, last: int | None = None) -> list[str]:
    return [row["run"] for row in filter_rows(ROWS, conditions, sort, last)]


def test_metrics_have_the_numbers_that_json_has_not(tmp_path: Path) -> None:
    file = run_folder(tmp_path, "a-1") / "metrics.jsonl"
    file.parent.mkdir(parents=True)
    lines = [{"step": 1, "phase": "train", "loss": math.nan}, {"step": 1, "phase": "eval", "loss": 0.5}]
    file.write_text("".join(f"{dumps(line)}\n" for line in lines))
    assert repr(api.metrics("a-1", state=tmp_path)) == repr(lines)
    assert api.metrics("a-1", phase="eval", state=tmp_path) == lines[1:]


def test_conditions_order_and_number() -> None:
    assert names() == ["a-1", "a-2", "b-3"]
    assert names("state=finished") == ["a-1", "b-3"]
    assert names("state!=finished") == ["a-2"]
    assert names("metrics.acc>=0.5", "run~a-") == ["a-1"]
    assert names("overrides~x=2") == ["a-2"]
    assert names("reason=1") == []  # a key that some runs have
    assert names(sort="metrics.acc") == ["a-2", "b-3", "a-1"]
    assert names(sort="metrics.acc", last=1) == ["a-1"]
    odd = [{"run": name, "loss": loss} for name, loss in [("a", 2.0), ("b", float("nan")), ("c", 1.0), ("d", None)]]
    assert [row["run"] for row in filter_rows(odd, [], "loss", None)] == ["b", "d", "c", "a"], "those without a number"
    with pytest.raises(ConfigError, match=r"--where oops: expected KEY OPERATOR VALUE.*; quote the condition"):
        names("oops")


@pytest.mark.parametrize("conditions", [["metrics.ac>0.1"], ["metrics.acc>=0.5", "metrics.ac~1"]])
def test_a_key_that_no_run_has_is_an_error_with_the_closest(conditions: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"no run has the key metrics\.ac; closest: metrics\.acc"):
        names(*conditions)
    with pytest.raises(ConfigError, match=r"--sort metrics\.bla: no run has the key metrics\.bla; closest: metrics\."):
        names(sort="metrics.bla")
    with pytest.raises(ConfigError, match=r"metrics\.acc is a number, and 'abc' is none"):
        names("metrics.acc>abc")
    assert filter_rows([], ["metrics.ac>0.1"], None, None) == []


def test_exports_hold_every_key_and_the_table_leaves_out_shared_words() -> None:
    rows = filter_rows(ROWS, [], None, None)
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [row["metrics.acc"] for row in read] == ["0.9", "", "0.5"]
    assert read[0]["overrides"] == "x=1 +experiment=q"
    lines = format_table(rows)
    assert lines[1].endswith("x=1")
    assert not any("experiment" in line for line in lines)
    row = {"run": "a-1", "reason": "=HYPERLINK(1)", "overrides": ["+experiment=q", "a=b c"], "metrics": {"acc": -0.5}}
    [odd] = csv.DictReader(io.StringIO(as_csv(filter_rows([row], [], None, None))))
    assert (odd["reason"], odd["overrides"]) == ("'=HYPERLINK(1)", "'+experiment=q' 'a=b c'"), "no cell is a formula"
    assert (shlex.split(odd["overrides"]), odd["metrics.acc"]) == (row["overrides"], "-0.5")
    assert as_csv([{"=x": 1}]).startswith("'=x")


def test_the_last_row_of_a_run_counts_and_a_torn_line_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index.append_rows(home, ROWS)
    index.append_rows(home, [{"run": "a-2", "state": "finished"}])
    assert main.run(["runs"]) == 0
    assert capsys.readouterr().err == ""
    with index.index_file(home).open("a") as out:
        out.write('{"run": "c-4", "st')
    index.append_rows(home, [{"run": "d-5", "state": "running"}])  # not lost with the line before it
    states = {row["run"]: row["state"] for row in index.load_rows(home)}
    assert states == {"a-1": "finished", "a-2": "finished", "b-3": "finished", "d-5": "running"}
    assert main.run(["runs", "--json"]) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)) == 4
    assert main.run(["runs", "--where", "state=finished", "--sort", "metrics.acc", "--json"]) == 0
    assert [row["run"] for row in json.loads(capsys.readouterr().out)] == ["a-2", "b-3", "a-1"]
    assert main.run(["runs", "--csv", "--where=run=a-1"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("a-1,")
    assert said.err.startswith(f"warning: {index.index_file(home)}: line 5 is left out: it cannot be read\n")
    assert main.run(["runs"]) == 0
    assert capsys.readouterr().err == "", "the table has mended itself"


BAD_ROWS: dict[str, Any] = {
    "created": "yesterday", "ended": [], "seconds": {}, "attempts": "two", "metrics": [1], "overrides": "a=1",
    "state": 7, "sweep": ["s"], "run": "../../../NAME", "pods": "none", "name": {"a": 1}, "usd": math.inf,
    "bucket": 1, "seed": -1, "format": 999, "reason": {"x": 1}, "zone": False,
}  # fmt: skip
ODD_ROWS = (
    "", "[]", "null", "no JSON", '{"run": "r-1"}', "[" * 5000, '{"format": 1, "run": 7}', '{"format": 1}',
    json.dumps({"format": 1, "run": "r-1", "created": 1e300}), json.dumps({"format": 1, "run": ".hidden"}),
    json.dumps({"format": 1, "run": "r-1", "state": "\ud800"}), json.dumps({"format": 1, "run": "a b"}),
    '{"format": 1, "run": "r-1", "created": NaN}', json.dumps({"format": 1, "run": "x" * 300}),
    f'{{"format": 1, "run": "r-1", "x": {"[" * 200}1{"]" * 200}}}',
    f'{{"format": 1, "run": "r-1", "seed": 1{"0" * 4000}}}',
)  # fmt: skip
GOOD_ROW: dict[str, Any] = {"format": 1, "run": "good-1", "created": 5.0, "state": "finished", "later_key": {"a": [1]}}


@pytest.mark.parametrize(
    "text",
    [
        *(json.dumps({"format": 1, "run": "r-1", "created": 1.0} | {key: bad}) for key, bad in BAD_ROWS.items()),
        *ODD_ROWS,
    ],
)
def test_a_bad_row_of_the_bucket_is_left_out_and_no_reader_ever_meets_it(
    home: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    good = json.dumps(GOOD_ROW)
    rows = {"index/good-1.json": good, "index/r-1.json": text, "index/foreign.json": good}
    items = [{"name": name, "metadata": {"row": row}} for name, row in rows.items()]
    bucket: Any = SimpleNamespace(objects=lambda *_: [*items, {"name": "index/none.json"}])
    left_out: list[index.LeftOut] = []
    assert [row["run"] for row in index.list_published_rows(bucket, "b", left_out)] == ["good-1"]
    assert {row.where for row in left_out} == {"index/r-1.json", "index/foreign.json"}
    assert all(row.why for row in left_out)

    index.index_file(home).parent.mkdir(parents=True)
    index.index_file(home).write_bytes(f"{text}\n{good}\n".encode())  # what an earlier slipway copied
    for words in (["runs"], ["runs", "--json"], ["runs", "--csv"], ["report", "good-1", "-o", str(home / "x.html")]):
        assert main.run(words) == 0, words
    said = capsys.readouterr()
    assert said.err.count("line 1 is left out") == (0 if not text else 3 if '"format": 999' in text else 1), said.err
    assert [row["run"] for row in index.load_rows(home)] == ["good-1"]


def test_a_record_that_is_damaged_or_of_another_run_never_becomes_a_row() -> None:
    record = golden("record")
    run = record["run"]
    known = read_run_record(json.dumps(record).encode(), "here", run)
    assert index.row_problem(row_from_record(known)) == ""
    for changed in ({"created": "yesterday"}, {"sweep": 5}, {"run": "../../x"}, {"run": "other-1"}, {"overrides": [1]}):
        content = json.dumps(record | changed).encode()
        with pytest.raises(DamagedRecordError, match="here is damaged: "):
            read_run_record(content, "here", run)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_result_that_is_not_finite_is_null_with_the_reason(
    home: Path, capsys: pytest.CaptureFixture[str], bad: float
) -> None:
    index.append_rows(home, [{"run": "a-1", "state": "finished", "metrics": {"acc": bad, "eval/loss": 1.0}}])
    assert [strict(line)["not_finite"] for line in index.index_file(home).read_text().splitlines()] == [
        {"metrics/acc": str(bad)}
    ]
    assert repr(index.load_rows(home)[0]["metrics"]["acc"]) == repr(bad)
    assert main.run(["runs", "--json"]) == 0
    [row] = strict(capsys.readouterr().out)
    assert (row["metrics.acc"], row["metrics.eval/loss"]) == (None, 1.0)
    assert row["not_finite"] == {"metrics.acc": str(bad)}
    assert main.run(["runs", "--csv"]) == 0
    assert "not_finite" not in capsys.readouterr().out


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_results_alerts_and_events_are_strict_and_are_read_as_they_were(bad: float) -> None:
    result = Result("q-1", "finished", 1, 9.0, 2.0, {"loss": bad, "steps": 4})
    alerts = AlertRecord(1, (Alert("loss", "it grew", 1.0, limit=bad),))
    event = Event(9.0, "metrics", "q-1", data={"metrics": {"loss": bad}})
    found = [strict(dumps(document.to_json())) for document in (result, alerts, event)]
    assert [body["not_finite"] for body in found] == [
        {"summary/loss": str(bad)}, {"alerts/0/limit": str(bad)}, {"metrics/loss": str(bad)},
    ]  # fmt: skip
    assert found[0]["summary"] == {"loss": None, "steps": 4}
    assert repr(Result.from_json(found[0]).summary["loss"]) == repr(bad)
    assert repr(AlertRecord.from_json(found[1]).alerts[0].limit) == repr(bad)
    assert repr(Event.from_json(found[2]).data["metrics"]["loss"]) == repr(bad)
    assert strict(event.as_json()) == found[2]


def test_the_difference_names_section_and_key() -> None:
    base: dict[str, Any] = {
        "config": {"optimizer": {"lr": 1.0}, "seed": 0}, "code_sha256": "c", "git": {"commit": "x", "dirty": False},
        "worker_0": {"packages": {"jax": "1"}, "devices": {"kind": "TPU v4"}}, "assets": [],
        "prices": {"usd_per_hour": None}, "slipway": "0.1.0", "row": {"state": "finished", "metrics": {"acc": 0.5}},
    }  # fmt: skip
    rebuilt = {key: value for key, value in base.items() if key not in ("worker_0", "prices", "git")}
    assert diff_records(base, rebuilt)["packages"] == {"jax": ("1", None)}
    other = json.loads(json.dumps(base))
    other["config"]["optimizer"]["lr"] = 2.0
    other["worker_0"]["packages"]["numpy"] = "2"
    other["row"]["metrics"]["acc"] = 0.6
    assert diff_records(base, base) == {}
    assert diff_records(base, other) == {
        "config": {"optimizer.lr": (1.0, 2.0)},
        "packages": {"numpy": (None, "2")},
        "result": {"metrics.acc": (0.5, 0.6)},
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"assets": None}, "the record.assets is NoneType"),
        ({"assets": [{"kind": "dataset", "name": "text"}]}, "the record.assets[0] has no files"),
        ({"config": {"run": {"name": "a", "seed": 1}}}, "KeyError 'cloud'"),
        ({"run": ...}, "the record has no run"),
    ],
)
def test_a_damaged_record_is_named_by_the_verbs_that_read_it(
    home: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], problem: str
) -> None:
    index.append_rows(home, [{"run": "a-1"}, {"run": "b-2"}])
    whole = golden("record")
    for run, edits in (("a-1", {}), ("b-2", change)):
        (file := home / "runs" / run / "record.json").parent.mkdir(parents=True)
        edited = {key: value for key, value in (whole | {"run": run} | edits).items() if value is not ...}
        file.write_text(json.dumps(edited))
    for words, how in ((["runs", "--diff", "a-1", "b-2"], "error"), (["status", "--run", "b-2"], "warning")):
        assert main.run(words) == 2, "the second looks for another copy in the bucket"
        said = " ".join(capsys.readouterr().err.split())
        assert f"{how}: {home}/runs/b-2/record.json is damaged: {problem}" in said


def test_a_run_that_nobody_knows_is_said_before_missing_credentials(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(home / "gcloud"))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    index.append_rows(home, [{"run": "quickstart-0b1c2d3e"}])
    for words in (["status", "--run", "quickstart-0b1c2d3f"], ["runs", "--diff", "quickstart-0b1c2d3f", "b"]):
        assert main.run(words) == 2
        near = "no such run on this machine (did you mean quickstart-0b1c2d3e?)"
        assert f"quickstart-0b1c2d3f: {near}, and the bucket cannot be read" in capsys.readouterr().err
    index.append_rows(home, [{"run": "quickstart-0b1c2d3e", "cloud": "here"}])
    assert main.run(["status", "--run", "quickstart-0b1c2d3e"]) == 2
    known = "no record of it on this machine (the table of runs has it, with cloud=here)"
    assert f"quickstart-0b1c2d3e: {known}, and the bucket cannot be read" in capsys.readouterr().err


def test_a_command_is_called_by_its_script_and_its_own_metrics_have_columns() -> None:
    rows = [
        {"run": "run-1", "name": "run", "program": "train.py", "metrics": {"final_loss": 0.25}},
        {"run": "q-1", "name": "q", "metrics": {f"metric_{i}": 1.0 for i in range(9)}},
    ]
    head, *lines = format_table([flat(row) for row in rows])
    assert {"program", "final_loss", "metric_0"} <= set(head.split())
    assert "train.py" in lines[0]
    commands = ("python -u train.py --steps 3", "python -m my.app", "bash go.sh", "/opt/bin/thing x")
    assert [program_name(words.split()) for words in commands] == ["train.py", "my.app", "go.sh", "thing"]


NAMED_ROWS = [
    {"run": "q-1", "sweep": "q-aaaa", "name": "q", "overrides": ["sweep=seeds"]},
    {"run": "q-2", "sweep": "q-bbbb", "name": "q", "overrides": ["++sweep=seeds"]},
    {"run": "q-3", "sweep": "q-cccc", "name": "q", "overrides": []},
    {"run": "../../etc", "sweep": "../q", "name": "q", "overrides": []},
]


def selected(**asked: object) -> tuple[str, list[str]]:
    name, rows = select_runs(NAMED_ROWS, **asked)  # pyright: ignore[reportArgumentType]
    return name, [row["run"] for row in rows]


@pytest.mark.usefixtures("home")
def test_by_id_by_name_and_the_newest() -> None:
    assert selected(sweep="q-aaaa") == ("q-aaaa", ["q-1"])
    assert selected(sweep="seeds") == ("q-bbbb", ["q-2"])
    assert selected(sweep="q") == ("q-cccc", ["q-3"])
    assert selected() == ("q-cccc", ["q-3"])
    assert selected(runs=["q-2", "q-1"]) == ("runs", ["q-1", "q-2"])
    assert selected(runs=["q-2"]) == ("q-2", ["q-2"])
    assert selected(where=["name=q"], last=2) == ("runs", ["q-2", "q-3"])
    samplers = {"run": "q-4-sampler-1", "sweep": "", "name": "q", "overrides": [], "samples_for": "q-4"}
    trainer = {"run": "q-4", "sweep": "", "name": "q", "overrides": []}
    assert select_runs([*NAMED_ROWS, trainer, samplers])[0] == "q-4", "the newest run is none of samplers"
    assert (
        select_runs([samplers])[0]
        == select_runs([*NAMED_ROWS, trainer, samplers], ["q-4-sampler-1"])[0]
        == "q-4-sampler-1"
    )
    boards = {"q-dddd": ["q-1", "q-3", "q-9"]}  # a sweep has runs that an earlier one made
    assert selected(sweep="q-dddd", boards=boards) == ("q-dddd", ["q-1", "q-3"])
    assert selected(sweep="q-aaaa", boards=boards) == ("q-aaaa", ["q-1"])
    for run, sweep, what in (["../../etc"], "", "run"), ([], "../q", "sweep"):
        with pytest.raises(ConfigError, match=f"no such {what}"):
            select_runs(NAMED_ROWS, run, sweep=sweep)


SWEEP = LastCommand(("cloud=local",), sweep="q-5f0c0000", sweep_words=("cloud=local", "run.seed=0,1"))


@pytest.mark.usefixtures("home")
def test_what_is_saved_is_loaded_in_that_folder_only() -> None:
    for command in (LastCommand(("a=1",)), LastCommand(("cloud=local",), run="q-1"), SWEEP):
        save_last_command(command, Path.cwd())
        assert load_last_command(Path.cwd()) == command
    assert load_last_command(Path("other")) == LastCommand()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("text", ['{"format": 2}', "{", '{"format": 1, "overrides": [1]}', "9" * 5000])
def test_a_last_command_that_cannot_be_read_is_named_and_is_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_last_command(SWEEP, Path.cwd())
    file = index._last_command_file(Path.cwd())
    file.write_text(text)
    assert load_last_command(Path.cwd()) == LastCommand()
    assert capsys.readouterr().err.startswith(f"warning: {file} cannot be used (")


@pytest.mark.usefixtures("home")
def test_a_run_or_a_sweep_is_meant_by_its_words_or_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    save_last_command(LastCommand(("cloud=local",), run="q-1"), Path.cwd())
    command = main.with_recalled(main.parse(["logs"]))
    assert (command.overrides, command.flags.run) == (("cloud=local",), "q-1")
    assert capsys.readouterr().err == "last run of this folder: --run q-1 cloud=local\n"
    save_last_command(SWEEP, Path.cwd())
    command = main.with_recalled(main.parse(["status"]))
    assert (command.flags.sweep, command.overrides) == ("q-5f0c0000", ())
    assert capsys.readouterr().err == "last sweep of this folder: -m cloud=local run.seed=0,1\n"
    for words in (["status", "--all"], ["orphans"]):
        assert main.with_recalled(main.parse(words)).overrides == ("cloud=local",)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("verb", ["logs", "down", "get"])
def test_other_verbs_do_not_take_the_run_before_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_last_command(SWEEP, Path.cwd())
    assert main.run([verb]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert words.startswith("error: the last command of this folder was the sweep q-5f0c0000; ")
    assert f" {verb} RUN means one of its runs" in words
    assert ("`slipway down -m cloud=local run.seed=0,1` deletes its pods" in words) == (verb == "down")


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("verb", ["logs", "export"])
def test_the_message_says_how_the_verb_takes_one(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([verb]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert words.startswith(f"error: no run was started from this folder; give {verb} its overrides")
    assert f"or name a run: {verb} RUN (`slipway runs` lists them)" in words
    assert main.run(["get", "logs"]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert words.startswith("error: get: 'logs' is not the id of a run; name the run before the path: `slipway get RUN")


@pytest.mark.parametrize("project", ["${oc.env:INNOCENT}", "p,cloud.bucket=x", "[a]", "${", "a'b"])
def test_the_project_of_a_row_is_a_text_whatever_it_is(project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INNOCENT", "of-this-machine")
    rows: list[index.RunRow] = [{"run": "a-1", "cloud": "gcp", "project": project, "bucket": "b"}]
    with pytest.raises(ConfigError, match=r"^cloud\.project: .* is invalid") as refused:
        compose_config(rows, cast(Any, SimpleNamespace(overrides=())))
    assert repr(project)[1:-1] in str(refused.value)
