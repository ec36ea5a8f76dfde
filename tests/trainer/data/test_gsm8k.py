"""GSM8K rows: read, cut to what fits, and refused when they are none."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from conf.formats import RunFileError
from conf.schema.training.data import CustomQuestions, Gsm8kData
from conf.schema.training.loop import GrpoLoop
from tests.groups import load_group
from tests.paths import SHARED
from trainer.data.gsm8k import EpochOrder, read_problems
from trainer.data.prompting import Draw, Problem, Question
from trainer.data.questions import QuestionSet
from trainer.policy.run_files import byte_library
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


def asked(file: Path, seed: int, max_prompt_length: int, loop: dict[str, Any] | None = None, **changes) -> QuestionSet:
    paths = {"path": str(file), "eval_path": str(file), "validation_path": str(file)}
    data = Gsm8kData(**load_group("data/gsm8k") | paths | changes)
    own = {"max_prompt_length": max_prompt_length, "eval_prompts": 2, "group_size": 2} | (loop or {})
    return QuestionSet(data, GrpoLoop(**load_group("loop/grpo") | own), seed)


def answers(questions: list[Question]) -> list[str]:
    return [question.answer for question in questions]


def rollout(number: int, attempt: int = 0) -> Draw:
    return Draw("rollout", number, attempt)


def numbered(tmp_path: Path, count: int) -> Path:
    """A file of questions whose answers are 0 to count - 1."""
    path = tmp_path / f"{count}.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) + "\n" for i in range(count)))
    return path


def test_rows_become_problems(file: Path) -> None:
    (first, second, _), _ = read_problems(GSM8K, str(file), "data.path")
    assert first.question == "Two and two?"
    assert (first.answer, first.solution) == ("4", "2+2=4\n#### 4")
    assert second.answer == "1,000"
    assert first.row == ROWS[0]


def test_long_questions_are_left_out_and_counted(file: Path) -> None:
    data = asked(file, seed=0, max_prompt_length=64)
    assert data.left_out == {"questions_left_out": 2}
    assert set(answers(data.train(rollout(0), 50))) == {"4", "3"}
    assert data.train(rollout(0), 5) == data.train(rollout(0), 5)
    assert sorted(answers(data.validation(2))) == sorted(answers(data.test(2))) == ["3", "4"]
    assert sorted(answers(data.test(None))) == ["3", "4"]
    with pytest.raises(RunFileError, match=r"loop\.test_prompts: data\.eval_path has 2 questions, not 3"):
        data.test(3)
    shortest = 1 + len(b"Question: Three?\nAnswer:")  # BOS; a prompt of just the length fits
    with pytest.raises(RunFileError, match=r"data\.validation_path has 1 questions, not 2"):
        asked(file, 0, shortest)
    with pytest.raises(RunFileError, match=r"loop\.max_prompt_length: every question of data\.path is longer"):
        asked(file, 0, shortest - 1)


def test_evaluations_ask_the_same_whatever_the_seed(tmp_path: Path) -> None:
    file = numbered(tmp_path, 40)
    first, other = (asked(file, seed, max_prompt_length=100, validation_path=None) for seed in (1, 2))
    assert first.test(3) == other.test(3)
    assert first.validation(2) == other.validation(2)
    assert first.train(rollout(0), 30) != other.train(rollout(0), 30)
    assert first.train(rollout(0), 30) != first.train(rollout(1), 30)
    assert first.train(rollout(0), 30) != first.train(Draw("warm_start", 0), 30)


def test_questions_of_evaluations_are_taken_out_of_training_unless_a_file_has_them(tmp_path: Path) -> None:
    """The best checkpoint is chosen by other questions than those of the test."""
    train, test, other = numbered(tmp_path, 40), numbered(tmp_path, 5), numbered(tmp_path, 7)
    data = asked(train, 0, 100, eval_path=str(test), validation_path=None)
    chosen = set(answers(data.validation(2)))
    trained = answers(data.train(rollout(0), 38))
    assert len(chosen) == 2
    assert sorted([*trained, *chosen], key=int) == [str(i) for i in range(40)]
    assert len(data.test(None)) == 5
    apart = asked(train, 0, 100, eval_path=str(test), validation_path=str(other))
    assert len(set(answers(apart.train(rollout(0), 40)))) == 40
    assert set(answers(apart.validation(2))) <= {str(i) for i in range(7)}
    with pytest.raises(RunFileError, match=r"loop\.eval_prompts: 2 of the 2 questions of data\.path cannot be left"):
        asked(numbered(tmp_path, 2), 0, 100, validation_path=None)


@pytest.mark.parametrize(
    ("line", "key", "message"),
    [
        (b'{"question": "a \\ud83d", "answer": "#### 4"}', "path", "has half of a surrogate pair"),
        (b'{"question": "a", "answer": "4", "n": ' + b"9" * 5000 + b"}", "path", "has a number with too many digits"),
        (b'{"question": "\xe9"}', "path", "is not UTF-8"),  # in Latin-1
        (b'{"question": "a"}', "answer_column", "has no column 'answer'; it has 'question'"),
        (b'{"question": ["a"], "answer": "#### 4"}', "question_column", "has no text in column 'question'"),
        (b'{"question": null, "answer": "#### 4"}', "question_column", "has no text"),
        (b'{"question": "a", "answer": NaN}', "answer_column", "has no text in column 'answer', but NaN"),
        (b'{"question": "a", "answer": -Infinity}', "answer_column", "has no text in column 'answer', but -Infinity"),
        (b'{"question": 1e999, "answer": "#### 4"}', "question_column", "has no text in column 'question', but Inf"),
        (b'{"question": "a", "answer": null}', "answer_column", "has no text in column 'answer', but null"),
        (b'{"question": "a", "answer": ["4"]}', "answer_column", "has no text in column 'answer'"),
        (b'{"question": "a", "answer": "no mark"}', "answer_mark", "has no '#### '"),
        (b'{"question": "a", "answer": 4}', "answer_mark", "has no '#### '"),
        (b'{"question": "a", "answer": "nothing after #### "}', "path", "has no answer"),
        (b"{", "path", "is not JSON"),
        (b"[1]", "path", r"is not an object with columns, but \[1\]"),
    ],
)
def test_a_bad_line_ends_the_run_or_is_skipped_and_counted(tmp_path: Path, line: bytes, key: str, message: str) -> None:
    path = numbered(tmp_path, 6)
    path.write_bytes(path.read_bytes() + line + b"\n" + json.dumps(ROWS[0]).encode() + b"\n")
    with pytest.raises(RunFileError, match=rf"^data\.{key}: {path}, line 7 {message}"):
        read_problems(GSM8K, str(path), "data.path")
    data = asked(path, 0, 100, on_bad_line="skip", validation_path=None)
    assert len(data.bad_lines) == 2  # in path and in eval_path
    assert re.search(message, data.bad_lines[0])
    assert len(data.test(None)) == 7
    path.write_bytes(line + b"\n")
    with pytest.raises(RunFileError, match=rf"data\.path: no row of {path} can be used; the first: {path}, line 1"):
        asked(path, 0, 100, on_bad_line="skip")


def test_data_without_rows_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n \n")
    parquet.write_table(pa.Table.from_pylist(ROWS).slice(0, 0), tmp_path / "a.parquet")
    for path in (tmp_path / "a.jsonl", tmp_path / "a.parquet"):
        with pytest.raises(RunFileError, match=rf"^data\.path: {path} has no rows$"):
            asked(path, 0, 100)


def test_parquet_and_a_template_over_columns(tmp_path: Path) -> None:
    rows = [{"context": "Ann has 3 figs.", "ask": "How many?", "final": 3, "level": "easy"} for _ in range(4)]
    path = tmp_path / "rows-0.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    mapped = {"question_column": None, "question_template": "{context} {ask}", "answer_column": "final"}
    cfg = Gsm8kData(**load_group("data/gsm8k") | mapped | {"answer_mark": None})
    problems, _ = read_problems(cfg, f"{tmp_path}/*.parquet", "data.path")
    assert [(p.question, p.answer) for p in problems] == [("Ann has 3 figs. How many?", "3")] * 4
    assert problems[0].row == rows[0]
    with pytest.raises(RunFileError, match=r"data\.question_column: .*rows-0\.parquet, row 1 has no column 'question'"):
        read_problems(GSM8K, str(path), "data.path")
    (tmp_path / "not.parquet").write_text("x")
    with pytest.raises(RunFileError, match=r"data\.path: .*not\.parquet is not a readable Parquet file"):
        read_problems(GSM8K, str(tmp_path / "not.parquet"), "data.path")
    with pytest.raises(ValueError, match="set either question_column or question_template"):
        Gsm8kData(**load_group("data/gsm8k") | {"question_template": "{a}"})


def test_a_row_ends_only_where_json_lines_end_and_a_blank_line_is_none(tmp_path: Path) -> None:
    """Other characters at which Python would split a text are part of it."""
    path, odd = tmp_path / "rows.jsonl", ROWS[0] | {"question": "one\u2028two\x85three"}
    lines = f"\n{json.dumps(odd, ensure_ascii=False)}\n \t\r\n\n{json.dumps(ROWS[2])}\n\n"
    path.write_text(lines, encoding="utf-8")
    asked = [(problem.question, problem.answer) for problem in read_problems(GSM8K, str(path), "data.path")[0]]
    assert asked == [(odd["question"], "4"), ("Three?", "3")]
    path.write_text(f"{lines}oops\n", encoding="utf-8")
    with pytest.raises(RunFileError, match=r"line 7 is not JSON"):
        read_problems(GSM8K, str(path), "data.path")
    with pytest.raises(RunFileError, match=r"data\.eval_path: /nowhere does not exist"):
        read_problems(GSM8K, "/nowhere", "data.eval_path")


def test_columns_and_the_answers_mark_are_mapped(tmp_path: Path) -> None:
    row = {"problem": "Two and two?", "final": 4, "worked": "2+2=4, so \\boxed{4}", "level": 1}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    own = {"question_column": "problem", "answer_column": "final", "answer_mark": None, "solution_column": "worked"}
    mapped = GSM8K.model_copy(update=own)
    place = f"{path}, line 1"
    expected = Problem("Two and two?", "4", row["worked"], row, place=place)
    assert read_problems(mapped, str(path), "data.path")[0] == [expected]
    unworked = mapped.model_copy(update={"solution_column": None})
    assert read_problems(unworked, str(path), "data.path")[0][0].solution == "#### 4"
    marked = mapped.model_copy(update={"answer_column": "worked", "answer_mark": "so ", "solution_column": None})
    assert read_problems(marked, str(path), "data.path")[0][0].answer == "\\boxed{4}"


def test_missing_values_of_parquet_are_bad_rows(tmp_path: Path) -> None:
    own = {"answer_column": "final", "answer_mark": None, "solution_column": "worked"}
    right = {"question": "1+1?", "final": 2.0, "worked": "It is 2."}
    missing = [("question", None), ("final", None), ("final", float("nan")), ("worked", None), ("worked", " ")]
    for name, value in missing:
        parquet.write_table(pa.Table.from_pylist([right, right | {name: value}, right]), tmp_path / "a.parquet")
        cfg = GSM8K.model_copy(update=own)
        with pytest.raises(RunFileError, match=rf"a\.parquet, row 2 has no (text|solution) in column '{name}'"):
            read_problems(cfg, str(tmp_path / "a.parquet"), "data.path")
        problems, bad = read_problems(cfg.model_copy(update={"on_bad_line": "skip"}), str(tmp_path / "a.parquet"), "k")
        assert ([problem.answer for problem in problems], len(bad)) == (["2.0", "2.0"], 1)


LEARNS = {
    "sft": {"loss_type": "sft"},
    "warm start": {"warm_start_steps": 1},
    "dpo": {"loss_type": "dpo", "kl_coef": 0.1},
}


def worked_rows(tmp_path: Path, lengths: list[int], rejected: str = "no", bad: str = "") -> Path:
    """Worked responses of so many tokens: a blank, the text, and the end."""
    rows = [{"question": f"{i}?", "answer": f"#### {i}", "worked": "y" * (n - 2)} for i, n in enumerate(lengths)]
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row | {"rejected": bad if bad and i == 1 else rejected}) for i, row in enumerate(rows)]
    path.write_text("\n".join(lines))
    return path


def drawn(questions: QuestionSet, phase: str, count: int) -> list[Question]:
    return questions.train(Draw("warm_start" if phase == "warm start" else "rollout", 0), count)


@pytest.mark.parametrize("phase", LEARNS)
@pytest.mark.parametrize(("lengths", "left_out"), [([16, 9, 16], 0), ([17, 9, 16], 1), ([9, 108, 9, 300, 16], 2)])
def test_no_worked_response_is_cut(tmp_path: Path, phase: str, lengths: list[int], left_out: int) -> None:
    path, loop = worked_rows(tmp_path, lengths), LEARNS[phase] | {"max_new_tokens": 16}
    keys: dict[str, Any] = {"solution_column": "worked", "validation_path": str(path)}
    if left_out:
        first = next(i for i, length in enumerate(lengths) if length > 16)
        told = rf"^loop\.max_new_tokens: {left_out} of {len(lengths)} worked responses have more than 16 tokens; the "
        told += (
            rf"first, {path}, line {first + 1}, has {lengths[first]}, the longest {max(lengths)}; raise it, or leave"
        )
        with pytest.raises(RunFileError, match=told):
            asked(path, 0, 100, loop, **keys)
    found = asked(path, 0, 100, loop | {"filter_overlong_solutions": True}, **keys)
    assert found.left_out == ({"solutions_left_out": left_out} if left_out else {})
    kept = [str(i) for i, length in enumerate(lengths) if length <= 16]
    assert sorted(answers(drawn(found, phase, len(kept)))) == kept
    assert all(len(each.solution_tokens) <= 16 for each in drawn(found, phase, 20))
    if phase == "warm start":  # rollouts need no worked response
        assert sorted(answers(drawn(found, "rollout", len(lengths)))) == [str(i) for i in range(len(lengths))]
    assert len(found.test(None)) == len(lengths)
    assert asked(path, 0, 100, {"max_new_tokens": 16}, **keys).left_out == {}  # nothing learns from them


def test_where_no_worked_response_fits_none_can_be_left_out(tmp_path: Path) -> None:
    path = worked_rows(tmp_path, [20, 21])
    loop = {"loss_type": "sft", "max_new_tokens": 16, "filter_overlong_solutions": True}
    with pytest.raises(RunFileError, match=r"2 of 2 worked responses have more than 16 tokens; .* 21; raise it$"):
        asked(path, 0, 100, loop, solution_column="worked")


@pytest.mark.parametrize(
    ("bad", "keys", "message"),
    [
        ("yyyyy", {}, "is no pair: its solution and its 'rejected' are the same"),
        ("#### 1", {"solution_column": None}, "is no pair"),  # GSM8K's own column is the solution
        (" yyyyy\n", {"chat_template": "gemma", "bos": None}, "is no pair"),  # a chat has no blanks around a turn
        ("n" * 40, {}, r"worked responses have more than 16 tokens; the first, .*, line 2, has 42"),
    ],
)
def test_two_rows_that_become_equal_are_no_pair(tmp_path: Path, bad: str, keys: dict[str, Any], message: str) -> None:
    library = byte_library()
    library.add_special_tokens(["<start_of_turn>", "<end_of_turn>"])
    library.save(str(tmp_path / "tokenizer.json"))
    path, loop = worked_rows(tmp_path, [9, 7, 9, 8], bad=bad), LEARNS["dpo"] | {"max_new_tokens": 16}
    keys = {"solution_column": "worked", "tokenizer": str(tmp_path / "tokenizer.json")} | keys
    with pytest.raises(RunFileError, match=message):
        asked(path, 0, 100, loop, **keys)
    if "no pair" in message:
        found = asked(path, 0, 100, loop, on_bad_line="skip", **keys)
        assert found.left_out == {"bad_lines": 1}
        assert re.search(f"{path}, line 2 {message}", found.bad_lines[0])
        assert "1" not in answers(found.train(rollout(0), 3))
        pairs = found.rejected(found.train(rollout(0), 3))
        assert {len(pair.solution_tokens) for pair in pairs} <= {3, 4}


def test_a_row_without_a_rejected_response_is_named_before_the_first_step(tmp_path: Path) -> None:
    path = worked_rows(tmp_path, [9, 9])
    for value in ("null", "NaN", "[]", None):
        last = '{"question": "a", "answer": "#### 4", "worked": "x"' + (f', "rejected": {value}}}' if value else "}")
        path.write_text(f"{path.read_text().splitlines()[0]}\n{last}\n")
        told = r"^loop\.loss_type: .*, line 2 has no (text in )?column 'rejected'"
        with pytest.raises(RunFileError, match=told):
            asked(path, 0, 100, LEARNS["dpo"], solution_column="worked")


def own_rows(path: str) -> list[dict[str, Any]]:
    """Questions of a module of one's own."""
    return [{"question": "1?", "answer": "1"}, {"question": "2?", "answer": 2, "solution": float(path)}]


