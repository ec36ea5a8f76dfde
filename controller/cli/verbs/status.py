"""`slipway status`: show the pod, the run, and each worker."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.strict_json import dumps
from controller.agent.protocol import OBSERVE
from controller.cli.main import Command
from controller.config.run_yaml import run_url
from controller.core.errors import ConfigError
from controller.core.text import DEFAULT_WIDTH, format_duration, plural, result_lines, width_of, wrap
from controller.gcp.prices import monthly_storage_price
from controller.lease import pod_lease, run_lease
from controller.lease_store import DamagedLeaseError
from controller.plan.build import Plan
from controller.plan.samplers import sampler_plans
from controller.reconcile import Absent, Pending
from controller.records import index
from controller.records.index import RunRow
from controller.records.ledger import Ledger, describe_alert, read_alerts
from controller.records.recorded_code import MissingInputsError
from controller.records.recorder import run_folder
from controller.records.spending import Spending, billed_uid, format_hours
from controller.records.unfinished import retry_deletions
from controller.recovery.responses import Incident
from controller.resources.pod.node import Node, describe
from controller.resources.pod.planes import plane_of
from controller.run.options import RunOptions
from controller.run.session import Session, open_session

MAX_OVER = 5
"""Number of alerts shown that are over."""


def run_status(command: Command) -> int:
    """`slipway status`: show the pod, the run, and each worker."""
    if command.flags.sweep:
        from controller.cli.verbs.sweeps import show_sweep

        return show_sweep(command)
    if command.flags.all:
        from controller.cli.verbs.billed import show_project

        return show_project(command)
    if command.flags.follow:
        raise ConfigError("--follow: needs --sweep ID; to follow a run, use `slipway logs --follow`")
    try:
        with open_session(command.options, keep_awake=True) as session:  # often called again at once
            for line in retry_deletions(session.context):
                print(line, file=sys.stderr)
            with command.options.waiting() as doing:
                doing("observing the pod, its workers and the bucket")
                document = gather_status(session)
    except MissingInputsError as error:
        if not _show_recorded(command.options, str(error), as_json=command.flags.json):
            raise
        return 0
    if command.flags.json:
        print(dumps(document, indent=1))
    else:
        width = width_of(sys.stdout)
        print("\n".join(wrap(line, width, 5) for line in format_status(document)))
    return 0


def gather_status(session: Session) -> dict[str, Any]:
    """Return pod, run and workers as one document."""
    node = session.node()
    result, now = session.ledger.result(), session.context.clock.now()
    pod: dict[str, Any] = {"name": session.plan.node.name}
    pod["state"] = describe(node)
    if isinstance(node, Node):
        status = node.status
        pod |= {"accelerator_type": status.spec.accelerator_type, "workers": status.spec.workers}
        pod |= {"zone": status.place.zone, "capacity": status.place.capacity}
        pod["console"] = console_url(session.plan, node)
    driver = pod_lease(session.plan, session.context).current_other()
    pod["driver"] = str(driver.record) if driver else None
    workers, launches = _worker_status(session), session.ledger.launches()
    summary, attempts = result.summary if result else {}, len(launches)
    if result is not None:
        state = result.outcome
    elif not launches and (row := _finished_row(session.context.state_dir, session.plan.run_id)):
        state = "finished (recorded on this machine; the bucket no longer has it)"
        summary, attempts = row.get("metrics") or {}, row.get("attempts") or 1
    else:
        state = _last_attempt_message(session, workers, launches[-1].attempt if launches else 0)
    run = {
        "id": session.plan.run_id,
        "state": state,
        "attempts": attempts,
        "verdicts": [incident.to_json() for incident in session.ledger.incidents(Incident.from_json)],
        "summary": summary,
        "results": run_url(session.plan.config, session.plan.bucket, session.plan.run_id),
    }
    run["alerts"] = _alerts(session, run["state"] == "running", now)
    run["is_followed"] = run["state"] != "running" or driver is not None
    run["abandoned"] = None if result else _abandoned_since(session)
    run["damaged"] = session.ledger.problem_urls
    document = {"pod": pod, "run": run, "cost": _cost_status(session, node), "workers": workers}
    samplers = [_sampler_status(session, plan) for plan in sampler_plans(session.plan, Path.cwd())]
    return document | ({"samplers": samplers} if samplers else {})


def console_url(plan: Plan, node: Node) -> str | None:
    """Return the page of Google's console about a pod; None on another cloud."""
    if plan.config.cloud.kind != "gcp":
        return None
    place = node.status.place
    return plane_of(place.provisioner).console_url(plan.project, node.name, place)


