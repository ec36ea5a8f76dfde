"""`slipway orphans`: list billed resources made by Slipway that no run uses; --delete removes them."""

import json
import shlex
import sys
from dataclasses import asdict

from controller.cleanup.orphans import BilledItem, billed_items, delete, slipway_buckets
from controller.cli.main import Command
from controller.cloud.connect import open_context, project_of, require_pods, require_project
from controller.core.errors import ConfigError
from controller.core.layout import print_wrapped
from controller.core.ui import confirm
from controller.plan.project import bucket_name
from controller.records.pending_deletions import retry_deletions
from controller.resources.pod.pending_deletion import DeletionPendingError


def run(command: Command) -> int:
    config = command.options.cloud_config()
    require_pods(config)
    project = require_project(project_of(config))
    with open_context(config) as (context, _):
        with command.options.showing("looking for billed resources in every zone"):
            for line in retry_deletions(context, list(slipway_buckets(context))):
                print(line, file=sys.stderr)
            found = billed_items(context, [bucket_name(config, project)])
        doomed = [thing for thing in found if not thing.use] if command.flags.delete else []
        details = ["This deletes:", *(f"  {thing.title}: {thing.why}" for thing in doomed)]
        if doomed and not confirm("Continue?", yes=command.flags.yes, details=details):
            raise ConfigError("nothing was deleted; pass --yes to skip the prompt")
        pending: list[str] = []
        for thing in doomed:
            try:
                with command.options.showing(f"deleting {thing.title}"):
                    delete(context, thing)
            except DeletionPendingError as error:
                pending.append(str(error))
            else:
                print(f"deleted {thing.title}", file=sys.stderr)
        if pending:
            raise DeletionPendingError("\n".join(pending))
    if command.flags.json:
        document = {"things": [asdict(thing) for thing in found], "deleted": [thing.title for thing in doomed]}
        print(json.dumps(document, indent=1))
    elif not doomed:
        print_wrapped(format_items(found, project, command.overrides), indent=4)
    return 0


def format_items(found: list[BilledItem], project: str, overrides: tuple[str, ...]) -> list[str]:
    """Format the list for people: orphans with their cost, then what is in use."""
    orphans, used = [t for t in found if not t.use], [t for t in found if t.use]
    if not orphans:
        lines = [f"no orphans: every billed slipway resource in {project} is in use"]
    else:
        total = sum(thing.usd_per_hour or 0.0 for thing in orphans)
        lines = [f"  {_format_price(thing)}  {thing.title}: {thing.why}" for thing in orphans]
        unknown = ", plus resources of unknown price" if any(thing.usd_per_hour is None for thing in orphans) else ""
        lines.append(f"  ${total:.3f} per hour, ${total * 730:.0f} per month{unknown} (list prices)")
        lines.append(f"`{shlex.join(['slipway', 'orphans', '--delete', *overrides])}` deletes them")
    return lines + [f"in use: {thing.title} {_format_price(thing).strip()}: {thing.use}" for thing in used]


def _format_price(thing: BilledItem) -> str:
    return "      ?    " if thing.usd_per_hour is None else f"{f'${thing.usd_per_hour:.3f}/h':>11}"
