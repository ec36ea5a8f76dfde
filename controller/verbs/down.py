"""`slipway down`: delete what the plan created: the pod; with --all also what pods share. Only ours is deleted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from controller.errors import ConfigError
from controller.preview import preview
from controller.reconcile import destroy
from controller.resource import Absent, Pending, Resource, Unknown
from controller.session import session
from controller.view import View

if TYPE_CHECKING:
    from controller.cli import Command


def run(command: Command) -> int:
    with session(command) as now:
        everything = command.flags.all
        chosen = [r for r in now.plan.resources if r.id == now.plan.node.id or (everything and r.scope == "shared")]
        present = [
            row.resource
            for row in preview(_apart(chosen), now.world)
            if not isinstance(row.seen, Absent | Unknown) and (isinstance(row.seen, Pending) or row.seen.ours)
        ]
        if everything and present and not _sure(command, present):
            raise ConfigError("nothing was deleted; say --yes to go on without being asked")
        with View(now.plan, json_lines=command.flags.json) as view:
            now.world.events.listen(view)
            destroy(_ordered_like(now.plan.resources, present), now.world)
    if command.flags.json:
        print(json.dumps({"deleted": [r.id for r in present]}))
    elif not present:
        print("nothing of ours is there")
    elif not everything:
        print("network, bucket and service account stay, for the next run; `slipway down --all` deletes them too")
    return 0


def _apart(resources: list[Resource]) -> tuple[Resource, ...]:
    """Without their needs: each is looked at by itself."""
    return tuple(replace(r, needs=()) for r in resources)


def _ordered_like(plan: tuple[Resource, ...], present: list[Resource]) -> list[Resource]:
    """With the needs that are deleted too, so that dependents go first."""
    ids = {r.id for r in present}
    return [replace(r, needs=tuple(n for n in r.needs if n in ids)) for r in plan if r.id in ids]


def _sure(command: Command, present: list[Resource]) -> bool:
    if command.flags.yes or not sys.stdin.isatty():
        return command.flags.yes
    print("This deletes, with everything in the bucket:", *(f"  {r.title}" for r in present), sep="\n")
    return input("Delete all of it? [y/N] ").strip().lower() in ("y", "yes")