def _sampler_status(session: Session, plan: Plan) -> dict[str, Any]:
    """Return the state of a pod of samplers and of its run, and what it has cost."""
    beside = replace(session, plan=plan, ledger=Ledger(session.context.google, plan.bucket, plan.run_id))
    node = beside.node()
    spent = Spending(session.context.google, session.context.clock, plan.bucket, plan.run_id, plan.config)
    spent.close_lost(billed_uid(node))
    usage = spent.usage()
    row: dict[str, Any] = {"name": plan.node.name, "state": describe(node), "run": plan.run_id}
    if isinstance(node, Node):
        row |= {"accelerator_type": node.status.spec.accelerator_type, "zone": node.status.place.zone}
        row["console"] = console_url(plan, node)
    row["attempts"] = len(beside.ledger.launches())
    usd = None if usage.usd is None else round(usage.usd, 4)
    return row | {"pod_hours": round(usage.hours, 4), "usd": usd}


def _abandoned_since(session: Session) -> float | None:
    """Return when the controller that drove the run was last heard of; None if it is at work, or left on purpose."""
    lease = run_lease(session.plan, session.context)
    try:
        snapshot = lease.read()
    except DamagedLeaseError:
        session.ledger.report(f"{session.ledger.prefix}/lease.json is damaged: no lease")
        return None
    if snapshot is None or snapshot.record.released or lease.is_held_by_other(snapshot):
        return None
    return session.context.clock.now() - snapshot.age


def _alerts(session: Session, is_running: bool, now: float) -> list[dict[str, Any]]:
    """Return the alerts of the latest attempt; those that last first, then the newest that are over."""
    found = [alert for alert in read_alerts(session.ledger).alerts if is_running or alert.ended is not None]
    active, over = [one for one in found if one.ended is None], [one for one in found if one.ended is not None]
    return [alert.to_json() | {"text": describe_alert(alert, now)} for alert in [*active, *over[-MAX_OVER:]]]


def _last_attempt_message(session: Session, workers: list[dict[str, Any]], attempt: int) -> str:
    """Describe the end of the last attempt of a run without a result."""
    if any(row.get("running") == session.plan.run_id for row in workers):
        return "running"
    if attempt and session.ledger.is_cancelled(attempt):
        return "cancelled"
    incidents = reversed(session.ledger.incidents(Incident.from_json))
    verdict = next((incident.kind for incident in incidents if incident.attempt == attempt), "")
    if attempt and verdict:  # the incident below names the worker
        return f"not finished, {verdict.replace('_', ' ')}"
    ending = session.ledger.exit_status(0, attempt) if attempt else None
    return f"not finished, worker 0 exited with {ending}" if ending and ending != "code 0" else "not finished"


def _cost_status(session: Session, node: Absent | Pending | Node) -> dict[str, Any]:
    """Return the run's pod hours and USD so far, and the monthly cost of its results in the bucket."""
    spending = Spending(
        session.context.google, session.context.clock, session.plan.bucket, session.plan.run_id, session.plan.config
    )
    spending.close_lost(billed_uid(node))
    spent = spending.usage()
    listed = session.context.google.objects(session.plan.bucket, f"{session.ledger.prefix}/", "size")
    gigabytes = sum(int(item["size"]) for item in listed) / 1e9
    price = spending.rate(node if isinstance(node, Node) else None)
    return {
        "pod_hours": round(spent.hours, 4),
        "usd": None if spent.usd is None else round(spent.usd, 4),
        "usd_per_hour": price.total,
        "price": price.source,
        "stored_gb": round(gigabytes, 3),
        "stored_usd_per_month": round(monthly_storage_price(gigabytes), 4),
        "pods": [life.to_json() for life in spending.lifetimes()],
    }


def _worker_status(session: Session) -> list[dict[str, Any]]:
    fleet = session.fleet()
    if fleet is None:
        return []
    rows: list[dict[str, Any]] = []
    for worker, answer in enumerate(fleet.call_all(OBSERVE, {})):
        row: dict[str, Any] = {"worker": worker}
        if isinstance(answer, dict):
            row["running"] = answer["active"]["run_id"] if answer["active"] else None
            row["free_gb"] = round(answer["free_gb"], 1)
        else:
            row["error"] = str(answer)
        rows.append(row)
    return rows


