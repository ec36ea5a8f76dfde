"""Run the checks, both offline ones and those that query Google.

The schema's own rules are in `conf/schema`. Modules of `controller.checks` declare each check with `@check`. Run as a
program, this module writes docs/checks.md from the declared rules: `python -m controller.checks.preflight >
docs/checks.md`.
"""

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType

from conf.schema.config import Config
from controller import checks, resources
from controller.context import Context
from controller.core.finding import Check, Finding, Rule, UncheckedError
from controller.gcp.google_errors import ForbiddenError, GoogleError, NoCredentialsError, ServiceDisabledError
from controller.inputs.hub_sources import NO_NETWORK
from controller.plan.build import Plan


@cache
def check_modules() -> tuple[ModuleType, ...]:
    names = [found.name for found in pkgutil.walk_packages(checks.__path__, f"{checks.__name__}.")]
    return tuple(map(importlib.import_module, names))


def checks_of(module: ModuleType) -> list[Check[...]]:
    """Return the checks that a module declares, in source order."""
    return [value for value in vars(module).values() if isinstance(value, Check)]


def _checks_for(config: Config, *, live: bool, of_plan: bool = False) -> list[Check[...]]:
    """Return the checks that a config calls for."""
    here = config.cloud.kind == "here"
    found = [check for module in check_modules() for check in checks_of(module)]
    wanted = [check for check in found if (check.rule.live, check.rule.of_plan) == (live, of_plan)]
    return [check for check in wanted if not (here and check.rule.of_pods)]


def preflight(config: Config) -> list[Finding]:
    """Return the findings of all offline checks, errors first."""
    return findings_of(examine_config(config))


FIRST = ("credentials", "project")
"""Checks without which no other answer of Google means anything."""
OF_THIS_MACHINE = ("ssh_key", "ssh_config", "trc_ended")
"""Live checks of pods that ask nothing of Google."""


@dataclass(frozen=True)
class Answer:
    """What a check has found. `unknown` says why it could not look, or is empty; such an answer is never fine."""

    rule: Rule
    findings: tuple[Finding, ...] = ()
    unknown: str = ""

    @property
    def outcome(self) -> str:
        """Return unknown, or the worst severity of the findings, or ok."""
        severities = [finding.severity for finding in sort_by_severity(list(self.findings))]
        return "unknown" if self.unknown else severities[0] if severities else "ok"


def examine_config(config: Config) -> list[Answer]:
    """Run all offline checks of a config."""
    return [Answer(check.rule, tuple(check(config))) for check in _checks_for(config, live=False)]


def examine_cloud(config: Config, context: Context) -> list[Answer]:
    """Run all live checks of a config in parallel. A login or project that cannot be used is all that is said of it."""
    checks = _checks_for(config, live=True)
    first = _ask_all([check for check in checks if check.rule.id in FIRST], config, context)
    rest = [check for check in checks if check.rule.id not in FIRST]
    useless = next((a.rule.id for a in first if a.findings and not a.unknown), "")
    asked = [c for c in rest if not (useless and c.rule.of_pods) or c.rule.id in OF_THIS_MACHINE]
    others = [Answer(check.rule, unknown=f"not asked: see {useless}") for check in rest if check not in asked]
    return [*first, *_ask_all(asked, config, context), *others]


def examine_plan(plan: Plan, context: Context) -> list[Answer]:
    """As `examine_cloud`, for the checks that need the plan: what has yet to be downloaded, built and uploaded."""
    return _ask_all(_checks_for(plan.config, live=True, of_plan=True), plan, context)


def probe_cloud(config: Config, context: Context) -> list[Finding]:
    """Return the findings of all live checks of a config, errors first. A check whose query fails becomes a warning."""
    return findings_of(examine_cloud(config, context))


def probe_plan(plan: Plan, context: Context) -> list[Finding]:
    """As `probe_cloud`, for the checks that need the plan. What one network keeps from being checked is one note."""
    findings = findings_of(examine_plan(plan, context))
    unknown = [each for each in findings if each.severity == "note" and each.message.endswith(NO_NETWORK)]
    if len(unknown) < 2:
        return findings
    rest = ", ".join(each.key for each in unknown[1:])
    said = replace(unknown[0], message=f"{unknown[0].message}; nor was {rest}")
    return [said if each is unknown[0] else each for each in findings if each not in unknown[1:]]


def findings_of(answers: Iterable[Answer]) -> list[Finding]:
    return sort_by_severity(list(dict.fromkeys(finding for answer in answers for finding in answer.findings)))


def sort_by_severity(findings: list[Finding]) -> list[Finding]:
    """Return the findings with errors first and notes last, otherwise in the given order."""
    return sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.severity))


def _ask_all(checks: list[Check[...]], subject: Config | Plan, context: Context) -> list[Answer]:
    with ThreadPoolExecutor(max_workers=8, thread_name_prefix="probe") as pool:
        return list(pool.map(lambda check: _ask(check, subject, context), checks))


def _ask(check: Check[...], subject: Config | Plan, context: Context) -> Answer:
    name = check.rule.id
    unchecked = f"{name.replace('_', ' ')} was not checked"
    try:
        return Answer(check.rule, tuple(check(subject, context)))
    except (NoCredentialsError, UncheckedError) as error:  # `credentials` reports it once
        return Answer(check.rule, unknown=str(error))
    except ServiceDisabledError as error:  # `up` enables the API and repeats the check
        command = f"gcloud services enable {error.service} --project={context.project}"
        return Answer(check.rule, unknown=f"{error.service} is off: `up` enables it, or `{command}`")
    except ForbiddenError as error:
        message = f"{unchecked}: permission denied ({error.message})"
    except GoogleError as error:
        message = f"{unchecked}: {error}"
    return Answer(check.rule, (Finding(name, "warning", "cloud.project", message),), unknown=message)


HEAD = """# Checks

<!-- Made by `python -m controller.checks.preflight`. Edit the checks, not this page. -->

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
