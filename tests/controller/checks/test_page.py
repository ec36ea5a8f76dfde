"""docs/checks.md is what the checks say of themselves."""

from __future__ import annotations

from controller.checks import page
from tests.paths import ROOT

PAGE = ROOT / "docs" / "checks.md"


def test_the_page_is_up_to_date() -> None:
    words = "run: python -m controller.checks.page > docs/checks.md"
    assert PAGE.read_text() == page.page(), words


def test_every_id_is_of_one_check() -> None:
    names = [row.name for module in page.modules() for row in page.rows(module)]
    assert len(names) == len(set(names))
