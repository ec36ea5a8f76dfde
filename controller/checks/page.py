"""Write docs/checks.md from the declared rules: `python -m controller.checks.page > docs/checks.md`."""

import importlib
import pkgutil
import sys
from collections.abc import Iterable

from controller import resources
from controller.checks.preflight import check_modules, checks_of
from controller.core.finding import Rule

HEAD = """# Checks

<!-- Made by `python -m controller.checks.page`. Edit the checks, not this page. -->

`slipway plan` lists every finding, errors first. An error stops `up` before it creates anything. Warnings are shown;
notes report facts that are not problems. Checks marked *live* query Google, given credentials, and run again before a
pod is created. A live check that lacks a permission becomes a warning.
"""


def page() -> str:
    sections = [
        section(module.__doc__ or "", (check.rule for check in checks_of(module))) for module in check_modules()
    ]
    return "".join([HEAD, *sections, section("Existing resources match the config.", resource_rules())])


def section(title: str, rules: Iterable[Rule]) -> str:
    """Return the table of some rules under a heading; nothing if there are none."""
    rows = [
        f"| `{rule.id}` | {' or '.join(rule.severities)}{', *live*' if rule.live else ''} "
        f"| {', '.join(f'`{key}`' for key in rule.keys)} | {rule.reason.replace('|', '/')} |\n"
        for rule in rules
    ]
    heading = f"\n## {' '.join(title.split()).rstrip('.')}\n\n| id | | key | why |\n|---|---|---|---|\n"
    return heading + "".join(rows) if rows else ""


def resource_rules() -> list[Rule]:
    """Return the rules of the findings that resources report about themselves."""
    paths = [found.name for found in pkgutil.walk_packages(resources.__path__, f"{resources.__name__}.")]
    values = [value for path in paths for value in vars(importlib.import_module(path)).values()]
    return [value for value in values if isinstance(value, Rule)]


if __name__ == "__main__":
    sys.stdout.write(page())
