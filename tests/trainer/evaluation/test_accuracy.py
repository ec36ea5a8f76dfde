"""Evaluations with a sampler that says what it is told: what is counted, and that processes share the work."""

import itertools
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from conf.schema.training.data import ArithmeticData
from conf.schema.training.loop import GrpoLoop
from tests.groups import load_group
from trainer.data.questions import QuestionSet
from trainer.distributed import runtime
from trainer.evaluation import statistics
from trainer.evaluation.accuracy import Evaluator
from trainer.evaluation.puzzles import board, board_transcript, puzzle_metrics
from trainer.rewards.pool import RewardPool
from trainer.sampler import Completion


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
            tokens = np.array(list(text.encode()), np.int32)
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


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_is_that_of_newcombes_table(right, total, low, high) -> None:
    """Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, method 3."""
    assert statistics.wilson_interval(right, total) == pytest.approx((low, high), abs=1e-4)
    mirrored = statistics.wilson_interval(total - right, total)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-4)


def test_pass_at_k_is_the_mean_over_all_choices() -> None:
    for samples, right in itertools.product((1, 2, 3, 5, 6), range(7)):
        outcomes = ([True] * right + [False] * samples)[:samples]
        for k in range(1, samples + 1):
            chosen = [any(choice) for choice in itertools.combinations(outcomes, k)]
            found = statistics.pass_at_k(samples, sum(outcomes), k)
            assert found == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)


def test_majority_is_the_mean_over_all_tosses() -> None:
    """Of every way in which four samples can answer."""
    for answers in itertools.product(("7", "8", "9", None), repeat=4):
        right = [answer == "7" for answer in answers]
        said = [answer for answer in answers if answer is not None]
        most = max((said.count(answer) for answer in said), default=0)
        tossed = sorted({answer for answer in said if said.count(answer) == most})
        expected = tossed.count("7") / len(tossed) if tossed else 0.0
        assert statistics.majority_vote(answers, right) == pytest.approx(expected)


def test_samples_of_a_question_are_no_independent_evidence() -> None:
    same, low = [0.75, 0.25] * 20, 0.5 - statistics.Z_95 * math.sqrt(0.0625 / 39)
    assert statistics.clustered_interval(same) == pytest.approx((low, 1 - low))
    assert statistics.clustered_interval([0.3]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("means", "low", "high"),
    [
        ([0.0] * 20, 0.0, 0.1611),  # as above, by Newcombe
        ([1.0] * 20, 1 - 0.1611, 1.0),
        ([1.0] + [0.0] * 28, 0.0061, 0.1718),  # one sample of each question
        ([1.0] * 81 + [0.0] * 182, 0.2553, 0.3662),
        ([0.5] * 40, 0.3520, 0.6480),
        ([1 / 3] * 7, 0.1056, 0.6791),
    ],
)
def test_an_interval_of_a_test_has_a_width(means: list[float], low: float, high: float) -> None:
    found = statistics.clustered_interval(means)
    assert found == pytest.approx((low, high), abs=1e-4)
    assert 0 <= found[0] < found[1] <= 1


@pytest.mark.parametrize(("right", "samples"), [([1.0] * 4, 4), ([0.0] * 4, 4), ([0.25], 1), ([1.0], 1)])
def test_a_test_that_all_or_none_pass_says_how_far_that_is_known(checks, right, samples) -> None:
    found = evaluation(checks, right, {"test_samples_per_prompt": samples, "test_prompts": 8}).test({})
    share = right[0] * 8
    assert found.interval == pytest.approx(statistics.wilson_interval(share, 8))
    assert found.interval == (found.values["test_accuracy_low"], found.values["test_accuracy_high"])
    assert found.interval[1] - found.interval[0] > 0.3


def test_ks() -> None:
    expected = {1: [1], 2: [1, 2], 6: [1, 2, 4, 6], 8: [1, 2, 4, 8]}
    assert {samples: statistics.pass_k_values(samples) for samples in expected} == expected


def test_metrics_are_those_counted_by_hand() -> None:
    """Four puzzles in three steps: the third is right and then spoiled, the last is never right."""
    exact = np.array([[1, 1, 1], [0, 0, 1], [0, 1, 0], [0, 0, 0]], bool)
    halt = np.array([[1.0, 1, 1], [-1, -1, -1], [-1, 2, 2], [-1, -1, -3]])
    solved = {"exact": exact, "halt": halt, "cells": np.array([1, 1, 0.5, 0]), "nats": np.array([0, 0, 1, 3.0])}
    found = puzzle_metrics(solved, np.array([0, 5, 12, -1]))
    assert found["eval_exact_accuracy"] == 0.5
    assert found["eval_exact_accuracy_low"] == pytest.approx(0.15, abs=0.01)
    assert found["eval_exact_accuracy_high"] == pytest.approx(0.85, abs=0.01)
    assert found["eval_cell_accuracy"] == 0.625
    assert found["eval_lm_loss"] == 1
    assert found["eval_q_accuracy"] == 0.5  # the second is right and unsure, the third sure and wrong
    assert found["eval_halt_steps"] == (1 + 3 + 2 + 3) / 4
    assert found["eval_exact_at_halt"] == 0.75
    assert [found[f"exact_by_step/{n}"] for n in (1, 2, 3)] == [0.25, 0.5, 0.5]
    ratings = {name: value for name, value in found.items() if name.startswith("exact_by_rating")}
    assert ratings == {"exact_by_rating/0": 1, "exact_by_rating/1_to_9": 1, "exact_by_rating/10_to_99": 0}


def test_a_board_has_the_answers_that_change_anything() -> None:
    """The last cell does not count: its label is padding. Token 12 has no symbol."""
    data, labels = SimpleNamespace(kind="sudoku", width=2), np.array([2, 3, 4, 0])
    answers = np.array([[2, 4, 4, 9], [2, 4, 4, 9], [2, 3, 4, 12]])
    found = board(data, np.array([2, 1, 1, 1]), labels, answers)
    assert found == {
        "kind": "sudoku", "width": 2, "puzzle": "1...", "solution": "123?", "steps": {"1": "1338", "3": "123?"},
    }  # fmt: skip
    row = board_transcript(found)
    assert row.to_json() == {
        "prompt": "1.\n..", "answer": "12\n3?", "response": "after step 1: 1 wrong\nafter step 3: solved\n\n12\n3?",
        "extracted": None, "reward": 1.0, "board": found,
    }  # fmt: skip
    assert board_transcript(found | {"steps": {"1": "1338"}}).reward == 0
    maze = board(SimpleNamespace(kind="maze", width=2), np.array([1, 2, 3, 4]), labels, answers[:0])
    assert (maze["puzzle"], maze["steps"]) == ("#.SG", {})
