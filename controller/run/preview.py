"""Preview of `up`: the plan next to the current state, all findings and the price. Changes nothing."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.schema.cloud import LocalCloud
from conf.schema.config import Config
from controller.checks.preflight import probe_cloud, probe_plan, sort_by_severity
from controller.connect import open_context, opening_message, project_of
from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.events import BoardScreen
from controller.core.finding import Finding
from controller.core.text import plural
from controller.emulator import Emulator
from controller.gcp.credentials import missing_project
from controller.gcp.google_errors import ServiceDisabledError
from controller.gcp.prices import HourlyPrice, max_cost
from controller.inputs.code import unfetched_snapshot
from controller.inputs.git import UnreachableError
from controller.plan.build import Plan, ResourcePreview, build_plan, preview_resources
from controller.plan.samplers import dearest_pod, price_of_pods, sampler_plans
from controller.reconcile import Absent, Unknown
from controller.records.ledger import Ledger
from controller.resources.pod.node import Node
from controller.run.estimate import RunEstimate, describe_estimate, estimate_run
from controller.run.launch import running_runs
from controller.run.options import RunOptions
from controller.run.session import open_plan
from controller.ssh.fleet import WorkersFailedError


@dataclass(frozen=True)
class RunPreview:
    """What `up` would do."""

    plan: Plan
    rows: list[ResourcePreview]
    findings: list[Finding]
    price: HourlyPrice
    """That of all pods of the run."""
    status: str
    """Current activity of the run and the pod, empty if none."""
    dearest: HourlyPrice | None = None
    """That of its dearest pod; None if it has one only."""

    @property
    def limit(self) -> str:
        """The most that the run can cost."""
        return max_cost(self.plan.config, self.dearest or self.price)

    @property
    def estimate(self) -> RunEstimate | None:
        return estimate_run(self.plan.config, self.price)

    def as_document(self) -> dict[str, Any]:
        return {
            "run": self.plan.run_id,
            "pod": self.plan.node.name,
            "now": self.status,
            "bucket": self.plan.bucket,
            "left_out": dict(self.plan.snapshot.left_out),
            "usd_per_hour": self.price.tpu,
            "usd_per_hour_network": self.price.network,
            "estimate": None if self.estimate is None else asdict(self.estimate),
            "resources": [
                {
                    "id": row.resource.id,
                    "title": row.title,
                    "action": row.action,
                    "changes": [str(c) for c in row.diff.changes] if row.diff and row.action != "create" else [],
                    **({"why": row.observed.why} if isinstance(row.observed, Unknown) else {}),
                }
                for row in self.rows
            ],
            "findings": [
                {"check": f.check, "severity": f.severity, "key": f.key, "words": f.message, "cure": f.cure}
                for f in self.findings
            ],
        }


def preview_run(options: RunOptions) -> RunPreview:
    """Compare the plan with the current state and run the checks.

    Raises ConfigError if the config is unusable, or the record of `options.run_id` is not trusted.
    """
    if options.run_id:
        opened = open_plan(options, drives=True, keep_awake=True)
        with opened as (plan, context, emulator), options.showing("observing what exists"):
            return _observed(plan, context, emulator, [])
    with options.waiting() as doing:
        doing("composing the config")
        config, findings = options.config()
        doing("hashing code and data")
        try:
            plan = build_plan(config, project_of(config), Path.cwd())
        except UnreachableError as error:  # offline, or not yet authorized: everything else can be planned
            message = f"{str(error).removeprefix('code.repository: ')}; `up` needs it to determine the run ID"
            findings = [*findings, Finding("repository", "warning", "code.repository", message)]
            plan = build_plan(config, project_of(config), Path.cwd(), unfetched_snapshot(config))
        if no_project := missing_project(plan.project):
            message = f"{no_project}; `plan` goes on without it, `up` does not"
            findings = [*findings, Finding("project", "warning", "cloud.project", message)]
        doing(opening_message(config))
        with open_context(config, keep_awake=True) as (context, emulator):
            doing("observing what exists")
            return _observed(plan, context, emulator, findings)


def _observed(plan: Plan, context: Context, emulator: Emulator | None, findings: list[Finding]) -> RunPreview:
    """Return the preview of a plan, with the findings about it so far and those about its cloud."""
    config, now = plan.config, context.clock.now()
    findings = [*findings, *([] if missing_project(plan.project) else probe_cloud(config, context))]
    findings += [*probe_plan(plan, context), *_check_faults(config, emulator)]
    nodes = tuple(one.node for one in sampler_plans(plan, Path.cwd()))
    rows = preview_resources((*plan.resources, *nodes), context)
    price, dearest = price_of_pods(config, now), dearest_pod(config, now)
    status = _status(plan, rows, context)
    findings += [finding for row in rows for finding in row.resource.findings(row.observed)]
    return RunPreview(plan, rows, sort_by_severity(findings), price, status, dearest)


def _check_faults(config: Config, emulator: Emulator | None) -> list[Finding]:
    """Return the emulated cloud's findings about the faults that the config scripts."""
    if emulator is None or not isinstance(config.cloud, LocalCloud) or not config.cloud.faults:
        return []
    try:
        emulator.post("faults", {"key": "plan", "faults": list(config.cloud.faults), "check": True})
    except ConfigError as error:
        return [Finding("faults", "error", "cloud.faults", str(error).removeprefix("cloud.faults: "))]
    return []


