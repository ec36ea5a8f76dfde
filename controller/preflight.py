"""Every check of the config, before anything is touched.

What the schema can judge by itself (types, bounds, unknown keys) it judges in `conf/schema.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conf.schema import Config
from controller.checks import network, place, program, regions
from controller.finding import Finding

CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    *program.CHECKS,
    *place.CHECKS,
    *network.CHECKS,
    *regions.CHECKS,
)


def preflight(config: Config) -> list[Finding]:
    """Every finding, errors first."""
    found = [finding for check in CHECKS for finding in check(config)]
    return sorted(found, key=lambda f: f.severity)
