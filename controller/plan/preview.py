"""Look at a whole plan without changing anything: what is there, what differs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from controller.context import Context
from controller.core.errors import WorkersDisagree
from controller.gcp.client import NoCredentials, ServiceDisabled
from controller.reconcile.reconciler import ordered
from controller.reconcile.resource import Absent, Diff, Pending, Resource, Unknown
from controller.resources.workers.base import OnWorkers
from controller.ssh.fleet import WorkerError, WorkersFailed


@dataclass(frozen=True)
class Row:
    """One resource of the plan: what it was seen to be, and what `up` would do (None: it cannot be told)."""

    resource: Resource
    seen: Any
    diff: Diff | None

    @property
    def action(self) -> str:
        if self.diff is not None:
            return self.diff.action
        return "wait" if isinstance(self.seen, Pending) else "unknown"


def preview(resources: tuple[Resource, ...], world: Context) -> list[Row]:
    """Observe every resource, those without mutual needs at the same time, and say what would be done."""
    have: dict[str, Any] = {}
    rows: dict[str, Row] = {}
    left = ordered(resources)
    with ThreadPoolExecutor(max_workers=16) as pool:
        while left:
            ready = [r for r in left if set(r.needs) <= set(have)]
            left = [r for r in left if r not in ready]
            for resource, seen in zip(ready, pool.map(lambda r: _look(r, world, have), ready), strict=True):
                have[resource.id] = seen
                known = not isinstance(seen, Pending | Unknown)
                rows[resource.id] = Row(resource, seen, resource.diff(seen) if known else None)
    return [rows[r.id] for r in resources]


def _look(resource: Resource, world: Context, have: dict[str, Any]) -> Any:
    if isinstance(resource, OnWorkers):
        node = have[resource.node]
        if isinstance(node, Absent):
            return Absent()
        if isinstance(node, Pending | Unknown):
            return Unknown(f"the node is {node.why}" if isinstance(node, Pending) else node.why)
        if node.state != "READY":
            return Absent()  # the node will be replaced, and this with it
    try:
        return resource.observe(world, have)
    except NoCredentials as error:
        return Unknown(str(error))
    except ServiceDisabled as error:
        return Unknown(f"{error.service} is not enabled yet; up enables it")
    except (WorkerError, WorkersFailed, WorkersDisagree) as error:
        return Unknown(str(error))
