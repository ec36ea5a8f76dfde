"""Boards on the page: what is drawn, and what no trainer writes."""

import json
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import pytest

from controller.records import index
from controller.report.drawing import MAX_SHOWN, draw_boards, parse_board
from controller.report.gather import gather_runs, local_reader
from controller.report.model import build_report
from controller.report.page import render
from tests.controller.report.recorded import CASES, START_TIME, write_run

BOARD: dict[str, Any] = {
    "kind": "sudoku", "width": 4, "puzzle": "1...............", "solution": "1234341221434321",
    "steps": {"1": "1334341221434321", "4": "1234341221434321"},
}  # fmt: skip


def drawn(document: dict[str, Any]) -> Element:
    board = parse_board(document)
    assert board is not None
    parent = Element("div")
    draw_boards(parent, board, "update 8")
    return parent


def test_each_answer_is_a_figure_with_its_wrong_cells_marked() -> None:
    figures = drawn(BOARD).findall("div/figure")
    assert [figure.findtext("figcaption") for figure in figures] == ["puzzle", "step 1: 1 wrong cell", "step 4: solved"]
    marked = [[path.get("d") for path in figure.iter("path") if path.get("class") == "wrong"] for figure in figures]
    assert marked == [[], ["M16 0h16v16h-16z"], []], "the second cell"
    digits = ["".join(text.text or "" for text in figure.iter("text")) for figure in figures]
    assert [sorted(told) for told in digits] == [["1"], sorted(BOARD["steps"]["1"]), sorted(BOARD["solution"])]
    given = [text.text for text in figures[1].iter("text") if text.get("class") == "given"]
    assert given == ["1"]
    long = parse_board(BOARD | {"steps": {str(n): BOARD["solution"] for n in range(1, 33)}})
    assert long
    assert (len(long.shown_steps), long.shown_steps[0], long.shown_steps[-1]) == (MAX_SHOWN, 1, 32)


def test_a_maze_is_drawn_in_its_colors() -> None:
    maze = {"kind": "maze", "width": 2, "puzzle": "SG.#", "solution": "SGo#", "steps": {"1": "SG.#"}}
    figure = drawn(maze).findall("div/figure")[1]
    assert [path.get("class") for path in figure.iter("path")] == ["wall", "start", "goal", "wrong"]
    assert not [*figure.iter("text")]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "chess"}, {"kind": ["sudoku"]}, {"width": 5}, {"width": "4"}, {"width": 10**9}, {"puzzle": None},
        {"solution": "<script>alert(1)"}, {"steps": {}}, {"steps": []}, {"steps": {"x": BOARD["solution"]}},
        {"steps": {"1": 3}}, {"steps": {str(n): BOARD["solution"] for n in range(1000)}},
    ],
)  # fmt: skip
def test_what_no_trainer_writes_is_no_board(change: dict[str, Any]) -> None:
    assert parse_board(BOARD | change) is None
    assert parse_board(["kind"]) is None


def test_the_page_draws_boards_and_lists_other_transcripts(tmp_path: Path) -> None:
    run = write_run(tmp_path, CASES[0], 0, START_TIME, [])
    row = {"step": 8, "phase": "eval", "prompt": "1.", "response": "12", "reward": 1.0}
    rows = [row | {"board": BOARD}, row | {"prompt": "other", "board": {"kind": "<b>"}}]
    (tmp_path / "runs" / run / "transcripts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    page = render(build_report("s", gather_runs(index.load_rows(tmp_path), local_reader(tmp_path))), 1e9)
    section = page[page.index('id="transcripts"') :]
    assert section.count('<svg class="board sudoku"') == 3
    assert "2 of 2 transcripts" in section
    assert section.count("<tbody>") == 2, "a table with the other transcript, and that of the runs"
