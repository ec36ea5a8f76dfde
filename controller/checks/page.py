"""Write docs/checks.md from the declared rules: `python -m controller.checks.page > docs/checks.md`."""

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterable

from controller import resources
from controller.checks.preflight import check_modules, checks_of
from controller.core.finding import Rule

HEAD = """# Checks

<!-- Made by `python -m controller.checks.page`. Edit the checks, not this page. -->

`slipway plan` lists every finding with its key, errors first. An error stops `up` before it creates anything;
warnings are shown, notes report facts. A finding is usually an error, unless its line says otherwise. *Live* checks
query Google or another server, and run again before a pod is created; one that lacks a permission becomes a warning.
"""
SENTENCE = re.compile(r"(?<=[.)])\s+(?=[A-Z`])")


def page() -> str:
    sections = [
        section(module.__doc__ or "", (check.rule for check in checks_of(module))) for module in check_modules()
    ]
    return "".join([HEAD, *sections, section("Existing resources match the config.", resource_rules())])


def section(title: str, rules: Iterable[Rule]) -> str:
    """Return some rules under a heading, each with the first sentence of its reason; nothing if there are none."""
    rows = [f"- `{rule.id}`{mark(rule)}: {SENTENCE.split(rule.reason)[0].rstrip('.')}\n" for rule in rules]
    return f"\n## {' '.join(title.split()).partition(':')[0].rstrip('.')}\n\n{''.join(rows)}" if rows else ""


def mark(rule: Rule) -> str:
    """Return a rule's usual severity, unless it is an error, and whether it is live."""
    words = [*(rule.severities[:1] if rule.severities[0] != "error" else ()), *(["*live*"] if rule.live else [])]
    return f" ({', '.join(words)})" if words else ""


def resource_rules() -> list[Rule]:
    """Return the rules of the findings that resources report about themselves."""
    paths = [found.name for found in pkgutil.walk_packages(resources.__path__, f"{resources.__name__}.")]
    values = [value for path in paths for value in vars(importlib.import_module(path)).values()]
    return [value for value in values if isinstance(value, Rule)]


if __name__ == "__main__":
    sys.stdout.write(page())
