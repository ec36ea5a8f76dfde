"""docs/checks.md is what the checks say of themselves."""

from __future__ import annotations

from pathlib import Path

from controller import checks_page

PAGE = Path(__file__).parents[3] / "docs" / "checks.md"


def test_the_page_is_up_to_date() -> None:
    words = "run: python -m controller.checks_page > docs/checks.md"
    assert PAGE.read_text() == checks_page.page(), words


def test_every_id_is_of_one_check() -> None:
    names = [row.name for module in checks_page.modules() for row in checks_page.rows(module)]
    assert len(names) == len(set(names))
