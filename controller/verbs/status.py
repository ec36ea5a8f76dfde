"""`slipway status`: the pod, the run, and what each worker does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from controller.resource import Absent, Pending
from controller.session import Session, session

if TYPE_CHECKING:
    from controller.cli import Command


def run(command: Command) -> int:
    with session(command) as now:
        document = look(now)
    if command.flags.json:
        print(json.dumps(document, indent=1))
    else:
        print("\n".join(as_lines(document)))
    return 0


def look(now: Session) -> dict[str, Any]:
    """Pod, run and workers as one document."""
    node = now.node()
    result = now.ledger.result()
    pod: dict[str, Any] = {"name": now.plan.node.name}
    if isinstance(node, Absent):
        pod["state"] = "absent"
    elif isinstance(node, Pending):
        pod["state"] = node.why
    else:
        pod |= {"state": node.state.lower(), "accelerator_type": node.accelerator_type, "workers": len(node.endpoints)}
    run = {
        "id": now.plan.run_id,
        "state": result.outcome if result else "not finished",
        "attempts": len(now.ledger.launches()),
        "summary": result.summary if result else {},
        "results": f"gs://{now.plan.bucket}/{now.ledger.prefix}",
    }
    return {"pod": pod, "run": run, "workers": _workers(now)}


def _workers(now: Session) -> list[dict[str, Any]]:
    fleet = now.fleet()
    if fleet is None:
        return []
    rows: list[dict[str, Any]] = []
    for worker, answer in enumerate(fleet.call_all("observe", {})):
        row: dict[str, Any] = {"worker": worker}
        if isinstance(answer, dict):
            row["running"] = answer["active"]["run_id"] if answer["active"] else None
            row["free_gb"] = round(answer["free_gb"], 1)
        else:
            row["error"] = str(answer)
        rows.append(row)
    return rows


def as_lines(document: dict[str, Any]) -> list[str]:
    """The document for people."""
    pod, run = document["pod"], document["run"]
    lines = [f"pod  {pod['name']}: {pod['state']}" if pod["state"] != "absent" else f"pod  {pod['name']}: no node"]
    tries = (
        f", {run['attempts']} attempt{'s' if run['attempts'] != 1 else ''}" if run["attempts"] else ", never launched"
    )
    lines.append(f"run  {run['id']}: {run['state']}{tries}")
    lines += [f"     {name}: {value}" for name, value in run["summary"].items()]
    lines.append(f"     {run['results']}")
    for row in document["workers"]:
        words = row.get("error") or (f"running {row['running']}" if row["running"] else "idle")
        lines.append(f"worker {row['worker']}: {words}")
    return lines
