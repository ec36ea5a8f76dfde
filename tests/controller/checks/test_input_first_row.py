"""Data without a row are found before anything is billed; test_input_files.py has what else rows may lack."""

from pathlib import Path

import pytest

from controller.checks.input_first_row import first_rows_have_the_columns
from tests.composed import config_of

LINES = (
    "cloud.project=acme",
    "model=tiny",
    "loop=lm",
    "optimizer=adamw",
    "data=jsonl",
    "data.path=assets://mine/a.jsonl",
)


def issues(rows: Path, *overrides: str) -> list[str]:
    made = config_of(*LINES, *overrides, f"+assets.datasets.mine.path={rows}")
    return [str(issue) for issue in first_rows_have_the_columns(made)]


def test_data_without_rows_are_an_error(tmp_path: Path) -> None:
    for text in ("", "\n \n"):
        (tmp_path / "a.jsonl").write_text(text)
        assert issues(tmp_path) == ["data.path: assets://mine/a.jsonl has no rows"]
        assert issues(tmp_path, "data=text") == ["data.path: assets://mine/a.jsonl is empty"]
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n')
    assert issues(tmp_path, "data.path=assets://mine/*.jsonl") == []
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "c.parquet")
    [none] = issues(tmp_path, "data=parquet", "data.path=assets://mine/c.parquet")
    assert none.endswith("c.parquet: has no rows")


def test_what_is_no_json_line_is_told_apart(tmp_path: Path) -> None:
    for text, said in {
        "[\n {}\n]": "character 2 of the line; the file is one JSON list: write one object a line",
        '{\n"text": 1}': "write each object in one line",
        "{'text': 'a'}": "JSON has double quotes",
        "text,label\na,b\n": "character 0 of the line; it looks like CSV: write one JSON object a line",
    }.items():
        (tmp_path / "a.jsonl").write_text(text)
        [found] = issues(tmp_path)
        assert said in found
