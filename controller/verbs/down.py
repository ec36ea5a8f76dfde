"""`slipway down`: delete what the plan created: the pod; with --all also what pods share. Only ours is deleted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from controller.errors import ConfigError
from controller.ledger import Ledger
from controller.preview import preview
from controller.reconcile import destroy
from controller.resource import Absent, Pending, Resource, Unknown
from controller.session import Session, session
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
        running = _running(now) if present else set()
        if present and (everything or running) and not _sure(command, present, running):
            names = f"{', '.join(sorted(running))} is running there; " if running else ""
            raise ConfigError(f"nothing was deleted; {names}say --yes to go on without being asked")
        for run_id in running:  # whoever follows it must not take this for a preemption
            Ledger(now.world.google, now.plan.bucket, run_id).cancel()
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


def _running(now: Session) -> set[str]:
    """The runs that this would end."""
    fleet = now.fleet()
    if fleet is None:
        return set()
    answers = fleet.call_all("observe", {})  # a worker that does not answer has nothing to say against it
    return {a["active"]["run_id"] for a in answers if isinstance(a, dict) and a["active"]}


def _sure(command: Command, present: list[Resource], running: set[str]) -> bool:
    if command.flags.yes or not sys.stdin.isatty():
        return command.flags.yes
    if running:
        print("This ends", ", ".join(sorted(running)))
    print("This deletes:", *(f"  {r.title}" for r in present), sep="\n")
    return input("Go on? [y/N] ").strip().lower() in ("y", "yes")
