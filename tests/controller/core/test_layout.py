"""Tables and sentences in 80 columns: what is shortened, left out and folded, and what never is."""

from __future__ import annotations

import io

import pytest

from controller.core.layout import cell_width, fit_table, join_fitting, shorten, width_of, wrap
from controller.core.text import short_ids, short_overrides
from tests.terminal import Tty


def test_the_width_is_that_of_the_terminal_or_what_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert (width_of(Tty()), width_of(io.StringIO())) == (80, None)
    monkeypatch.setenv("COLUMNS", "100")
    assert (width_of(Tty()), width_of(io.StringIO())) == (100, 100)


def test_a_title_keeps_its_beginning_and_its_end() -> None:
    assert shorten("code on 4 workers", 20) == "code on 4 workers"
    short = shorten("TPU v5litepod-16 (4 workers) a-very-long-name-of-a-pod-0ef9e1", 40)
    assert (cell_width(short), short.startswith("TPU v5litepod-16"), short.endswith("-0ef9e1")) == (40, True, True)
    assert cell_width(shorten("字" * 40, 21)) <= 21


def test_a_sentence_is_wrapped_between_words_and_a_path_stays_whole() -> None:
    path = f"gs://{'b' * 60}/runs/quickstart-1cb75d98/more"
    lines = wrap(f"results  {path} {'word ' * 30}", 80, 9).splitlines()
    assert lines[1] == f"{' ' * 9}{path}"
    assert all(len(line) <= 80 for line in lines if path not in line)
    assert all(line.startswith(" " * 9) for line in lines[1:])
    assert wrap("x " * 200, None) == "x " * 200


def test_parts_of_the_highest_rank_go_first() -> None:
    parts = [(2, "loss 1.234"), (1, "accuracy 0.5"), (0, "ETA 1:02")]
    assert join_fitting("step 1/2", parts, None) == "step 1/2  loss 1.234  accuracy 0.5  ETA 1:02"
    assert join_fitting("step 1/2", parts, 40) == "step 1/2  accuracy 0.5  ETA 1:02"
    assert join_fitting("step 1/2", parts, 10) == "step 1/2  ETA 1:02"


def test_a_table_concedes_in_order_and_folds_last() -> None:
    columns = {"run": ["q-1", "q-2"], "words": ["aaaa bbbb cccc dddd", "x"], "cost": ["$1", "$2"]}
    titles, _, left_out = fit_table(columns, 29, [("cost", None), ("run", ["1", "2"])], "words")
    assert ([title.strip() for title in titles], left_out) == (["run", "words"], ["cost"])
    _, rows, _ = fit_table(columns, 17, [("cost", None), ("run", ["1", "2"])], "words")
    assert [[cell.strip() for cell in row] for row in rows] == [["1", "aaaa bbbb"], ["", "cccc dddd"], ["2", "x"]]
    assert fit_table(columns, None, [("cost", None)])[2] == []


def test_ids_and_overrides_keep_what_differs() -> None:
    assert short_ids(["q-0b1c2d3e", "q-1b1c2d3e"]) == ["0b1c2d3e", "1b1c2d3e"]
    [long, _] = short_ids(["a-name-of-forty-characters-and-some-0b1c2d3e", "b-12345678"])
    assert (len(long), long.endswith("0b1c2d3e")) == (26, True)
    assert short_overrides(["optimizer.lr=1 run.seed=0", "optimizer.lr=2 run.seed=0"]) == ["lr=1 seed=0", "lr=2 seed=0"]
    assert short_overrides(["a.lr=1 b.lr=2"]) == ["a.lr=1 b.lr=2"]
    assert short_overrides(["'program.command=[a, b]' run.name=x"]) == ["'command=[a, b]' name=x"]