def test_rows_of_ones_own_function_are_held_to_the_same(tmp_path: Path) -> None:
    group = load_group("data/questions") | {"source": f"{__name__}:own_rows", "eval_path": "2"}
    for path, message in (("nan", "row 1 of nan has no text in column 'solution', but NaN"), ("2.5", "")):
        data = CustomQuestions(**group | {"path": path, "validation_path": "2"})
        loop = GrpoLoop(**load_group("loop/grpo") | {"loss_type": "sft", "max_new_tokens": 5, "eval_prompts": 2})
        with pytest.raises(RunFileError, match=message or r"1 of 2 worked responses .*own_rows, row 0 of 2\.5, has 8,"):
            QuestionSet(data, loop, 0)


@pytest.mark.deep
@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs GSM8K")
def test_published_worked_responses_are_right() -> None:
    problems, _ = read_problems(GSM8K, str(PUBLISHED), "data.path")
    assert len(problems) == 1319
    for problem in problems:
        assert answer_match(problem.solution, problem.answer) == 1.0
        assert answer_match(problem.solution, f"{problem.answer}1") == 0.0
        assert "<<" not in problem.solution


@pytest.mark.parametrize(("size", "count"), [(10, 3), (11, 11), (12, 4), (100, 7), (7, 6), (9, 8), (23, 12)])
def test_an_epoch_asks_every_question_once_and_no_rollout_asks_one_twice(size: int, count: int) -> None:
    order = EpochOrder(size, count, (3, 0))
    blocks = [order.block(number) for number in range(5 * size)]
    assert all(len(set(block)) == count for block in blocks)
    stream = np.concatenate(blocks)
    for epoch in range(5 * count):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert stream[:size].tolist() != stream[size : 2 * size].tolist()


