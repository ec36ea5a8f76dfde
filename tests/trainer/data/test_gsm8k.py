"""GSM8K rows: read, cut to what fits, and refused when they are none."""

import json
from pathlib import Path

import pytest

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.prompts import Gsm8kData
from conf.schema.training.run_yaml import RunFileError
from tests.groups import load_group
from tests.paths import SHARED
from trainer.data.gsm8k import read_problems
from trainer.data.problem import Problem, Question
from trainer.data.questions import QuestionSet
from trainer.rewards.functions import answer_match

GSM8K = Gsm8kData(**load_group("data/gsm8k"))
PUBLISHED = SHARED / "data" / "gsm8k" / "test.jsonl"

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


def asked(file: Path, seed: int, max_prompt_length: int) -> QuestionSet:
    data = Gsm8kData(**load_group("data/gsm8k") | {"path": str(file), "eval_path": str(file)})
    return QuestionSet(data, GrpoLoop(**load_group("loop/grpo") | {"max_prompt_length": max_prompt_length}), seed)


def answers(questions: list[Question]) -> list[str]:
    return [question.answer for question in questions]


def test_rows_become_problems(file: Path) -> None:
    first, second, _ = read_problems(GSM8K, str(file), "data.path")
    assert first.question == "Two and two?"
    assert (first.answer, first.solution) == ("4", "2+2=4\n#### 4")
    assert second.answer == "1,000"


def test_long_questions_are_left_out_and_counted(file: Path) -> None:
    data = asked(file, seed=0, max_prompt_length=64)
    assert data.num_too_long == 2
    assert set(answers(data.train(0, 50))) == {"4", "3"}
    assert data.train(0, 5) == data.train(0, 5)
    assert sorted(answers(data.held_out(2))) == ["3", "4"]
    assert sorted(answers(data.held_out(None))) == ["3", "4"]
    with pytest.raises(RunFileError, match=r"loop\.eval_prompts: data\.eval_path has 2 questions, not 3"):
        data.held_out(3)


def test_evaluations_ask_the_same_whatever_the_seed(file: Path) -> None:
    first, other = (asked(file, seed, max_prompt_length=1000) for seed in (1, 2))
    assert first.held_out(3) == other.held_out(3)
    assert first.train(0, 30) != other.train(0, 30)
    assert first.train(0, 30) != first.train(1, 30)


def test_a_prompt_of_just_the_length_fits(file: Path) -> None:
    shortest = 1 + len(b"Question: Three?\nAnswer:")  # BOS
    assert asked(file, 0, shortest).held_out(1)[0].answer == "3"
    with pytest.raises(RunFileError, match=r"loop\.max_prompt_length: every question of data\.path is longer"):
        asked(file, 0, shortest - 1)


def test_a_row_ends_only_where_json_lines_end(tmp_path: Path) -> None:
    """Other characters at which Python would split a text are part of it."""
    path, odd = tmp_path / "rows.jsonl", "one\u2028two\x85three"
    path.write_text(json.dumps(ROWS[0] | {"question": odd}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [p.question for p in read_problems(GSM8K, str(path), "data.path")] == [odd]


def test_columns_and_the_answers_mark_are_mapped(tmp_path: Path) -> None:
    row = {"problem": "Two and two?", "final": 4, "worked": "2+2=4, so \\boxed{4}", "level": 1}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    mapped = GSM8K.model_copy(
        update={
            "question_column": "problem",
            "answer_column": "final",
            "answer_mark": None,
            "solution_column": "worked",
        }
    )
    assert read_problems(mapped, str(path), "data.path") == [Problem("Two and two?", "4", row["worked"])]
    unworked = mapped.model_copy(update={"solution_column": None})
    assert read_problems(unworked, str(path), "data.path")[0].solution == "#### 4"
    marked = mapped.model_copy(update={"answer_column": "worked", "answer_mark": "so ", "solution_column": None})
    assert read_problems(marked, str(path), "data.path")[0].answer == "\\boxed{4}"
    with pytest.raises(
        RunFileError, match=r"data\.question_column: .*rows\.jsonl, line 1 has no column 'question'; it has"
    ):
        read_problems(GSM8K, str(path), "data.path")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", r"data\.path: .*bad\.jsonl, line 2 is not JSON"),
        ("{", r"data\.path: .*bad\.jsonl, line 2 is not JSON"),
        ("[1]", r"data\.path: .*bad\.jsonl, line 2 is not an object with columns, but \[1\]"),
        ("\xe9", r"data\.path: .*bad\.jsonl, line 2 is not JSON"),  # in Latin-1
        ('{"question": "a"}', r"data\.answer_column: .*bad\.jsonl, line 2 has no column 'answer'; it has 'question'"),
        ('{"question": "a", "answer": "no mark"}', r"data\.answer_mark: .*bad\.jsonl, line 2 has no '#### '"),
        ('{"question": "a", "answer": "nothing after #### "}', r"data\.path: .*bad\.jsonl, line 2 has no answer"),
        ('{"question": "a", "answer": 4}', r"data\.answer_mark: .*bad\.jsonl, line 2 has no '#### '"),
        ('{"question": null, "answer": "#### 4"}', r"data\.question_column: .*bad\.jsonl, line 2 has no text"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(ROWS[0]) + f"\n{line}\n", encoding="latin-1")
    with pytest.raises(RunFileError, match=message):
        read_problems(GSM8K, str(path), "data.path")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(RunFileError, match=r"data\.eval_path: /nowhere does not exist"):
        read_problems(GSM8K, "/nowhere", "data.eval_path")


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs GSM8K")
def test_published_worked_responses_are_right() -> None:
    problems = read_problems(GSM8K, str(PUBLISHED), "data.path")
    assert len(problems) == 1319
    for problem in problems:
        assert answer_match(problem.solution, problem.answer) == 1.0
        assert answer_match(problem.solution, f"{problem.answer}1") == 0.0
        assert "<<" not in problem.solution
