"""`slipway plan`: show what `up` would do, its cost, and every mistake in the config. Changes nothing."""

import json
import re
import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from controller.cli.main import Command
from controller.cloud.connect import project_of
from controller.config.run_yaml import run_url
from controller.core.layout import width_of, wrap
from controller.core.text import plural
from controller.plan.build import Plan
from controller.plan.permissions import Need, permissions_of_plan
from controller.plan.samplers import describe_samplers
from controller.reconcile.resource import NotEnabled, Unknown
from controller.records.plan_file import save_plan
from controller.resources.pod.planes import label_places, plane_of, planes_not_tried
from controller.run.estimate import describe_estimate
from controller.run.preview import RunPreview, preview_run

ACTION_SIGNS = {"none": "=", "create": "+", "update": "~", "replace": "±", "wait": "…", "unknown": "?"}
NONE_FOUND = "no Google credentials"
"""Beginning of what a check and every resource say; once is enough."""
MAX_PLACES = 6
"""Places that `plan` shows of the order."""
LINE_START = re.compile(r"  \S \w+ +|(?:run|pod|order|samplers|results|price|estimate|limit|now) +| +")
"""What stands before the text of a line: the sign and action of a resource, or the name of a value."""


def run(command: Command) -> int:
    if command.flags.permissions:
        return print_permissions(command)
    preview = preview_run(command.options)
    if command.flags.save:
        print(f"saved {save_plan(preview.plan, command.overrides, Path.cwd())}", file=sys.stderr)
    print(json.dumps(preview.as_document(), indent=1) if command.flags.json else _wrapped(format_plan(preview)))
    return 2 if any(f.severity == "error" for f in preview.findings) else 0


def _wrapped(lines: list[str]) -> str:
    """Wrap lines on a terminal; what follows stands below the value, the title or the change that it continues."""
    width = width_of(sys.stdout)
    starts = [LINE_START.match(line) for line in lines]
    return "\n".join(wrap(line, width, start.end() if start else 2) for line, start in zip(lines, starts, strict=True))


def print_permissions(command: Command) -> int:
    """Print one permission per line: by resource on a terminal, else as tab-separated values."""
    config, _ = command.options.config()
    needs = permissions_of_plan(config, project_of(config))
    if command.flags.json:
        print(json.dumps([asdict(need) | {"role": need.role} for need in needs], indent=1))
    elif sys.stdout.isatty():
        print(_wrapped(format_permissions(needs)))
    else:
        for need in needs:
            print(need.permission, need.kind, need.name, need.when, need.role, sep="\t")
    return 0


def format_permissions(needs: list[Need]) -> list[str]:
    lines: list[str] = []
    width = max(len(need.permission) for need in needs)
    wide = max(len(need.when) for need in needs)
    for (kind, name), group in groupby(needs, key=lambda need: (need.kind, need.name)):
        lines.append(f"{kind} {name}")
        lines += [f"  {need.permission:<{width}}  {need.when:<{wide}}  {need.role}" for need in group]
    roles = dict.fromkeys(need.role for need in needs)
    return [*lines, "", f"These roles contain them: {' '.join(roles)}"]


def _hardware(plan: Plan) -> str:
    tpu, topology = plan.config.tpu, plan.config.topology
    if plan.config.cloud.kind == "here":
        return plan.node.title
    return (
        f"{tpu.accelerator_type}, {plural(topology.workers, 'worker')}, {plural(topology.devices, 'device')}, "
        f"{' or '.join(tpu.capacity)} in {' or '.join(tpu.all_zones)}"
    )


def _order(plan: Plan) -> list[str]:
    """Return where the pod will be asked for if it may come from several planes, and why it may not."""
    places = plan.node.places
    if plan.config.cloud.kind == "here":
        return []
    shown, lines = ", ".join(label_places(places)[:MAX_PLACES]), planes_not_tried(plan.config)
    more = f", and {len(places) - MAX_PLACES} more" if len(places) > MAX_PLACES else ""
    if len({plane_of(place.provisioner).title for place in places}) > 1:
        lines.append(f"{shown}{more}; first where capacity was granted lately")
    return [f"order    {line}" for line in lines]


def format_plan(preview: RunPreview) -> list[str]:
    plan, price = preview.plan, preview.price
    lines = [
        f"run      {plan.run_id}",
        f"pod      {plan.node.name}: {_hardware(plan)}",
        *_order(plan),
        *([f"samplers {samplers}"] if (samplers := describe_samplers(plan.config)) else []),
        f"results  {run_url(plan.config, plan.bucket, plan.run_id)}",
    ]
    if plan.config.cloud.kind == "here" and price.tpu is None:
        lines.append("price    none: it runs on this machine")
    elif plan.config.cloud.kind == "local" and price.tpu is None:
        lines.append("price    none: the cloud is emulated on this machine")
    else:
        lines += [f"price    {price}", f"estimate {describe_estimate(plan.config, price)}"]
        lines.append(f"limit    {preview.limit}")
    if preview.status:
        lines.append(f"now      {preview.status}")
    lines.append("")
    told = any(f.message.startswith(NONE_FOUND) for f in preview.findings)
    unknown = [row.observed for row in preview.rows if isinstance(row.observed, Unknown)]
    if unseen := _unseen_lines([s for s in unknown if not (told and s.why.startswith(NONE_FOUND))]):
        lines += [*unseen, ""]  # first: without credentials it is every line
    lines += _resource_lines(preview)
    if preview.findings:
        lines += ["", *(f"{f.severity}: {f}" for f in preview.findings)]
    return lines


def _unseen_lines(states: list[Unknown]) -> list[str]:
    """Return why resources could not be observed, each reason once; one line for all APIs that are not enabled."""
    lines = dict.fromkeys(f"unknown: {state.why}" for state in states if not isinstance(state, NotEnabled))
    apis = dict.fromkeys(state.service.split(".")[0] for state in states if isinstance(state, NotEnabled))
    enabling = f"note: {plural(len(apis), 'API')} not enabled yet ({', '.join(apis)}): `up` enables them. "
    return [*lines, *([f"{enabling}What they manage is shown as absent."] if apis else [])]


def _resource_lines(preview: RunPreview) -> list[str]:
    """Return a line for each resource, with its changes."""
    lines: list[str] = []
    for row in preview.rows:
        label = "exists" if row.action == "none" else row.action
        lines.append(f"  {ACTION_SIGNS[row.action]} {label:<8} {row.title}")
        if row.action in ("update", "replace") and row.diff:
            lines += [f"               {change}" for change in row.diff.changes]
    return lines