@pytest.mark.parametrize("first", [0, 1, 9, 40])
def test_the_number_of_a_rollout_is_all_that_its_questions_need(first: int) -> None:
    """As after a restart, or with async_depth."""
    whole, resumed = EpochOrder(50, 12, (1, 0)), EpochOrder(50, 12, (1, 0))
    expected = [whole.block(number).tolist() for number in range(45)]
    assert [resumed.block(number).tolist() for number in range(first, 45)] == expected[first:]
    assert resumed.block(0).tolist() == expected[0]
    assert EpochOrder(50, 12, (2, 0)).block(0).tolist() != expected[0]


def test_resampling_asks_other_questions() -> None:
    order = EpochOrder(50, 12, (1, 0))
    asked = [order.block(5), *(order.redraw(5, attempt) for attempt in (1, 2, 3))]
    assert len(set(np.concatenate(asked).tolist())) == 48
    assert order.redraw(5, 2).tolist() == EpochOrder(50, 12, (1, 0)).redraw(5, 2).tolist()
    assert len(order.redraw(5, 9)) == 12  # questions repeat when there are no others
    counts = np.bincount(EpochOrder(3, 10, (0, 0)).block(4), minlength=3)  # as evenly as they can
    assert (counts.sum(), counts.min()) == (10, 3)
