"""`slipway doctor`: what stands between this machine and a run, each with its cure. It only reads."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.as_of import all_facts
from conf.strict_json import dumps
from controller.checks.preflight import Answer, examine_cloud, examine_config, examine_plan
from controller.connect import open_context, opening_message, project_of, require_pods
from controller.core.errors import SlipwayError
from controller.core.finding import Finding
from controller.core.text import plural, width_of, wrap
from controller.plan.build import build_plan

if TYPE_CHECKING:
    from conf.schema.config import Config
    from controller.cli.main import Command
    from controller.context import Context

SIGNS = {"error": "✗", "unknown": "?", "warning": "!", "note": "-", "ok": "✓"}
"""Outcomes, the worst first."""
ADJECTIVES = frozenset({"unknown", "ok"})
NO_PROGRAM = frozenset({"command", "complete"})
"""Checks that fail because no program was named."""
PLAN = "code, data and the Hub's licenses were not checked"
INDENT = 20


def run_doctor(command: Command) -> int:
    """`slipway doctor`: run the checks of this machine, the account, the project and the plan; print one table.

    Returns 2 if something stops `up`, 1 if something could not be looked at, else 0.
    """
    options, days = command.options, command.flags.days
    config = options.cloud_config()
    require_pods(config)
    with options.showing(opening_message(config)) as doing, open_context(config) as (context, _):
        doing("looking at this machine, your account and the project")
        rows = _sorted([*examine(config, context), *outdated(context.clock.now(), days)])
    if command.flags.json:
        print(dumps({"project": project_of(config), "checks": rows}, indent=1))
    else:
        print("\n".join(wrap(line, width_of(sys.stdout), INDENT) for line in format_rows(rows)))
    outcomes = {row["outcome"] for row in rows}
    return 2 if "error" in outcomes else 1 if "unknown" in outcomes else 0


def examine(config: Config, context: Context) -> list[dict[str, Any]]:
    """Run the checks of a config, and of its plan if it names a program; return the rows of the table, worst first."""
    is_named = bool(config.program.command) or any((config.model, config.data, config.loop, config.optimizer))
    offline = [answer for answer in examine_config(config) if is_named or answer.rule.id not in NO_PROGRAM]
    answers = [*examine_cloud(config, context), *(one for one in offline if one.rule.of_pods or one.findings)]
    rows = [row for answer in answers for row in _rows_of(answer)]
    if not is_named:
        rows.append(_row("plan", "note", f"{PLAN}: name a program, such as `slipway doctor +experiment=quickstart`"))
    elif any(answer.outcome == "error" for answer in offline):
        rows.append(_row("plan", "unknown", f"{PLAN}: first mend what is wrong with the config"))
    else:
        try:
            plan = build_plan(config, context.project, Path.cwd())
            rows += [row for answer in examine_plan(plan, context) for row in _rows_of(answer)]
        except SlipwayError as error:
            rows.append(_row("plan", "error", str(error)))
    return _sorted(rows)


def outdated(now: float, days: float) -> list[dict[str, Any]]:
    """Return a row for each of our own tables, images and locks that is older than so many days."""
    today, rows = datetime.fromtimestamp(now, UTC).date(), list[dict[str, Any]]()
    for facts in all_facts():
        age = (today - facts.since).days
        if age > days:
            old = f"{facts.what}: as of {facts.written}, {age} days old{' at most' * (len(facts.written) < 10)}"
            message = f"{old}; a newer Slipway may have newer ones (`git pull` in its clone), or edit the file"
            rows.append(_row("dates", "warning", message, f"conf/{facts.file}"))
    return rows or [_row("dates", "ok", f"no table, image or lock is older than {days:g} days")]


def _sorted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: list(SIGNS).index(row["outcome"]))


def _rows_of(answer: Answer) -> list[dict[str, Any]]:
    name = answer.rule.id
    if answer.unknown or not answer.findings:
        return [_row(name, answer.outcome, answer.unknown or answer.rule.reason)]
    # `plan` goes on without a login, `up` does not
    return [_row(name, "error" if name == "credentials" else f.severity, f.message, f.key) for f in answer.findings]


def _row(check: str, outcome: str, words: str, key: str = "") -> dict[str, Any]:
    cure = "" if outcome == "ok" else Finding(check, "note", key, words).cure
    return {"check": check, "outcome": outcome, "key": key, "words": words, "cure": cure}


def format_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line per finding, with its cure below, and one line for all that is right."""
    lines: list[str] = []
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:  # an API that is off hides much from several checks
        groups.setdefault((row["outcome"], row["key"], row["words"], row["cure"]), []).append(row["check"])
    for (outcome, key, words, cure), checks in groups.items():
        if outcome != "ok":
            head, text = f"{SIGNS[outcome]} {', '.join(checks):<{INDENT - 3}} ", f"{f'{key}: ' * bool(key)}{words}"
            lines += [head + text] if len(head) == INDENT else [head.rstrip(), f"{'':<{INDENT}}{text}"]
            lines += [f"{'':<{INDENT}}→ {cure}"] if cure else []
    fine = [row["check"] for row in rows if row["outcome"] == "ok"]
    lines += [f"{SIGNS['ok']} {plural(len(fine), 'check')}: {', '.join(fine)}"] if fine else []
    found = Counter(row["outcome"] for row in rows)
    counts = [f"{n} {name}" if name in ADJECTIVES else plural(n, name) for name in SIGNS if (n := found[name])]
    return [*lines, "", ", ".join(counts)]
