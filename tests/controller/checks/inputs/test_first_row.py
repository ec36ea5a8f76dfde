"""Columns that the first row of data on this machine lacks are found before anything is billed."""

import json
from pathlib import Path

import pytest

from controller.checks.inputs.first_row import first_rows_have_the_columns
from tests.controller.checks.plans import config

GRPO = ("cloud.project=acme", "model=tiny", "loop=grpo", "optimizer=adamw", "data=gsm8k")
LM = ("cloud.project=acme", "model=tiny", "loop=lm", "optimizer=adamw", "data=jsonl", "data.path=assets://mine/a.jsonl")


def issues(folder: Path, *overrides: str) -> list[str]:
    return [str(i) for i in first_rows_have_the_columns(config(*overrides, f"+assets.datasets.mine.path={folder}"))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    row = {"question": "2+2?", "final": 4, "level": 1}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n{}\n")
    (tmp_path / "slipway").mkdir()
    (tmp_path / "slipway" / "mine.py").write_text("def reward(response, answer, prompt, levle, other=1): return 0\n")
    return tmp_path


def test_a_reward_that_wants_a_column_of_generated_problems_is_named(folder: Path) -> None:
    generated = ("cloud.project=acme", "model=tiny", "loop=grpo", "optimizer=adamw", "data=arithmetic")
    [found] = issues(folder, *generated, "loop.accuracy_reward='mine:reward'")
    assert found == (
        "loop.accuracy_reward: reward mine:reward takes 'levle', but a problem of data=arithmetic has no such column; "
        "only prompt and row are passed too"
    )
    assert issues(folder, *generated) == []


def test_missing_columns_of_questions_and_rewards_are_named(folder: Path) -> None:
    paths = [f"data.{name}=assets://mine/a.jsonl" for name in ("path", "eval_path")]
    found = issues(folder, *GRPO, *paths, "loop.accuracy_reward='mine:reward'")
    missing = f"the first row of {folder}/a.jsonl has no column 'answer'; it has 'question', 'final', 'level'"
    assert found[0] == f"data.answer_column: {missing}"
    assert found[1].startswith(
        f"loop.accuracy_reward: reward mine:reward takes 'levle', but the first row of {folder}/a.jsonl has no such"
    )
    assert len(found) == 3  # eval_path too
    right = (*GRPO, *paths, "data.answer_column=final", "data.answer_mark=null")
    assert issues(folder, *right) == []
    template = ("data.question_column=null", "data.question_template='{context} {question}'")
    assert issues(folder, *right, *template)[0].startswith("data.question_template: the first row of ")


def test_a_missing_mark_and_unreadable_lines_are_named(folder: Path) -> None:
    paths = [f"data.{name}=assets://mine/*.jsonl" for name in ("path", "eval_path")]
    (folder / "a.jsonl").write_text('{"question": "a", "answer": "4"}\n')
    assert "has no '#### ' in column 'answer'; null takes the whole column" in issues(folder, *GRPO, *paths)[0]
    for line, message in (
        ("oops\n", "line 1 is not JSON"),
        ("[1]\n", r"line 1 is not an object with columns, but [1]"),
    ):
        (folder / "a.jsonl").write_text(line)
        assert issues(folder, *GRPO, *paths)[0].startswith(f"data.path: {folder}/a.jsonl: {message}")
        assert issues(folder, *GRPO, *paths, "data.on_bad_line=skip") == []


def test_columns_of_text_are_those_of_the_rows(folder: Path) -> None:
    assert issues(folder, *LM)[0].startswith("data.text_column: the first row of ")
    assert issues(folder, *LM, "data.text_column=question") == []
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"body": ["x"]}), folder / "a.parquet")
    change = ("data=parquet", "data.path=assets://mine/a.parquet")
    found = issues(folder, *LM[:4], *change)
    assert found == [f"data.text_column: the first row of {folder}/a.parquet has no column 'text'; it has 'body'"]


def test_a_column_that_holds_no_text_is_named(folder: Path) -> None:
    """A number is text to the questions, and to nothing else; blank lines before the first row are skipped."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "number": 4, "yes": True, "text": "hello"}
    (folder / "a.jsonl").write_text("\n  \n" + json.dumps(chat) + "\n")
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({name: [value] for name, value in chat.items()})
    parquet.write_table(table.append_column("coded", table["text"].dictionary_encode()), folder / "a.parquet")
    questions = [f"data.{name}=assets://mine/a.SUFFIX" for name in ("path", "eval_path")] + ["data.answer_mark=null"]
    grpo = (*GRPO, *questions, "data.question_column=text", "data.answer_column=")
    lm = (*LM[:4], "data=KIND", "data.path=assets://mine/a.SUFFIX", "data.text_column=")
    lists = "list<element: struct<role: string, content: string>>"
    for suffix, kind, shown in (
        ("jsonl", "jsonl", {"messages": '[{"role": "user", "content": "hi"}]', "number": "4", "yes": "true"}),
        ("parquet", "parquet", {"messages": lists, "number": "int64", "yes": "bool"}),
    ):
        for words, numbers in ((grpo, True), (lm, False)):
            for column in table.column_names + ["coded"] * (kind == "parquet"):
                made = [word.replace("SUFFIX", suffix).replace("KIND", kind) for word in words]
                found = issues(folder, *made[:-1], made[-1] + column)
                expected = [] if column in ("text", "coded") or (numbers and column == "number") else [shown[column]]
                assert [text.rpartition(f"has no text in column {column!r}, but ")[2] for text in found] == (
                    expected * (2 if numbers else 1)
                )


def test_files_elsewhere_are_left_to_the_trainer(folder: Path) -> None:
    assert issues(folder, *GRPO, "data.path=gs://b/a.jsonl", "data.eval_path=gs://b/b.jsonl") == []
    assert issues(folder, *GRPO, f"data.path={folder}/a.jsonl", "data.eval_path=gs://b/b.jsonl") == []  # not on a pod
    here = (*GRPO[1:], "cloud=local", f"data.path={folder}/a.jsonl", "data.eval_path=gs://b/b.jsonl")
    assert issues(folder, *here)[0].startswith("data.answer_column: the first row of ")