def _status(plan: Plan, rows: list[ResourcePreview], context: Context) -> str:
    """Return the current activity of the run and the pod, empty if none."""
    bucket = next((row for row in rows if row.resource.id == f"bucket/{plan.bucket}"), None)
    if bucket is not None and isinstance(bucket.observed, Unknown | Absent):
        return ""
    if Ledger(context.google, plan.bucket, plan.run_id).result() is not None:
        return "the run has already finished: `up` reports it and changes nothing"
    node = next(row.observed for row in rows if row.resource.id == plan.node.id)
    if not isinstance(node, Node) or not node.is_ready:
        return ""
    try:
        running = running_runs(node.fleet(context))
    except WorkersFailedError:
        return ""
    if plan.run_id in running:
        return "the run is active on the pod: `up` follows it"
    return f"the pod is busy with {', '.join(sorted(running))}: `up --queue` waits for it" if running else ""


def confirm_cost(plan: Plan, context: Context, screen: BoardScreen, *, yes: bool) -> None:
    """Run the live checks and confirm the cost with the user, unless all pods of the run already exist.

    A program that is not expected to finish is confirmed in any case. Raises ConfigError if a live check found an
    error, or the user declined.
    """
    caution = plan.config.program.caution if context.is_billed and not plan.config.code.stand_in else None
    if caution and not screen.ask(f"{caution}. Start it all the same?", yes):
        raise ConfigError(f"program.caution: {caution}; nothing was created; pass --yes to start it all the same")
    absent = [one.node for one in (plan, *sampler_plans(plan, Path.cwd())) if _is_absent(one, context)]
    if not absent:
        return
    findings = sort_by_severity([*probe_cloud(plan.config, context), *probe_plan(plan, context)])
    if errors := [finding for finding in findings if finding.severity == "error"]:
        raise ConfigError(errors)
    for finding in findings:
        if finding.severity != "note":  # `plan` shows those; nothing needs to be done about them
            context.events.note(plan.run_id, f"{finding.severity}: {finding}")
    if not context.is_billed or plan.node.adopt:
        return
    now = context.clock.now()
    price = price_of_pods(plan.config, now)
    cost = "an unknown price" if price.tpu is None else price
    more = plural(len(absent) - 1, "more pod")
    pods = f"{absent[0].title} and {more}" if absent[1:] else absent[0].title
    question = (
        f"Create {pods} for {cost}? Estimate of the run: {describe_estimate(plan.config, price)}. "
        f"Limit: {max_cost(plan.config, dearest_pod(plan.config, now))}."
    )
    if not screen.ask(question, yes):
        raise ConfigError("nothing was created; pass --yes to skip the prompt")


def _is_absent(plan: Plan, context: Context) -> bool:
    try:
        return isinstance(plan.observe_pod(context), Absent)
    except ServiceDisabledError:
        return True  # without the API there is no pod
