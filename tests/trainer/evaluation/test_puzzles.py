"""Metrics of solved puzzles, counted by hand, and boards."""

from types import SimpleNamespace

import numpy as np
import pytest

from trainer.evaluation.puzzles import board, board_transcript, puzzle_metrics


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
