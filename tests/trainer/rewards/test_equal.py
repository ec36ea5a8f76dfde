"""Answers in the forms that models write them, and what is another answer."""

import json

import pytest

from tests.paths import ROOT, SHARED
from trainer.rewards.equal import MAX_ANSWER_CHARS, canonicalize, is_equal
from trainer.rewards.extract import MAX_RESPONSE_CHARS, extract_answer, extract_boxed
from trainer.rewards.functions import (
    answer_format,
    answer_match,
    answer_match_lenient,
    boxed,
    boxed_lenient,
    boxed_strict,
    is_integer_answer,
    last_box,
    length,
)

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


GSM8K = SHARED / "data" / "gsm8k" / "test.jsonl"

WRITTEN = [
    *("#### {n}", "#### {n}.00", "#### ${n}", "#### {n:,}", "#### {n}%", "#### x={n}", "#### {n} dollars", "{n}"),
    *(r"\fbox{{{n}}}", r"\boxed {{{n}}}", r"\boxed{{\${n:,}}}"),
    *(r"\boxed{{{n} \text{{ apples}}}}", r"\boxed{{x = {n}}}", "The answer is {n:,}.", "so {n} apples"),
    *(r"\boxed{{{n}}} and \boxed{{", "#### {n}\n\nQuestion: 2+3?\nAnswer: #### {other}"),
]
SYMBOLIC = [
    *("#### {twice}/2", r"\boxed{{\frac{{{twice}}}{{2}}}}", r"\boxed{{{sign}\sqrt{{{square}}}}}"),
    r"\boxed{{{n} \cdot 1}}",
]


@pytest.fixture(scope="module")
def golds() -> list[str]:
    if not GSM8K.exists():
        pytest.skip("needs GSM8K")
    found = [json.loads(line)["answer"].rpartition("#### ")[2] for line in GSM8K.read_text().splitlines()]
    assert len(found) == 1319
    return found


def written(form: str, gold: str, change: int = 0) -> str:
    n = int(gold.replace(",", "")) + change
    fields = {"n": n, "twice": 2 * n, "square": n * n, "sign": "-" if n < 0 else "", "other": n + 1}
    return form.format(**fields)


@pytest.mark.parametrize("form", WRITTEN)
def test_every_answer_matches_itself_and_no_neighbour(form, golds) -> None:
    for gold in set(golds):
        assert answer_match(written(form, gold), gold) == 1.0, gold
        for change in (1, -1, 10):
            assert answer_match(written(form, gold, change), gold) == 0.0, gold


@pytest.mark.parametrize("form", SYMBOLIC)
def test_every_answer_matches_its_expression_where_that_is_allowed(form, golds) -> None:
    distinct = sorted(set(golds))[::2]
    for gold in distinct:
        assert answer_match_lenient(written(form, gold), gold) == 1.0, gold
        assert answer_match(written(form, gold), gold) == 0.0, gold
    for gold in distinct[::8]:
        assert answer_match_lenient(written(form, gold, 1), gold) == 0.0, gold


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("So it is\n#### 18\n", "18"),
        (r"\boxed {42}", "42"),
        (r"\fbox{7}", "7"),
        (r"\boxed 7.", "7."),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1{,}800}", "1,800"),
        (r"#### \boxed{18}", "18"),
        ("the answer is 18", "18"),
        ("The answer is 18 dollars for 3 days. Tom is 5.", "18 dollars for 3 days"),
        ("The final answer is: 6*3=18 (or so)", "6*3=18 (or so)"),
        ("The answer is Paris.", "Paris"),
        ("**Answer:** 18", "18"),
        ("it was 5, now it is 18.", "18"),
        ("+9:09+8:10+0:18", "18"),
        ("The answer is 3 1/2.", "3 1/2"),
        ("so 3 1/2 hours", "3 1/2"),
        ("The answer is 1 800.", "1 800"),
        ("2 300-page books", "300"),
        ("The answer is 18 or 19.", "18 or 19"),
        ("so 19 or 18", "19 or 18"),
        ("The answer is not 18", None),
        ("The answer isn't 18.", None),
        ("The answer is not 17, it is 18", "18"),
        ("The answer is 17. The answer is not 18", "17"),
        (r"so x \neq 18", None),
        ("<think>The answer is 5</think> 18", "18"),
        ("so \\boxed{5}</think>\n#### 18", "18"),
        ("#### 18 <think>or is it \\boxed{5}", "18"),
        ("<think>\\boxed{18}", None),
        ("#### 17\nno:\n#### 18", "18"),
        (r"\boxed{17} and then \boxed{18}", "18"),
        (r"\boxed{17} and then #### 18", "18"),
        ("The answer is 17. No, the answer is 18.", "18"),
        (r"\boxed{17 so \boxed{18}", "18"),
        (r"\boxed{\boxed{18}}", r"\boxed{18}"),
        ("The answer is 18.\n\nQuestion: 2+3?\nAnswer: \\boxed{5}", "18"),  # not the mark of another question
        ("Question: how many?\nLet me see.\n#### 18", "18"),  # its own words for the question
        ("9" * 1_000_000 + " #### 18", "18"),  # is read from its end
        ("#### 7 " + "x" * MAX_RESPONSE_CHARS, None),
        ("none at all", None),
        ("", None),
    ],
    ids=lambda words: str(words)[:40],
)
def test_the_last_of_what_is_marked_or_said_or_else_the_last_number(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    "rest",
    [
        r" and \boxed{",
        r" and \boxed{5",
        r" and \boxed{\frac{1}{",
        r" \boxed{} \boxed{...} \boxed{\text{answer}} \boxed{your answer here} \boxed{?}",
        "\n\nQuestion: Tom has 2 apples.\nAnswer: \\boxed{5}",
        "\n\n**Problem 2:** Tom has 2 apples. \\boxed{5}",
        "\nQ: 2+3?\nA: #### 5",
        "<end_of_turn>\n<start_of_turn>user\n2+3? \\boxed{5}",
        "\n\n\nTom has 2 apples. \\boxed{5}",
        "\n#### ",
    ],
)
def test_a_box_followed_by_one_that_is_unclosed_or_of_another_question_is_the_answer(rest: str) -> None:
    assert extract_answer(r"so \boxed{18}" + rest) == "18"
    assert extract_boxed(r"so \boxed{18}" + rest) == "18"


def test_the_format_counts_marks_not_truth() -> None:
    assert answer_format("#### 3", "18") == 1.0
    assert answer_format(r"\boxed{3}", "18") == 1.0
    assert answer_format("it is 18", "18") == 0.0
    assert answer_format(r"it is \boxed{18", "18") == 0.0
