"""Estimators against what enumeration says, intervals against published values and by simulation of all outcomes."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from trainer.evaluation import statistics
from trainer.evaluation.puzzles import board, board_transcript, puzzle_metrics


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
    same, low = [1.0, 0.0] * 20, 0.5 - statistics.Z_95 * math.sqrt(0.25 / 39)
    assert statistics.clustered_interval(same) == pytest.approx((low, 1 - low))
    assert statistics.clustered_interval([0.5] * 40) == (0.5, 0.5)
    assert statistics.clustered_interval([0.3]) == (0.0, 1.0)


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
