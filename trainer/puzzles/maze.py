"""Square mazes with the shortest way from S to G: the rules and the 8 symmetries. A cell's token is its code + 1."""

from hashlib import blake2b

import numpy as np

CHARACTERS = "# SGo"
WALL, FREE, START, GOAL, WAY = range(5)


def first_problem(questions: np.ndarray, answers: np.ndarray) -> tuple[int, str] | None:
    """Return the first of these mazes ([count, cells]) that is wrong, and what is wrong with it."""
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        if problem := _problem(question, answer, round(len(question) ** 0.5)):
            return number, problem
    return None


def _problem(question: np.ndarray, answer: np.ndarray, side: int) -> str:
    for code in (START, GOAL):
        if (count := int((question == code).sum())) != 1:
            return f"the question has {count} cells {CHARACTERS[code]}, not 1"
    if len(wrong := np.flatnonzero((question != answer) & ((question != FREE) | (answer != WAY)))):
        at, names = wrong[0], [CHARACTERS[board[wrong[0]]] for board in (answer, question)]
        where = f"row {at // side + 1}, column {at % side + 1}"
        return f"the solution contradicts the question in {where}: {names[0]!r} instead of {names[1]!r}"
    way = np.pad(answer.reshape(side, side) >= START, 1)
    reached = np.pad(answer.reshape(side, side) == START, 1)
    while True:
        near = reached.copy()
        for axis in (0, 1):
            near |= np.roll(reached, 1, axis) | np.roll(reached, -1, axis)
        if (near & way == reached).all():
            break
        reached = near & way
    return "" if (reached == way).all() else "the solution breaks the rules: its cells o do not lead from S to G"


def augment(boards: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` of the 7 images of mazes under the square's symmetries, [boards, count, cells]."""
    side = round(boards.shape[1] ** 0.5)
    grids = boards.reshape(-1, side, side)
    images = [np.rot90(flipped, turns, (1, 2)) for flipped in (grids, grids.transpose(0, 2, 1)) for turns in range(4)]
    return np.stack(images[1 : count + 1], axis=1).reshape(len(boards), count, -1)


def signatures(questions: np.ndarray) -> np.ndarray:
    """Return a hash per maze that is the same for its images under the symmetries."""
    images = np.concatenate([questions[:, None], augment(questions, 7)], axis=1)
    least = (min(image.tobytes() for image in maze) for maze in images)
    return np.array([int.from_bytes(blake2b(image, digest_size=8).digest()) for image in least], np.uint64)
