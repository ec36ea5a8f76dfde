"""JSON for others: no NaN and no infinity, wherever it is written."""

import ast
import json
import math
from typing import Any

import pytest

from conf.strict_json import dumps, restored
from tests.paths import ROOT

NAN, INF = math.nan, math.inf
WRITERS = ("dump", "dumps", "JSONEncoder")
OTHERS: dict[str, tuple[str, ...]] = {
    "has the standard library alone, on another machine; the controller reads what it says": (
        "controller/agent/", "controller/multirun/job.py", "controller/resources/bastion_boot.py",
    ),
    "is a program as users write one": ("controller/rehearsal/standins/",),
    "runs in the process of the user's app": ("controller/installed/",),
    "gives the user's sweeper what the app returned": ("controller/multirun/jobs.py",),
    "copies a config that is checked afterwards, or shows a value of it": (
        "conf/schema/config.py", "conf/schema/problems.py", "conf/schema/validation.py",
        "controller/config/composed_cache.py",
    ),
    "keeps what was sent to it": ("controller/localcloud/",),
    "tells another process of the run, where a NaN must arrive as one": (
        "trainer/checkpoint/local_saves.py", "trainer/checkpoint/outage.py", "trainer/distributed/agreement.py",
        "trainer/distributed/fingerprint.py", "trainer/distributed/runtime.py", "trainer/environments/verifiers_env.py",
        "trainer/environments/verifiers_rows.py", "trainer/environments/verifiers_tasks.py",
        "trainer/environments/worker.py", "trainer/sandbox/", "trainer/evaluation/model.py",
        "trainer/evaluation/programs.py", "trainer/rewards/pool.py", "trainer/rewards/process.py",
        "trainer/rl/remote/journal.py", "trainer/rl/remote/source.py", "trainer/rl/remote/wire.py",
        "trainer/step/compile_cache.py", "trainer/telemetry/throughput.py",
    ),
    "writes a prompt as the model's own template does": ("conf/chat_template.py", "trainer/data/chat.py"),
    "writes the files of other libraries": (
        "trainer/policy/export.py", "trainer/policy/run_files.py", "trainer/pretrained/hf_files.py",
        "trainer/pretrained/peft_files.py", "trainer/tokenizer/training.py",
    ),
    "compares or shows a text": ("conf/json_lines.py", "trainer/evaluation/harness.py"),
}  # fmt: skip
"""What may call `json.dumps` itself, by the reason: files, and folders that end in a slash."""


def strict(text: str) -> Any:
    """Parse as JavaScript, Go and jq do."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON: {text}"))


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ({"a": 1.5, "b": [1, None, "x"]}, {"a": 1.5, "b": [1, None, "x"]}),
        ({"loss": NAN}, {"loss": None, "not_finite": {"loss": "nan"}}),
        ({"m": {"up": INF, "down": -INF, "in": 1.0}},
         {"m": {"up": None, "down": None, "in": 1.0}, "not_finite": {"m/up": "inf", "m/down": "-inf"}}),
        ({"v": [1.0, NAN, (INF,)]}, {"v": [1.0, None, [None]], "not_finite": {"v/1": "nan", "v/2/0": "inf"}}),
        ({"eval/loss": NAN, "a~b": {"": INF}},
         {"eval/loss": None, "a~b": {"": None}, "not_finite": {"eval~1loss": "nan", "a~0b/": "inf"}}),
        ([{"a": NAN}, {"a": 1}, NAN], [{"a": None, "not_finite": {"a": "nan"}}, {"a": 1}, None]),
        ({4: NAN, 5: 1.0}, {"4": None, "5": 1.0, "not_finite": {"4": "nan"}}),
        ({"a": None, "b": NAN, "not_finite": {"a": "inf"}},
         {"a": None, "b": None, "not_finite": {"a": "inf", "b": "nan"}}),
        ({"loss": NAN, "not_finite": 3}, {"loss": None, "not_finite": 3}),
        (NAN, None),
        ("NaN", "NaN"),
    ],
)  # fmt: skip
def test_a_number_that_json_has_not_is_null_and_says_why(value: Any, written: Any) -> None:
    for how in ({}, {"indent": 1}, {"sort_keys": True}):
        assert strict(dumps(value, **how)) == written


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [0.5]},
        {"summary": {"loss": NAN, "eval/loss": INF, "a~1": -INF}, "seconds": 1.5},
        {"rows": [{"x": NAN}, [INF]], "n": None},
        [1, 2],
        None,
    ],
)
def test_what_was_written_is_restored(value: Any) -> None:
    assert repr(restored(json.loads(dumps(value)))) == repr(value)


@pytest.mark.parametrize("reasons", ["no", {"b/0": "nan"}, {"a/x": "nan"}, {"a/3": "nan"}, {"a": "many"}, {"a": None}])
def test_the_key_of_somebody_else_stays_as_it_is(reasons: Any) -> None:
    body = {"a": [1], "not_finite": reasons}
    assert restored(body) == body


def _writes(file: str) -> bool:
    """Whether a module calls the writers of `json`, however it has imported them."""
    tree = ast.parse((ROOT / file).read_text())
    return any(
        ((isinstance(node, ast.Attribute) and node.attr in WRITERS)
        and isinstance(node.value, ast.Name) and node.value.id == "json")
        or (isinstance(node, ast.ImportFrom) and node.module == "json" and any(n.name in WRITERS for n in node.names))
        or (isinstance(node, ast.alias) and node.name == "json" and node.asname is not None)
        for node in ast.walk(tree)
    )  # fmt: skip


def test_nobody_else_writes_json() -> None:
    """A new call of `json.dumps` belongs to `conf.strict_json`, or into the table above."""
    others = tuple(name for names in OTHERS.values() for name in names)
    modules = [
        str(file.relative_to(ROOT)) for top in ("conf", "controller", "trainer") for file in (ROOT / top).rglob("*.py")
    ]
    writing = {file for file in modules if _writes(file)} - {"conf/strict_json.py"}
    assert {file for file in writing if not file.startswith(others)} == set()
    assert [name for name in others if not any(file.startswith(name) for file in writing)] == []
