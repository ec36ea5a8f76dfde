"""docs/checks.md is what the checks say of themselves."""

from __future__ import annotations

from controller.checks import page
from controller.checks.preflight import check_modules, checks_of
from tests.paths import ROOT

PAGE = ROOT / "docs" / "checks.md"


def test_the_page_is_up_to_date() -> None:
    command = "run: python -m controller.checks.page > docs/checks.md"
    assert PAGE.read_text() == page.page(), command


def test_every_id_is_of_one_check() -> None:
    checks = [check.rule for module in check_modules() for check in checks_of(module)]
    names = [rule.id for rule in (*checks, *page.resource_rules())]
    assert len(names) == len(set(names)) > 60


def test_every_rule_has_a_key_and_a_reason() -> None:
    rules = [check.rule for module in check_modules() for check in checks_of(module)] + page.resource_rules()
    assert [rule.id for rule in rules if not rule.reason or not all(rule.keys)] == []
