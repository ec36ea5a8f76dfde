"""Which of the things that a response says is its answer."""

import pytest

from trainer.rewards.extract import MAX_RESPONSE_CHARS, extract_answer, extract_boxed
from trainer.rewards.functions import answer_format


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
        ("The answer is 18 dollars for 3 days. Tom is 5.", "18"),
        ("The final answer is: 6*3=18 (or so)", "18"),
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
