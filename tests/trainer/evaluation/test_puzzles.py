"""Metrics of solved puzzles, counted by hand, and boards."""

from types import SimpleNamespace

import numpy as np
import pytest

from trainer.evaluation.puzzles import board_text, puzzle_metrics, solution_text


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


def test_wrong_cells_are_in_brackets_and_steps_without_a_change_left_out() -> None:
    data, labels = SimpleNamespace(kind="sudoku", width=2), np.array([2, 3, 4, 0])
    answers = np.array([[2, 4, 4, 9], [2, 4, 4, 9], [2, 3, 4, 9]])
    text = solution_text(data, np.array([2, 1, 1, 1]), labels, answers)
    assert text == "\n\n".join(
        [
            "puzzle\n 1  .\n .  .",
            "after step 1: 1 cell wrong, in brackets\n 1 [3]\n 3  8",
            "after step 3: solved\n 1  2\n 3  8",
        ]
    )
    assert board_text(np.array([1, 2, 3, 5]), 4, "maze") == " #  .  S  o"
