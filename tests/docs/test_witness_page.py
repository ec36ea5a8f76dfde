"""The table of what Slipway relies on: each row names its source, tests that exist, and how sure it is."""

import re

import pytest

from tests.paths import ROOT

PAGE = (ROOT / "docs" / "witness.md").read_text()
TABLE = PAGE.partition("| how sure |\n|---|---|---|---|\n")[2].partition("\n\n")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TABLE.splitlines()]
DEFINED = {
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
}


def test_the_table_is_found() -> None:
    assert len(ROWS) > 30
    assert "Unproven without a project" in PAGE.partition(TABLE)[2]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_row_has_a_source_a_test_and_how_sure_it_is(row: list[str]) -> None:
    _, source, tests, sure = row
    assert source
    named = re.findall(r"`(\w+)`", tests)
    assert named
    assert set(named) <= DEFINED
    assert re.fullmatch(r"documented|seen|guessed: \S.*", sure), "a guess says what happens if it is wrong"
