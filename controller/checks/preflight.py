"""Run the checks, both offline ones and those that query Google.

The schema's own rules are in `conf/schema`. Modules of `controller.checks` declare each check with `@check`.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

from conf.schema.config import Config
from controller import checks
from controller.context import Context
from controller.core.finding import Check, Finding
from controller.gcp.errors import ForbiddenError, GoogleError, NoCredentialsError, ServiceDisabledError
from controller.plan.build import Plan


def check_modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(checks.__path__, f"{checks.__name__}."):
        yield importlib.import_module(found.name)


def checks_of(module: ModuleType) -> list[Check[...]]:
    """Return the checks that a module declares, in source order."""
    return [value for value in vars(module).values() if isinstance(value, Check)]


POD_MODULES = frozenset({"bastion", "capacity", "fit", "network", "permissions", "project"})
"""Modules whose checks are about pods on Google Cloud, which `cloud=here` does not use."""
POD_CHECKS = frozenset({
    "bucket_name", "bucket_far", "bucket_taken", "checkpoints", "devices", "kept_forever", "thresholds", "trc_ended",
    "trc_zone", "worker_disk",
})  # fmt: skip
"""Such checks of other modules."""


def _checks_for(config: Config, *, live: bool, of_plan: bool = False) -> list[Check[...]]:
    """Return the checks that a config calls for."""
    here = config.cloud.kind == "here"
    modules = (m for m in check_modules() if not (here and m.__name__.rpartition(".")[2] in POD_MODULES))
    found = [check for module in modules for check in checks_of(module)]
    wanted = [check for check in found if (check.rule.live, check.rule.of_plan) == (live, of_plan)]
    return [check for check in wanted if not (here and check.rule.id in POD_CHECKS)]


def preflight(config: Config) -> list[Finding]:
    """Return the findings of all offline checks, errors first."""
    return sort_by_severity([finding for check in _checks_for(config, live=False) for finding in check(config)])


def probe_cloud(config: Config, context: Context) -> list[Finding]:
    """Run all live checks of a config in parallel and return their findings, errors first.

    A check whose query fails becomes a warning.
    """
    return _ask_all(_checks_for(config, live=True), config, context)


def probe_plan(plan: Plan, context: Context) -> list[Finding]:
    """As `probe_cloud`, for the checks that need the plan: what has yet to be downloaded, built and uploaded."""
    return _ask_all(_checks_for(plan.config, live=True, of_plan=True), plan, context)


def sort_by_severity(findings: list[Finding]) -> list[Finding]:
    """Return the findings with errors first and notes last, otherwise in the given order."""
    return sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.severity))


def _ask_all(checks: list[Check[...]], subject: Config | Plan, context: Context) -> list[Finding]:
    with ThreadPoolExecutor(max_workers=8, thread_name_prefix="probe") as pool:
        answers = pool.map(lambda check: _ask(check, subject, context), checks)
        return sort_by_severity(list(dict.fromkeys(finding for found in answers for finding in found)))


def _ask(check: Check[...], subject: Config | Plan, context: Context) -> list[Finding]:
    name = check.rule.id
    unchecked = f"{name.replace('_', ' ')} was not checked"
    try:
        return list(check(subject, context))
    except (NoCredentialsError, ServiceDisabledError):
        return []  # `credentials` reports it once; `up` enables the API and repeats the check
    except ForbiddenError as error:
        return [Finding(name, "warning", "cloud.project", f"{unchecked}: permission denied ({error.message})")]
    except GoogleError as error:
        return [Finding(name, "warning", "cloud.project", f"{unchecked}: {error}")]
