"""Answers in the forms that models write them, and what is no answer."""

import json
from fractions import Fraction
from pathlib import Path
from typing import get_args

import pytest

from conf.loop import GrpoLoop
from trainer.rewards import LONGEST, REWARDS, answer_format, answer_match, extract, number

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.mark.parametrize(
    "response",
    [
        "#### 18",
        "So it is\n#### 18\n",
        "#### $18",
        "#### 18.00",
        "#### 18 dollars",
        "#### 18%",
        "#### x=18",
        "#### 36/2",
        "\\boxed{18}",
        "\\boxed {18}",
        "the answer is 18",
        "it was 5, now it is 18.",
        "#### 17\nno:\n#### 18",
        "\\boxed{17} and then \\boxed{18}",
        "\\boxed{18} and \\boxed{",
        "+9:09+8:10+0:18",
    ],
)
def test_right(response: str) -> None:
    assert answer_match(response, "18") == 1.0


@pytest.mark.parametrize(
    "response", ["", "none", "#### 19", "\\boxed{1}8", "18 is wrong, 19", "#### 18 or 19", "####", "1 8", "#### 18/0"]
)
def test_wrong(response: str) -> None:
    assert answer_match(response, "18") == 0.0


def test_thousands_and_fractions() -> None:
    assert answer_match("#### 1,800", "1800") == 1.0
    assert answer_match(r"\boxed{1{,}800}", "1800") == 1.0
    assert answer_match("1,800", "1,800") == 1.0
    assert answer_match("#### 1/2", "0.5") == 1.0
    assert answer_match("#### -3", "3") == 0.0


def test_words_match_as_words() -> None:
    assert answer_match("#### Paris", " paris ") == 1.0
    assert answer_match("#### Rome", "Paris") == 0.0


def test_a_huge_answer_is_read_from_its_end() -> None:
    assert answer_match("9" * 1_000_000 + " #### 18", "18") == 1.0
    assert extract("#### 7 " + "x" * LONGEST) is None


def test_more_digits_than_python_reads_are_a_wrong_answer() -> None:
    assert answer_match("#### " + "9" * 5000, "9") == 0.0


def test_the_format_counts_marks_not_truth() -> None:
    assert answer_format("#### 3", "18") == 1.0
    assert answer_format("it is 18", "18") == 0.0


def test_number_wants_exactly_one() -> None:
    assert number("about 3 or 4") is None
    assert number("$1,234.50 in all") == number("1234.5") == Fraction(2469, 2)


def test_names_in_the_config_are_those_of_the_functions() -> None:
    names, _ = get_args(GrpoLoop.model_fields["rewards"].annotation)
    assert {name: function.__name__ for name, function in REWARDS.items()} == {name: name for name in get_args(names)}


@pytest.mark.skipif(not GSM8K.exists(), reason="needs GSM8K")
def test_every_gold_answer_of_gsm8k_matches_itself_and_no_neighbour() -> None:
    golds = [json.loads(line)["answer"].rpartition("#### ")[2] for line in GSM8K.read_text().splitlines()]
    assert len(golds) == 1319
    for gold in golds:
        plain = gold.replace(",", "")
        for form in (f"#### {gold}", f"#### ${gold}", f"\\boxed{{{plain}}}", f"#### {plain}.00", f"so {gold} apples"):
            assert answer_match(form, gold) == 1.0, (form, gold)
        assert answer_match(f"#### {int(plain) + 1}", gold) == 0.0
