"""Every check of a plan, before anything is touched.

What the schema can judge alone it judges in `conf/schema/config.py`.

A module of `controller.checks` has CHECKS, which judge the config by itself, PROBES, which ask Google as well, or both.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any

from conf.schema.config import Config
from controller import checks
from controller.core.finding import Finding
from controller.gcp.client import Forbidden, GoogleError, NoCredentials, ServiceDisabled

if TYPE_CHECKING:
    from controller.context import Context


def modules() -> Iterator[ModuleType]:
    """Every module of checks, by name."""
    for found in pkgutil.iter_modules(checks.__path__, f"{checks.__name__}."):
        yield importlib.import_module(found.name)


def preflight(config: Config) -> list[Finding]:
    """Every finding of the checks that need no cloud, errors first."""
    found = [finding for module in modules() for check in getattr(module, "CHECKS", ()) for finding in check(config)]
    return by_severity(found)


def probe(config: Config, world: Context) -> list[Finding]:
    """Every finding of the checks that ask the cloud, all at once, errors first; what cannot be asked is a warning."""
    probes = [ask for module in modules() for ask in getattr(module, "PROBES", ())]
    with ThreadPoolExecutor(max_workers=8, thread_name_prefix="probe") as pool:
        answers = pool.map(lambda ask: _asked(ask, config, world), probes)
        return by_severity(list(dict.fromkeys(finding for found in answers for finding in found)))


def by_severity(findings: list[Finding]) -> list[Finding]:
    """Errors first, notes last, else as they came."""
    return sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.severity))


def _asked(ask: Any, config: Config, world: Context) -> list[Finding]:
    name = ask.__name__.replace("_", " ")
    try:
        return list(ask(config, world))
    except (NoCredentials, ServiceDisabled):
        return []  # the check of the credentials says so once; `up` enables the API and asks again
    except Forbidden as error:
        return [
            Finding(name, "warning", "cloud.project", f"{name} was not checked: you may not look ({error.message})")
        ]
    except GoogleError as error:
        return [Finding(name, "warning", "cloud.project", f"{name} was not checked: {error}")]
