"""`slipway plan`: what `up` would do, what it costs, and every mistake the config holds. Changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.connect import NO_PROJECT, connected, project_of
from controller.cost import Rate, most, rate
from controller.finding import Finding
from controller.plan import Plan, build
from controller.preflight import by_severity, probe
from controller.preview import Row, preview
from controller.resource import Unknown

if TYPE_CHECKING:
    from controller.cli import Command

SIGNS = {"none": "=", "create": "+", "update": "~", "replace": "±", "wait": "…", "unknown": "?"}


def run(command: Command) -> int:
    config, findings = command.config()
    plan = build(config, project_of(config), Path.cwd())
    if plan.project == NO_PROJECT:
        words = "no project; set cloud.project, or run `gcloud config set project ID`"
        findings = [*findings, Finding("project", "warning", "cloud.project", words)]
    with connected(config, keep_awake=True) as (world, _):
        asked = probe(config, world) if plan.project != NO_PROJECT else []
        rows = preview(plan.resources, world)
        price = rate(config, world.clock.now())
    seen = [finding for row in rows for finding in row.resource.findings(row.seen)]
    findings = by_severity([*findings, *asked, *seen])
    if command.flags.json:
        print(json.dumps(as_document(plan, rows, findings, price), indent=1))
    else:
        print("\n".join(as_lines(plan, rows, findings, price)))
    return 2 if any(f.severity == "error" for f in findings) else 0


def as_lines(plan: Plan, rows: list[Row], findings: list[Finding], price: Rate) -> list[str]:
    """The plan for people."""
    tpu, topology = plan.config.tpu, plan.config.topology
    lines = [
        f"run      {plan.run_id}",
        f"pod      {plan.node.name}: {tpu.accelerator_type}, {topology.workers} workers, {topology.devices} devices, "
        f"{' or '.join(tpu.capacity)} in {' or '.join(tpu.all_zones)}",
        f"results  gs://{plan.bucket}/runs/{plan.run_id}",
    ]
    if plan.config.cloud.kind == "local" and price.tpu is None:
        lines.append("price    nothing: the cloud is emulated on this machine")
    else:
        lines += [f"price    {price}", f"cost     {most(plan.config, price)}"]
    lines.append("")
    whys: dict[str, None] = {}
    for row in rows:
        lines.append(f"  {SIGNS[row.action]} {row.action:<8} {row.resource.title}")
        if row.action in ("update", "replace") and row.diff:
            lines += [f"               {change}" for change in row.diff.changes]
        if isinstance(row.seen, Unknown):
            whys[row.seen.why] = None
    lines += ["", *(f"unknown: {why}" for why in whys)] if whys else []
    if findings:
        lines += ["", *(f"{f.severity}: {f}" for f in findings)]
    return lines


def as_document(plan: Plan, rows: list[Row], findings: list[Finding], price: Rate) -> dict[str, Any]:
    """The plan for programs."""
    return {
        "run": plan.run_id,
        "pod": plan.node.name,
        "bucket": plan.bucket,
        "usd_per_hour": price.tpu,
        "usd_per_hour_network": price.network,
        "resources": [
            {
                "id": row.resource.id,
                "title": row.resource.title,
                "action": row.action,
                "changes": [str(c) for c in row.diff.changes] if row.diff and row.action != "create" else [],
                **({"why": row.seen.why} if isinstance(row.seen, Unknown) else {}),
            }
            for row in rows
        ],
        "findings": [{"check": f.check, "severity": f.severity, "key": f.key, "words": f.words} for f in findings],
    }
