"""The rules of mazes and their 8 symmetries."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.puzzles import maze

QUESTION = "S # " + "    " + " ## " + "   G"
ANSWER = "So# " + " ooo" + " ##o" + "   G"


def codes(text: str) -> np.ndarray:
    return np.array([maze.CHARACTERS.index(character) for character in text], np.uint8)


def test_images_are_mazes_and_all_eight_differ() -> None:
    pair = np.stack([codes(QUESTION), codes(ANSWER)])
    questions, answers = maze.augment(pair, 7)
    assert maze.first_problem(questions, answers) is None
    assert len({board.tobytes() for board in [pair[0], *questions]}) == 8
    assert np.array_equal(maze.augment(pair, 3), maze.augment(pair, 7)[:, :3])
    assert len(set(maze.signatures(np.stack([pair[0], *questions])).tolist())) == 1
    assert maze.signatures(codes("S" + QUESTION[1:3] + "#" + QUESTION[4:])[None])[0] != maze.signatures(pair[:1])[0]


@pytest.mark.parametrize(
    ("question", "answer", "message"),
    [
        (QUESTION.replace("G", " "), ANSWER.replace("G", " "), "the question has 0 cells G, not 1"),
        (QUESTION, ANSWER.replace("##", "#o"), "the solution contradicts the question in row 3, column 3: 'o' instead"),
        (QUESTION, ANSWER.replace("ooo", "o o"), "the solution breaks the rules: its cells o do not lead from S to G"),
        (QUESTION, "So#o" + ANSWER[4:8].replace("ooo", "oo ") + ANSWER[8:], "the solution breaks the rules"),
    ],
)
def test_what_is_wrong_is_named(question: str, answer: str, message: str) -> None:
    questions, answers = (np.stack([codes(good), codes(bad)]) for good, bad in ((QUESTION, question), (ANSWER, answer)))
    found = maze.first_problem(questions, answers)
    assert found is not None
    assert found[0] == 1
    assert found[1].startswith(message)
