"""The strict reward pays what Simply's own evaluator pays."""

import json

import pytest

from tests.paths import ROOT
from trainer.rewards.functions import boxed_strict
from trainer.rewards.strict import is_integer_answer, last_box

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
