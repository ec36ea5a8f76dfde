"""Answers in the forms that models write them, and what is another answer."""

import json

import pytest

from tests.paths import ROOT
from trainer.rewards.equal import MAX_ANSWER_CHARS, canonicalize, is_equal
from trainer.rewards.extract import MAX_RESPONSE_CHARS
from trainer.rewards.functions import answer_match, answer_match_lenient, boxed, boxed_lenient, boxed_strict, length
from trainer.rewards.strict import is_integer_answer, last_box

EIGHTEEN = r"""
18 ; 18.00 ; +18 ; $18 ; \$18 ; $18$ ; 18% ; 18\% ; x=18 ; x = 6*3 = 18 ; 18 dollars ; 18 dollars per day ;
18\text{ dollars} ; 18~\mathrm{cm}^2 ; 18 m^2 ; 18 km/h ; 18-year-old ; 18. ; **18** ; \(18\) ; \text{18} ;
\boxed{18} ; 18^\circ ; 1.8e1 ; 0.018 thousand ; x = 20-2 = 18
"""


@pytest.mark.parametrize("given", [each.strip() for each in EIGHTEEN.split(";")])
def test_eighteen(given: str) -> None:
    assert is_equal(given, "18")


@pytest.mark.parametrize(
    ("given", "right"),
    [
        *((given, "18") for given in ("9+9", "6*3", "20-2", "(16-3-4)*2", r"3 \times 6", r"\sqrt{324}")),
        *((given, "18") for given in ("36/2", r"\frac{36}{2}", r"\dfrac{36}{2}", r"17\frac{2}{2}", "17 2/2")),
        *(("2/4", "1/2"), (r"\frac{2}{4}", r"\frac{1}{2}"), ("(1+1,3)", "(2,3)"), (r"\{1+1, 1\}", r"\{1,2\}")),
        (r"\begin{pmatrix} 1+1 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 3 \end{pmatrix}"),
    ],
)
def test_an_expression_left_to_compute_is_no_answer_unless_lenient(given: str, right: str) -> None:
    """Simply's `math_eval.match` also says False to each, and True to those of the next test."""
    assert not is_equal(given, right)
    assert is_equal(given, right, lenient=True)
    response = rf"so \boxed{{{given}}}"
    assert answer_match(response, right) == boxed(response, right) == 0
    assert answer_match_lenient(response, right) == boxed_lenient(response, right) == 1


NOT_EIGHTEEN = [
    *("19", "-18", "1.8", "180", "0.18", "18.01", "18 or 19", "1 8", "1,8", "18/0", "18x", "3x", "x18", "x+18", "18i"),
    *("18^2", r"18\pi", r"18 \pi", "18 million", "x=3, y=18", "(18, 19)", "eighteen", "", "  ", r"\sqrt{18}"),
    *("not 18", "isn't 18", "18 200", "17 2/3", "9" * 5000, "18" + " " * MAX_ANSWER_CHARS + "x"),
]
OTHERS = [
    *(("B", "A"), ("(AB)", "A"), ("Rome", "Paris"), ("(2,1)", "(1,2)"), ("x", "y"), (r"\sqrt{8}", r"\sqrt{2}")),
    *(("-3", "3"), ("1/3", "0.33")),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
]


@pytest.mark.parametrize(("given", "right"), [*((given, "18") for given in NOT_EIGHTEEN), *OTHERS])
def test_other_answers_are_told_apart(given: str, right: str) -> None:
    assert not is_equal(given, right)


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("1,800", "1800"), ("1800", "1,800"), ("1{,}800", "1,800"), (r"1\,800", "1800"), ("1.8 thousand", "1,800"),
        (r"\frac{1}{2}", "0.5"), (r"\frac12", "0.5"), (r"1\frac{1}{2}", "1.5"), ("-1 1/2", "-1.5"),
        ("\u22123", "-3"), (r"2\sqrt{2}", r"\sqrt{8}"), (r"\sqrt2", "1.414214"), ("(1,2)", "(1, 2)"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"), (r"\{2, 1\}", r"\{1,2\}"),
        ("(x+1)^2", "x^2+2x+1"), ("Paris", " paris."), (r"\text{Paris}", "Paris"), ("(A)", "A"),
        (r"\text{(A)}", "A"), ("A.", r"\text{(A)}"), ("(A)", "(A)"), ("1 800 km", "1800"),
        ("1\u00a0800\u202f000", "1,800,000"), ("3 1/2", "3.5"), ("1-1/2", "1/2"), ("2/4", "0.5"),
        ("0.25", r"\frac14"), ("7/2", "3.5"), ("1 800", "1800"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ],
)  # fmt: skip
def test_other_equals(given: str, right: str) -> None:
    assert is_equal(given, right)


def test_equal_answers_are_written_alike() -> None:
    assert canonicalize("$1,800.00") == canonicalize(r"\frac{3600}{2}") == canonicalize("1800 dollars") == "1800"
    assert canonicalize("0.5") == canonicalize(r"\frac{1}{2}") == "1/2"
    assert canonicalize(" Paris. ") == canonicalize(r"\text{paris}") == "paris"
    assert canonicalize("18") != canonicalize("18 or 19")
    assert canonicalize("") is canonicalize("9" * (MAX_ANSWER_CHARS + 1)) is None
    assert canonicalize("1e999 trillion") is not None


def test_a_box_must_hold_the_answer_that_is_to_be_boxed() -> None:
    assert boxed(r"\boxed{18}", "18") == 1.0
    assert boxed("#### 18", "18") == boxed(r"18 \boxed{19}", "18") == 0.0


def test_the_shorter_of_two_right_answers_is_better() -> None:
    short, long, wrong = ("so" * n + " #### 18" for n in (1, MAX_RESPONSE_CHARS // 8, 0))
    assert 0 < length(long, "18") < length(short, "18") < 1
    assert length(wrong, "19") == length("", "18") == 0
    assert length("x" * MAX_RESPONSE_CHARS + "#### 18", "18") == 0 < answer_match("#### 18", "18")


TRANSCRIPTS = json.loads((ROOT / "tests" / "trainer" / "fixtures" / "simply_rewards.json").read_text())
"""Response, answer, and the reward by Simply's `math_eval`; `make_simply_rewards.py` writes them."""


def test_each_transcript_gets_the_same_reward() -> None:
    assert {reward for *_, reward in TRANSCRIPTS} == {0.0, 1.0}
    differ = [row for row in TRANSCRIPTS if boxed_strict(row[0], row[1]) != row[2]]
    assert differ == []


@pytest.mark.parametrize(
    ("response", "box"),
    [
        (r"\boxed{1}, no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{18} \boxed{", None),
        (r"\boxed 18", None),
        ("18", None),
        (r"\boxed{}", ""),
    ],
)
def test_only_the_last_box_counts(response: str, box: str | None) -> None:
    assert last_box(response) == box


def test_a_long_answer_is_read_in_time_linear_in_it() -> None:
    assert not is_integer_answer("1" * 100_000, "18")
    assert last_box("\\boxed{" * 50_000) is None


def test_an_answer_that_is_no_integer_is_compared_as_elsewhere() -> None:
    assert boxed_strict(r"\boxed{0.5}", r"\frac{1}{2}") == 1
    assert boxed_strict(r"\boxed{0.6}", r"\frac{1}{2}") == 0
