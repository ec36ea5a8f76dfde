"""Sudoku of side b² (4 x 4, 9 x 9): the rules, the symmetries, and puzzles made at random.

A board is a flat uint8 array of digits, 0 where blank; its token is digit + 1. The symmetries are those of the study
(https://github.com/SamsungSAILMontreal/TinyRecursiveModels, dataset/build_sudoku_dataset.py): digits are renamed, the
board is transposed with probability 1/2, and bands and their rows, and stacks and their columns, are permuted.
"""

from collections.abc import Iterator

import numpy as np


def unit_indices(side: int) -> np.ndarray:
    """Return the cells of each row, column and box, [3, side, side]."""
    box = round(side**0.5)
    rows = np.arange(side * side).reshape(side, side)
    boxes = rows.reshape(box, box, box, box).transpose(0, 2, 1, 3).reshape(side, side)
    return np.stack([rows, rows.T, boxes])


def first_problem(questions: np.ndarray, answers: np.ndarray) -> tuple[int, str] | None:
    """Return the first of these puzzles ([count, cells]) that is wrong, and what is wrong with it."""
    side = round(questions.shape[1] ** 0.5)
    units = unit_indices(side).reshape(3 * side, side)
    for start in range(0, len(questions), 10_000):
        question, answer = questions[start : start + 10_000], answers[start : start + 10_000]
        complete = (np.bitwise_or.reduce((1 << answer.astype(np.int32))[:, units], axis=2) == (2 << side) - 2).all(1)
        sound = complete & ((question == 0) | (question == answer)).all(1)
        if not sound.all():
            at = int(sound.argmin())
            return start + at, _problem(question[at], answer[at], side)
    return None


def _problem(question: np.ndarray, answer: np.ndarray, side: int) -> str:
    if len(blank := np.flatnonzero(answer == 0)):
        return f"the solution has no digit in {_cell(blank[0], side)}"
    if len(wrong := np.flatnonzero((question != 0) & (question != answer))):
        at = wrong[0]
        return f"the solution contradicts the question in {_cell(at, side)}: {answer[at]} instead of {question[at]}"
    for name, units in zip(("row", "column", "box"), unit_indices(side), strict=True):
        for number, unit in enumerate(units, 1):
            digits, counts = np.unique(answer[unit], return_counts=True)
            if (counts > 1).any():
                return f"the solution breaks the rules: {name} {number} has {digits[counts > 1][0]} twice"
    raise AssertionError("no problem")


def _cell(at: np.integer, side: int) -> str:
    return f"row {at // side + 1}, column {at % side + 1}"


