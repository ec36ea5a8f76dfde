"""GSM8K rows: read, cut to what fits, and refused when they are none."""

import json
from pathlib import Path

import pytest

from conf.runfile import RunFileError
from conf.training import Gsm8kData
from trainer.data.gsm8k import Gsm8k, read

ROWS = [
    {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"},
    {"question": "x" * 200, "answer": "#### 1,000"},
    {"question": "Three?", "answer": "It is three.\n#### 3"},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_rows_become_problems(file: Path) -> None:
    first, second, _ = read(str(file), "data.path")
    assert first.prompt == "Question: Two and two?\nAnswer:"
    assert (first.answer, first.worked) == ("4", " 2+2=4\n#### 4")
    assert second.answer == "1,000"


def test_long_questions_are_left_out_and_counted(file: Path) -> None:
    data = Gsm8k(Gsm8kData(kind="gsm8k", path=str(file), eval_path=str(file)), seed=0, prompt_length=64)
    assert data.too_long == 2
    assert {p.answer for p in data.train(0, 50)} == {"4", "3"}
    assert data.train(0, 5) == data.train(0, 5)
    assert sorted(p.answer for p in data.held_out(2)) == ["3", "4"]
    with pytest.raises(RunFileError, match=r"loop\.eval_prompts: data\.eval_path has 2 questions, not 3"):
        data.held_out(3)


@pytest.mark.parametrize("line", ["{", '{"question": "a"}', '{"question": "a", "answer": "no mark"}', "[1]"])
def test_a_bad_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(ROWS[0]) + f"\n{line}\n")
    with pytest.raises(RunFileError, match=r"data\.path: .*bad\.jsonl, line 2 is no GSM8K row"):
        read(str(path), "data.path")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(RunFileError, match=r"data\.eval_path: there is no /nowhere"):
        read("/nowhere", "data.eval_path")
