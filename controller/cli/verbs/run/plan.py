"""`slipway plan`: what `up` would do, what it costs, and every mistake the config holds. Changes nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.schema.config import Config
from conf.schema.infra.cloud import LocalCloud
from controller.checks.preflight import by_severity, probe
from controller.cloud.connect import NO_PROJECT, connected, project_of
from controller.core.errors import ConfigError
from controller.core.finding import Finding
from controller.core.text import counted
from controller.gcp.prices import Rate, most, rate
from controller.inputs.code import unfetched
from controller.inputs.git import UnreachableError
from controller.plan.build import Plan, build
from controller.plan.preview import Row, preview
from controller.reconcile.resource import Absent, Unknown
from controller.records.ledger import Ledger
from controller.records.plan_file import save
from controller.resources.pod.node import Node
from controller.run.launch import alive
from controller.ssh.fleet import WorkersFailed

if TYPE_CHECKING:
    from controller.cli.main import Command
    from controller.cloud.emulator import Emulator
    from controller.context import Context

SIGNS = {"none": "=", "create": "+", "update": "~", "replace": "±", "wait": "…", "unknown": "?"}


def run(command: Command) -> int:
    plan, rows, findings, price, now = gather(command)
    if command.flags.save:
        print(f"saved {save(plan, command.overrides, Path.cwd())}", file=sys.stderr)
    if command.flags.json:
        print(json.dumps(as_document(plan, rows, findings, price, now), indent=1))
    else:
        print("\n".join(as_lines(plan, rows, findings, price, now)))
    return 2 if any(f.severity == "error" for f in findings) else 0


def gather(command: Command) -> tuple[Plan, list[Row], list[Finding], Rate, str]:
    """The plan, what is there of it, every finding, the price, and what the pod is doing already.

    Raises:
        ConfigError: the config is unusable.
    """
    config, findings = command.config()
    try:
        plan = build(config, project_of(config), Path.cwd())
    except UnreachableError as error:  # offline, or not yet allowed to: all else can be planned
        words = f"{str(error).removeprefix('code.repository: ')}; `up` needs it, and gives the run its id"
        findings = [*findings, Finding("repository", "warning", "code.repository", words)]
        plan = build(config, project_of(config), Path.cwd(), unfetched(config))
    if plan.project == NO_PROJECT:
        words = "no project; set cloud.project, or run `gcloud config set project ID`"
        findings = [*findings, Finding("project", "warning", "cloud.project", words)]
    with connected(config, keep_awake=True) as (world, emulator):
        asked = probe(config, world) if plan.project != NO_PROJECT else []
        asked += _faults(config, emulator)
        rows = preview(plan.resources, world)
        price = rate(config, world.clock.now())
        now = _now(plan, rows, world)
    seen = [finding for row in rows for finding in row.resource.findings(row.seen)]
    return plan, rows, by_severity([*findings, *asked, *seen]), price, now


def _faults(config: Config, emulator: Emulator | None) -> list[Finding]:
    """What the emulated cloud has to say against the misfortune that the config scripts."""
    if emulator is None or not isinstance(config.cloud, LocalCloud) or not config.cloud.faults:
        return []
    try:
        emulator.post("faults", {"key": "plan", "faults": list(config.cloud.faults), "check": True})
    except ConfigError as error:
        return [Finding("faults", "error", "cloud.faults", str(error).removeprefix("cloud.faults: "))]
    return []


def _now(plan: Plan, rows: list[Row], world: Context) -> str:
    """What the run and the pod are doing already, empty if nothing."""
    bucket = next(row for row in rows if row.resource.id == f"bucket/{plan.bucket}")
    if isinstance(bucket.seen, Unknown | Absent):
        return ""
    if Ledger(world.google, plan.bucket, plan.run_id).result() is not None:
        return "the run has finished already: up reports it and changes nothing"
    node = next(row.seen for row in rows if row.resource.id == plan.node.id)
    if not isinstance(node, Node) or node.state != "READY":
        return ""
    try:
        running = alive(world.fleet(node))
    except WorkersFailed:
        return ""
    if plan.run_id in running:
        return "the run is under way on the pod: up follows it"
    return f"the pod is busy with {', '.join(sorted(running))}: up --queue waits for it" if running else ""


def as_lines(plan: Plan, rows: list[Row], findings: list[Finding], price: Rate, now: str) -> list[str]:
    """The plan for people."""
    tpu, topology = plan.config.tpu, plan.config.topology
    lines = [
        f"run      {plan.run_id}",
        f"pod      {plan.node.name}: {tpu.accelerator_type}, {counted(topology.workers, 'worker')}, "
        f"{counted(topology.devices, 'device')}, "
        f"{' or '.join(tpu.capacity)} in {' or '.join(tpu.all_zones)}",
        f"results  gs://{plan.bucket}/runs/{plan.run_id}",
    ]
    if plan.config.cloud.kind == "local" and price.tpu is None:
        lines.append("price    nothing: the cloud is emulated on this machine")
    else:
        lines += [f"price    {price}", f"cost     {most(plan.config, price)}"]
    if now:
        lines.append(f"now      {now}")
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


def as_document(plan: Plan, rows: list[Row], findings: list[Finding], price: Rate, now: str) -> dict[str, Any]:
    """The plan for programs."""
    return {
        "run": plan.run_id,
        "pod": plan.node.name,
        "now": now,
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