def augment(boards: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Return random images of boards that belong together, [boards, count, cells]. More of them begin with the same."""
    side = round(boards.shape[1] ** 0.5)
    box = round(side**0.5)
    drawn = random.random((count, 1 + 3 * side + 2 * box))
    keys = np.split(drawn, np.cumsum([1, side, side, side, box]), axis=1)
    cells = (_order(keys[1], keys[4])[:, :, None] * side + _order(keys[2], keys[5])[:, None]).reshape(count, -1)
    cells = np.where(keys[0] < 0.5, cells % side * side + cells // side, cells)
    digits = np.pad(np.argsort(keys[3], axis=1) + 1, ((0, 0), (1, 0))).astype(np.uint8)
    return digits[np.arange(count)[:, None], boards[:, cells]]


def _order(lines: np.ndarray, bands: np.ndarray) -> np.ndarray:
    """Return orders of the rows that keep bands together, [count, side], from random numbers per row and per band."""
    count, box = bands.shape
    inside = np.argsort(lines.reshape(count, box, box), axis=2)
    return (np.argsort(bands, axis=1)[:, :, None] * box + inside).reshape(lines.shape)


def signatures(questions: np.ndarray) -> np.ndarray:
    """Return a uint64 per board that the symmetries do not change: boards with other ones are no images of each other.

    Each cell's color is refined four times by the sums of the colors of its row, column, box, band, stack and digit.
    Rows and columns count alike.
    """
    number, cells = questions.shape
    side = round(cells**0.5)
    box = round(side**0.5)
    color = _mix(np.where(questions > 0, np.uint64(1), np.uint64(2)))
    for _ in range(4):
        grid = color.reshape(number, side, side)
        blocks = grid.reshape(number, box, box, box, box)
        bands = [np.broadcast_to(blocks.sum(axis=axes, keepdims=True), blocks.shape) for axes in ((2, 3, 4), (1, 2, 4))]
        boxes = np.broadcast_to(blocks.sum(axis=(2, 4), keepdims=True), blocks.shape).reshape(grid.shape)
        lines = [grid.sum(axis=axis, keepdims=True) for axis in (2, 1)]
        around = [_mix(a) * np.uint64(3) + b.reshape(grid.shape) for a, b in zip(lines, bands, strict=True)]
        sums = np.zeros((number, side + 1), np.uint64)
        np.add.at(sums, (np.arange(number)[:, None], questions), color)
        same = np.where(questions > 0, np.take_along_axis(sums, questions.astype(np.intp), 1), np.uint64(0))
        near = (_mix(around[0]) + _mix(around[1]) + _mix(boxes) * np.uint64(11)).reshape(number, -1)
        color = _mix(color * np.uint64(5) + _mix(same) * np.uint64(7) + near)
    return color.sum(axis=1)


def _mix(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit values (splitmix64, http://prng.di.unimi.it/splitmix64.c)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def solutions(question: np.ndarray, limit: int = 2, random: np.random.Generator | None = None) -> list[np.ndarray]:
    """Return up to `limit` solutions, in random order if asked. Tries the cell with the fewest digits left first."""
    side = round(len(question) ** 0.5)
    units = unit_indices(side)
    of_cell = [[int(np.flatnonzero((kind == cell).any(1))[0]) for kind in units] for cell in range(len(question))]
    used = [[0] * side for _ in units]
    board, found = [0] * len(question), []

    def place(cell: int, bit: int) -> None:
        for kind, unit in enumerate(of_cell[cell]):
            used[kind][unit] ^= bit

    def left(cell: int) -> int:
        row, column, box = of_cell[cell]
        return ~(used[0][row] | used[1][column] | used[2][box]) & ((1 << side) - 1)

    def search(blank: list[int]) -> None:
        if not blank:
            found.append(np.array(board, np.uint8))
            return
        cell = min(blank, key=lambda at: left(at).bit_count())
        digits = [digit for digit in range(side) if left(cell) >> digit & 1]
        for digit in random.permutation(digits).tolist() if random else digits:
            place(cell, 1 << digit)
            board[cell] = digit + 1
            search([at for at in blank if at != cell])
            place(cell, 1 << digit)
            if len(found) >= limit:
                return

    for cell, digit in enumerate(question.tolist()):
        if digit:
            if not left(cell) >> digit - 1 & 1:
                return []
            place(cell, 1 << digit - 1)
            board[cell] = digit
    search([cell for cell, digit in enumerate(board) if not digit])
    return found


def deduce(questions: np.ndarray) -> np.ndarray:
    """Fill in what singles determine: a cell with one digit left, or the only cell of a unit for a digit.

    Args:
        questions: boards that have a solution, [count, cells].

    Returns:
        The boards, 0 where the two rules do not lead. A full board is the only solution.
    """
    side = round(questions.shape[1] ** 0.5)
    units = unit_indices(side).reshape(3 * side, side)
    of_cell = np.argsort(units.reshape(3, -1), axis=1) // side + np.arange(3)[:, None] * side
    boards, active = questions.copy(), np.arange(len(questions))
    while len(active):
        now = boards[active]
        has = (now[:, :, None] == np.arange(1, side + 1, dtype=np.uint8))[:, units].any(2)
        possible = ~has[:, of_cell].any(1) & (now == 0)[:, :, None]
        only = possible[:, units].sum(2, dtype=np.uint8) == 1
        alone = possible.sum(2, keepdims=True, dtype=np.uint8) == 1
        single = possible & (alone | only[:, of_cell].any(1))
        boards[active] = np.where(filled := single.any(2), single.argmax(2).astype(np.uint8) + 1, now)
        active = active[filled.any(1)]
    return boards


def generate(side: int, clues: tuple[int, int], random: np.random.Generator, batch: int = 256) -> Iterator[np.ndarray]:
    """Yield random puzzles [question and solution, cells] that singles solve, so that each has one solution.

    Clues are removed from a random solution in random order, as long as singles still solve the rest, down to a random
    number of clues between the two. Puzzles come in batches, because a batch is deduced at once.
    """
    empty = np.zeros(side * side, np.uint8)
    while True:
        answers = np.stack([solutions(empty, 1, random)[0] for _ in range(batch)])
        questions, least = answers.copy(), random.integers(clues[0], clues[1] + 1, batch)
        for cells in np.argsort(random.random(answers.shape), axis=1).T:
            rows = np.flatnonzero((questions != 0).sum(1) > least)
            tried = questions[rows]
            tried[np.arange(len(rows)), cells[rows]] = 0
            solved = (deduce(tried) != 0).all(1)
            questions[rows[solved]] = tried[solved]
        yield from np.stack([questions, answers], axis=1)
