"""`slipway plan`: show what `up` would do, its cost, and every mistake in the config. Changes nothing."""

import json
import sys
from pathlib import Path

from controller.cli.main import Command
from controller.core.text import plural
from controller.gcp.prices import max_cost
from controller.reconcile.resource import Unknown
from controller.records.plan_file import save_plan
from controller.run.preview import RunPreview, preview_run

ACTION_SIGNS = {"none": "=", "create": "+", "update": "~", "replace": "±", "wait": "…", "unknown": "?"}


def run(command: Command) -> int:
    preview = preview_run(command.options)
    if command.flags.save:
        print(f"saved {save_plan(preview.plan, command.overrides, Path.cwd())}", file=sys.stderr)
    print(json.dumps(preview.as_document(), indent=1) if command.flags.json else "\n".join(format_plan(preview)))
    return 2 if any(f.severity == "error" for f in preview.findings) else 0


def format_plan(preview: RunPreview) -> list[str]:
    plan, price = preview.plan, preview.price
    tpu, topology = plan.config.tpu, plan.config.topology
    lines = [
        f"run      {plan.run_id}",
        f"pod      {plan.node.name}: {tpu.accelerator_type}, {plural(topology.workers, 'worker')}, "
        f"{plural(topology.devices, 'device')}, "
        f"{' or '.join(tpu.capacity)} in {' or '.join(tpu.all_zones)}",
        f"results  gs://{plan.bucket}/runs/{plan.run_id}",
    ]
    if plan.config.cloud.kind == "local" and price.tpu is None:
        lines.append("price    none: the cloud is emulated on this machine")
    else:
        lines += [f"price    {price}", f"cost     {max_cost(plan.config, price)}"]
    if preview.status:
        lines.append(f"now      {preview.status}")
    lines.append("")
    whys: dict[str, None] = {}
    for row in preview.rows:
        lines.append(f"  {ACTION_SIGNS[row.action]} {row.action:<8} {row.resource.title}")
        if row.action in ("update", "replace") and row.diff:
            lines += [f"               {change}" for change in row.diff.changes]
        if isinstance(row.observed, Unknown):
            whys[row.observed.why] = None
    lines += ["", *(f"unknown: {why}" for why in whys)] if whys else []
    if preview.findings:
        lines += ["", *(f"{f.severity}: {f}" for f in preview.findings)]
    return lines
