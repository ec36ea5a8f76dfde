"""The 1,319 right answers of GSM8K's test set: each is itself in every form, and no perturbed number is."""

import json

import pytest

from tests.paths import SHARED
from trainer.rewards.functions import answer_match, answer_match_lenient

GSM8K = SHARED / "data" / "gsm8k" / "test.jsonl"
pytestmark = pytest.mark.skipif(not GSM8K.exists(), reason="needs GSM8K")

FORMS = [
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
    found = [json.loads(line)["answer"].rpartition("#### ")[2] for line in GSM8K.read_text().splitlines()]
    assert len(found) == 1319
    return found


def written(form: str, gold: str, change: int = 0) -> str:
    n = int(gold.replace(",", "")) + change
    fields = {"n": n, "twice": 2 * n, "square": n * n, "sign": "-" if n < 0 else "", "other": n + 1}
    return form.format(**fields)


@pytest.mark.parametrize("form", FORMS)
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
