"""What Slipway is billed for in a project: `slipway status --all` and `slipway orphans`."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict

from conf.strict_json import dumps
from controller.cleanup.orphans import (
    BilledItem,
    PodOverview,
    billed_items,
    delete,
    project_pods,
    raise_if_unlisted,
    slipway_buckets,
)
from controller.cli.main import Command
from controller.config.run_yaml import bucket_name
from controller.connect import open_context, project_of, require_pods, require_project
from controller.core.errors import ConfigError
from controller.core.events import confirm
from controller.core.text import format_duration, plural, print_wrapped, width_of, wrap
from controller.records import index
from controller.records.unfinished import retry_deletions
from controller.resources.deletions import DeletionPendingError

SEEN = " (as far as Google could look)"


def show_project(command: Command) -> int:
    """`slipway status --all`: every pod of the project with run, newest checkpoint and price; the other VMs."""
    if command.options.run_id or command.flags.multirun:
        raise ConfigError("--all: shows every pod of the project; it goes with no --run and no -m")
    config = command.options.cloud_config()
    require_pods(config)
    project = require_project(project_of(config))
    with open_context(config) as (context, _), command.options.showing("looking for pods in every zone"):
        buckets = list(dict.fromkeys([*slipway_buckets(context), bucket_name(config, project)]))
        billed = billed_items(context, buckets)
        pods = project_pods(context, buckets, billed)
    machines = [item for item in billed if item.kind == "VM"]
    on_pods = {pod.run for pod in pods}
    rows = index.load_rows(command.options.state_dir)
    waiting = [row["run"] for row in rows if row.get("state") == "running" and row["run"] not in on_pods]
    if command.flags.json:
        listed = {"pods": [asdict(pod) for pod in pods], "vms": [asdict(item) for item in machines]}
        document = {"project": project, **listed, "runs_without_pod": waiting}
        print(dumps(document | {"unlisted": sorted(context.google.unlisted)}, indent=1))
    else:
        where = f"{project}{SEEN}" if context.google.unlisted else project
        print("\n".join(format_pods(pods, machines, waiting, where, width_of(sys.stdout))))
    raise_if_unlisted(context)
    return 0


def format_pods(
    pods: Sequence[PodOverview], machines: Sequence[BilledItem], waiting: Sequence[str], project: str, width: int | None
) -> list[str]:
    """Format the pods with their total price, the other VMs, and the runs of this machine that have no pod."""
    if pods:
        lines = [line for pod in pods for line in _describe_pod(pod, width)]
        total = sum(pod.usd_per_hour or 0.0 for pod in pods)
        lines.append(f"{plural(len(pods), 'pod')} in {project}: ${total:.2f} per hour at list prices")
    else:
        lines = [f"no pods of Slipway in {project}"]
    for item in machines:
        price = "unknown price" if item.usd_per_hour is None else f"${item.usd_per_hour:.2f} per hour"
        lines.append(f"{item.title}: {item.use or item.why}; {price}")
    return [*lines, *(f"{run} was running when last seen from here, and has no pod now" for run in waiting)]


def _describe_pod(pod: PodOverview, width: int | None) -> list[str]:
    """Return a line with the names of the pod and its run, and the facts below it."""
    checkpoint = ""
    if pod.checkpoint is not None:
        age = "" if pod.checkpoint_age is None else f", {format_duration(pod.checkpoint_age)} ago"
        checkpoint = f"checkpoint {pod.checkpoint}{age}"
    elif pod.run:
        checkpoint = "no checkpoint"
    price = "unknown price" if pod.usd_per_hour is None else f"${pod.usd_per_hour:.2f} per hour"
    holder = f"controlled by {pod.controller}" if pod.controller else "no controller" if pod.run else ""
    alerts = f"ALERT {', '.join(pod.alerts)}" if pod.alerts else ""
    facts = [alerts, pod.accelerator_type, pod.zone, pod.state, pod.activity, checkpoint, price, holder]
    return [pod.pod, wrap(f"  {'; '.join(filter(None, facts))}", width, 2)]


def run_orphans(command: Command) -> int:
    """`slipway orphans`: list billed resources made by Slipway that no run uses; --delete removes them."""
    config = command.options.cloud_config()
    require_pods(config)
    project = require_project(project_of(config))
    with open_context(config) as (context, _):
        with command.options.showing("looking for billed resources in every zone"):
            for line in retry_deletions(context, list(slipway_buckets(context))):
                print(line, file=sys.stderr)
            found = billed_items(context, [bucket_name(config, project)])
        to_delete = [item for item in found if not item.use] if command.flags.delete else []
        if context.google.unlisted:  # the rest may serve a pod that is not listed
            to_delete = [item for item in to_delete if "TPU" in item.kind]
        details = ["This deletes:", *(f"  {item.title}: {item.why}" for item in to_delete)]
        if to_delete and not confirm("Continue?", yes=command.flags.yes, details=details):
            raise ConfigError("nothing was deleted; pass --yes to skip the prompt")
        pending: list[str] = []
        for item in to_delete:
            try:
                with command.options.showing(f"deleting {item.title}"):
                    delete(context, item)
            except DeletionPendingError as error:
                pending.append(str(error))
            else:
                print(f"deleted {item.title}", file=sys.stderr)
        if pending:
            raise DeletionPendingError("\n".join(pending))
    if command.flags.json:
        document = {"things": [asdict(item) for item in found], "deleted": [item.title for item in to_delete]}
        print(dumps(document | {"unlisted": sorted(context.google.unlisted)}, indent=1))
    elif not to_delete:
        where = f"{project}{SEEN}" if context.google.unlisted else project
        print_wrapped(format_items(found, where, command.overrides), indent=4)
    raise_if_unlisted(context)
    return 0


def format_items(found: list[BilledItem], project: str, overrides: tuple[str, ...]) -> list[str]:
    """Format the list for people: orphans with their cost, then what is in use."""
    orphans, used = [t for t in found if not t.use], [t for t in found if t.use]
    if not orphans:
        lines = [f"no orphans: every billed slipway resource in {project} is in use"]
    else:
        total = sum(item.usd_per_hour or 0.0 for item in orphans)
        lines = [f"  {_format_price(item)}  {item.title}: {item.why}" for item in orphans]
        unknown = ", plus resources of unknown price" if any(item.usd_per_hour is None for item in orphans) else ""
        lines.append(f"  ${total:.3f} per hour, ${total * 730:.0f} per month{unknown} (list prices)")
        lines.append(f"`{shlex.join(['slipway', 'orphans', '--delete', *overrides])}` deletes them")
    return lines + [f"in use: {item.title} {_format_price(item).strip()}: {item.use}" for item in used]


def _format_price(item: BilledItem) -> str:
    return "      ?    " if item.usd_per_hour is None else f"{f'${item.usd_per_hour:.3f}/h':>11}"
