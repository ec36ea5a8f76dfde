"""Several answers that are stated together are one; headings are none."""

import pytest

from trainer.rewards.extract import has_marked_answer
from trainer.rewards.functions import answer_match, answer_match_lenient

TOGETHER = {
    "The answers are:\n1. 5\n2. 6": "5, 6",
    "The answers are: 1. 5 2. 6": "5, 6",
    "The answer is:\n1) 5\n2) 6": "5, 6",
    "The answer is:\n\n(1) x = 5\n\n(2) x = 6": "x = 5, x = 6",
    "The answer is:\n1. 5, since\n   2 + 3 = 5\n2. 6": "5, since, 6",
    "The answer is:\n- 5\n- 6": "5, 6",
    "**Answer:**\n* 5\n* 6": "5, 6",
    "Answers:\n\u2022 Tom\n\u2022 Jane": "Tom, Jane",
    "The answers are:\na) 5\nb) 6": "5, 6",
    "The answers are:\nA. 5\nB. 6\nC. 7": "5, 6, 7",
    "The answers are:\ni. 5\nii. 6": "5, 6",
    "The answers are:\n5\n6\n\nTom has 5.": "5, 6",
    r"$x = \boxed{5}$ and $y = \boxed{6}$": "5, 6",
    r"\boxed{5}, \boxed{6}": "5, 6",
    r"\boxed{5}, or $\boxed{6}$": "5 or 6",
}


@pytest.mark.parametrize("response", TOGETHER)
def test_answers_that_are_stated_together_are_one(response: str) -> None:
    whole = TOGETHER[response]
    parts = ["1", "2", "A", "I", "-5", "5", "6", "7", "Tom", "Jane"]
    assert answer_match(response, whole) == 1
    assert [part for part in parts if answer_match_lenient(response, part)] == []


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("The answer is 1. Tom has 2. So it is done.", "1"),
        ("The answer is\n1.\n\nTom has 2.", "1"),
        ("The answer is:\n-18", "-18"),
        ("The answer is:\n18. Tom has 5.", "18"),
        ("The answer is:\n1.5", "1.5"),
        ("The answers are:\n18", "18"),
        ("The answer is:\nA. mitochondria\n\nB. nucleus is wrong", "A"),
        ("The answer is:\n(C) mitochondria\n(D) is wrong", "C"),
        (r"\boxed{17}, so \boxed{18}", "18"),
        (r"\boxed{18}, \boxed{18}", "18"),
        (r"\boxed{18}, #### 19", "19"),
    ],
)
def test_one_answer_before_other_text_is_no_list(response: str, gold: str) -> None:
    assert answer_match(response, gold) == 1


@pytest.mark.parametrize(
    ("heading", "wrong"),
    [
        ("Step 3: add them", "3"),
        ("**Step 3**", "3"),
        ("3. Add them", "3"),
        ("3) Add them", "3"),
        ("Method 1", "1"),
        ("Conclusion:", "Conclusion"),
    ],
)
def test_a_heading_behind_four_marks_is_no_answer(heading: str, wrong: str) -> None:
    assert not has_marked_answer(f"#### {heading}\nTom has 18.")
    for response in (f"#### {heading}\nThe answer is 18.", f"#### 18\n#### {heading}", f"#### {heading}\n#### 18"):
        assert (answer_match(response, "18"), answer_match(response, wrong)) == (1, 0)
    assert all(answer_match(f"#### {answer}", answer) for answer in ("3", "3.", "3 apples", "Paris", "Steps 3"))
