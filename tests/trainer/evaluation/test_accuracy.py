"""Evaluations with a sampler that says what it is told: what is counted, and that processes share the work."""

import jax
import numpy as np
import pytest

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.prompts import ArithmeticData
from tests.groups import load_group
from trainer.data.questions import QuestionSet
from trainer.distributed import runtime
from trainer.evaluation.accuracy import Evaluator
from trainer.rewards.pool import RewardPool
from trainer.sampler import Completion
from trainer.tokenizer.byte_level import encode


class Parrot:
    """Answers rightly as often as `right` says of each sample; rows come in an odd order."""

    def __init__(self, asked: QuestionSet, right: list[float]) -> None:
        self.answers = {tuple(q.prompt_tokens): q.answer for q in asked.test(None)}
        self.right, self.most = right, 0

    def load_params(self, params):
        return params

    def generate(self, copy, prompts, samples, key, temperature, between):
        count = len(prompts) * samples
        for row in np.random.default_rng(0).permutation(count).tolist():
            between()
            question, sample = divmod(row, samples)
            answer = self.answers[tuple(prompts[question])]
            said = answer if question < self.right[sample] * len(prompts) else str(100 + sample)
            text = f"so #### {said}" if sample < 3 else f"so {said}.0 apples"
            tokens = np.array(encode(text), np.int32)
            yield Completion(row, tokens, np.zeros(len(tokens), np.float32), True)


@pytest.fixture(scope="module")
def checks():
    with RewardPool(2, 5.0) as pool:
        yield pool


TESTED = {"test_samples_per_prompt": 4, "test_prompts": 8}


def evaluation(checks: RewardPool, right: list[float], tested: dict[str, int] = TESTED) -> Evaluator:
    sizes = {"max_prompt_length": 28, "eval_prompts": 20, "transcripts": 3} | tested
    loop = GrpoLoop(**load_group("loop/grpo") | sizes)
    asked = QuestionSet(ArithmeticData(**load_group("data/arithmetic")), loop, 0)
    return Evaluator(loop, asked, Parrot(asked, right), checks, 0)  # pyright: ignore[reportArgumentType]


def test_greedy_counts_right_answers_and_keeps_the_first_transcripts(checks) -> None:
    asked = list[None]()
    found = evaluation(checks, [0.25]).greedy({}, between=lambda: asked.append(None))
    assert found.accuracy == found.values["eval_accuracy"] == 0.25
    assert found.interval == (found.values["eval_accuracy_low"], found.values["eval_accuracy_high"])
    assert 0.1 < found.interval[0] < 0.25 < found.interval[1] < 0.5
    assert len(asked) == 20
    assert [row.reward for row in found.transcripts] == [1.0, 1.0, 1.0]
    first = found.transcripts[0]
    assert first.response == f"so #### {first.answer}"
    assert (first.extracted, first.prompt.endswith(". ")) == (first.answer, True)
    assert evaluation(checks, [0.25]).greedy({}, count=10).accuracy == 0.3  # of 10, those below 2.5


def test_a_test_tells_of_several_answers_to_each_question(checks) -> None:
    """Of 8 questions: 2 are answered rightly by all four samples, 2 by two of them, 4 by none."""
    values = evaluation(checks, [0.25, 0.25, 0.5, 0.5]).test({}).values
    assert values["test_accuracy"] == values["test_pass_at_1"] == pytest.approx(3 / 8)
    assert values["test_pass_at_2"] == pytest.approx((2 + 2 * (1 - 1 / 6)) / 8)
    assert values["test_pass_at_4"] == pytest.approx(4 / 8)
    assert values["test_majority_at_4"] == pytest.approx(4 / 8)  # 7 and 7.0 are one answer, wrong ones all differ
    assert values["test_accuracy_low"] < 3 / 8 < values["test_accuracy_high"]
    assert evaluation(checks, [], {}).test({}) is None


def test_processes_share_the_checks_and_agree_with_one(checks, monkeypatch) -> None:
    whole = evaluation(checks, [0.25, 0.25, 0.5, 0.5]).test({})
    parts, unknown = list[dict](), {str(row): [0.0, None, ""] for row in range(32)}
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for learn in (True, False):  # first what each has to say, then what they make of it
        for process in range(3):
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            if learn:
                monkeypatch.setattr(runtime, "gather_tree", lambda own: parts.append(own) or unknown | own)
            else:
                monkeypatch.setattr(runtime, "gather_tree", lambda own: parts[0] | parts[1] | parts[2])
            found = evaluation(checks, [0.25, 0.25, 0.5, 0.5]).test({})
            if not learn:
                clocks = {"test_time": 0.0}
                assert found.values | clocks == whole.values | clocks
                assert found.transcripts == (whole.transcripts if process == 0 else [])
    assert sorted(int(row) for part in parts for row in part) == list(range(32))
    assert {len(part) for part in parts} == {10, 11}