def _format_incident(incident: dict[str, Any]) -> str:
    """Describe the failure of one attempt, and the reaction to it."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident["time"]))
    which = f"attempt {incident['attempt']}" if incident["attempt"] else "before launch"
    return f"{when}  {which}: {incident['message']}; {incident['response'].replace('_', ' ')}"


def _format_cost(cost: dict[str, Any]) -> str:
    usd = f", about ${cost['usd']:.2f}" if cost["usd"] is not None else ""
    price = f" at ${cost['usd_per_hour']:.2f} per hour ({cost['price']})" if cost["usd_per_hour"] is not None else ""
    kept = f"; results: {cost['stored_gb']:.3g} GB, ${cost['stored_usd_per_month']:.2f} per month"
    return f"{format_hours(cost['pod_hours'])}{usd}{price}{kept if cost['stored_gb'] >= 0.01 else ''}"


def format_status(document: dict[str, Any]) -> list[str]:
    pod, run = document["pod"], document["run"]
    lines = [f"pod  {pod['name']}: {pod['state']}" if pod["state"] != "absent" else f"pod  {pod['name']}: no node"]
    lines += [f"     {url}"] if (url := pod.get("console")) else []
    if pod["driver"]:
        lines.append(f"     controlled by {pod['driver']}")
    tries = (
        f", {run['attempts']} attempt{'s' if run['attempts'] != 1 else ''}" if run["attempts"] else ", never launched"
    )
    lines.append(f"run  {run['id']}: {run['state']}{tries}")
    lines += [f"     {alert['text']}" for alert in run["alerts"]]
    if run["abandoned"] is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["abandoned"]))
        lines.append(f"     nobody has driven it since {since}, when its controller was last heard of")
        lines.append("     the program may go on; the same `slipway up` re-attaches or resumes")
    elif not run["is_followed"]:
        lines.append("     no controller follows it, so nothing raises alerts; the same `slipway up` re-attaches")
    lines += [f"     {_format_incident(incident)}" for incident in run["verdicts"]]
    lines += [f"     warning: {problem}" for problem in run["damaged"]]
    lines += [f"     {line}" for line in result_lines(run["summary"], (width_of(sys.stdout) or DEFAULT_WIDTH) - 5)]
    lines.append(f"     {run['results']}")
    lines.append(f"cost {_format_cost(document['cost'])}")
    for row in document.get("samplers", ()):
        usd = f", about ${row['usd']:.2f}" if row["usd"] is not None else ""
        state = row["state"] if row["state"] != "absent" else "no node"
        lines.append(f"pod  {row['name']}: {state}, {format_hours(row['pod_hours'])}{usd}")
        lines += [f"     {url}"] if (url := row.get("console")) else []
        lines.append(f"     samples as {row['run']}, {plural(row['attempts'], 'attempt')}")
    for row in document["workers"]:
        message = row.get("error") or (f"running {row['running']}" if row["running"] else "idle")
        lines.append(f"worker {row['worker']}: {message}")
    return lines


def _finished_row(state: Path, run_id: str) -> RunRow | None:
    """Return the row of a run that has finished; None if this machine does not know it as finished."""
    rows = (row for row in index.load_rows(state) if row.get("run") == run_id)
    return next((row for row in rows if row.get("state") == "finished"), None)


def _show_recorded(options: RunOptions, why: str, *, as_json: bool) -> bool:
    """Print the record of a finished run; return False if there is none.

    Args:
        options: name the run.
        why: what the bucket lacks.
        as_json: print JSON.
    """
    row = _finished_row(options.state_dir, options.run_id)
    if row is None:
        return False
    folder = run_folder(options.state_dir, options.run_id)
    if as_json:
        facts = {key: row.get(key) for key in ("attempts", "seconds", "pod_hours", "usd")}
        found = {"id": row["run"], "state": row["state"], **facts, "summary": row.get("metrics")}
        print(dumps({"run": found | {"results": str(folder)}, "missing": why}, indent=1))
    else:
        width = width_of(sys.stdout)
        print("\n".join(wrap(line, width, 5) for line in _recorded_lines(row, folder, why, width)))
    return True


def _recorded_lines(row: RunRow, folder: Path, why: str, width: int | None) -> list[str]:
    metrics, attempts, seconds = row.get("metrics"), row.get("attempts"), row.get("seconds")
    tries = f", {plural(attempts, 'attempt')}" if isinstance(attempts, int) else ""
    took = f", {format_duration(seconds)}" if isinstance(seconds, int | float) else ""
    lines = [f"run  {row['run']}: {row['state']}{tries}{took}"]
    lines += [
        f"     {line}"
        for line in result_lines(metrics if isinstance(metrics, dict) else {}, (width or DEFAULT_WIDTH) - 5)
    ]
    lines.append(f"     from the record of this machine: {folder}")
    lines.append(f"     {why.partition(': ')[2] or why}, so the run cannot be repeated; its pod was not looked for")
    return lines
