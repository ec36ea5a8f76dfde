"""`slipway verify`: show a matrix of workers and what must be the same on all of them, freshly hashed."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from controller.agent.protocol import FINGERPRINT_DATA, OBSERVE, PROBE_PEERS, Fingerprints, Observation, ObserveRequest
from controller.cli.main import Command
from controller.config.run_yaml import backend as expected_backend
from controller.core.errors import ConfigError
from controller.core.printable import printable, unsanitized_stream
from controller.plan.build import Plan
from controller.resources.workers.devices import chips_problem, peer_payloads
from controller.resources.workers.software import Venv
from controller.run.session import open_session
from controller.ssh.fleet import WorkerError

COLUMNS = ("code", "packages", "config", "data", "chips", "devices", "reaches worker 0", "disk")
OWN_DATA = "its own"
"""Of a program that is not the bundled trainer, Slipway does not know what it reads."""
Prints = list[Fingerprints | WorkerError]


def run_verify(command: Command) -> int:
    with (
        open_session(command.options) as session,
        command.options.showing("hashing code, packages and data on every worker"),
    ):
        fleet = session.fleet()
        if fleet is None:
            raise ConfigError(f"pod {session.plan.node.name} is absent or not ready; run `slipway up`")
        venv = session.plan.get(Venv).name
        fleet.call_all(PROBE_PEERS, peer_payloads(session.node()))  # `observe` returns the answers
        payload: ObserveRequest = {"code": session.plan.snapshot.sha256, "venv": venv, "run_id": session.plan.run_id}
        payload["chips"] = True
        answers, prints = fleet.call_all(OBSERVE, payload), None
        if session.plan.config.program.kind == "trainer":
            prints = fleet.call_all(
                FINGERPRINT_DATA, {"run_id": session.plan.run_id, "code": session.plan.snapshot.sha256, "venv": venv}
            )
        rows = build_matrix(session.plan, answers, prints)
    if command.flags.json:
        print(json.dumps({"run": session.plan.run_id, "workers": rows}, indent=1))
    else:
        _print_matrix(rows)
    wrong = [row for row in rows if row["wrong"]]
    if any({"chips", "devices"} & {*row["wrong"]} for row in wrong):
        return 3
    return 4 if wrong else 0


def build_matrix(
    plan: Plan, answers: list[Observation | WorkerError], prints: Prints | None = None
) -> list[dict[str, Any]]:
    """Return a row per worker: `ok` or the problem in each column, and the names of the columns with problems.

    prints: of the data that each worker would read; None if only the program knows them.
    """
    config = hashlib.sha256(plan.run_yaml.encode()).hexdigest()
    packages = [json.dumps(a["venv"]["versions"], sort_keys=True) for a in answers if isinstance(a, dict) and a["venv"]]
    usual = max(packages, key=packages.count, default="")
    rows, data = [], [OWN_DATA] * len(answers) if prints is None else data_cells(prints)
    for worker, answer in enumerate(answers):
        if isinstance(answer, WorkerError):
            cells = dict.fromkeys(COLUMNS, "?") | {"code": str(answer)}
        else:
            cells = _worker_cells(plan, answer, config, usual) | {"data": data[worker]}
        wrong = [name for name in COLUMNS if cells[name] not in ("ok", OWN_DATA)]
        rows.append({"worker": worker, **{name: cells[name] for name in COLUMNS}, "wrong": wrong})
    return rows


def data_cells(prints: Prints) -> list[str]:
    """Return `ok` for each worker that would read what most of them read, else the keys of what differs or is absent.

    A tie goes to the worker that comes first, as in the trainer's own comparison.
    """
    found = [one["data"] for one in prints if not isinstance(one, WorkerError)]
    usual = {key: Counter(one.get(key) for one in found).most_common(1)[0][0] for key in (found[0] if found else ())}
    return [one.message if isinstance(one, WorkerError) else _data_cell(one["data"], usual) for one in prints]


def _data_cell(found: Mapping[str, str], usual: Mapping[str, str | None]) -> str:
    absent = [key for key, value in found.items() if value == "absent"]
    differ = [key for key in usual if found.get(key) != usual[key] and key not in absent]
    words = [f"{', '.join(keys)} {what}" for keys, what in ((absent, "absent"), (differ, "differs")) if keys]
    return "; ".join(words) or "ok"


def _worker_cells(plan: Plan, answer: Observation, config: str, usual: str) -> dict[str, str]:
    expected = plan.config.topology.devices_per_worker
    backend = expected_backend(plan.config)
    devices, venv, peers = answer["devices"], answer["venv"], answer["peers"]
    cells = {
        "code": _comparison_cell(answer["code"], plan.snapshot.sha256),
        "config": _comparison_cell(answer["config"], config),
        "disk": "ok" if answer["free_gb"] >= plan.config.env.min_free_gb else f"{answer['free_gb']:.1f} GB left",
        "reaches worker 0": "ok" if peers and peers["reachable"] else (peers or {}).get("detail") or "not probed",
    }
    if venv is None or not venv["ok"]:
        cells["packages"] = "altered" if venv else "missing"
    else:
        cells["packages"] = "ok" if json.dumps(venv["versions"], sort_keys=True) == usual else "different versions"
    if not plan.config.program.needs_chips or plan.config.cloud.kind == "here" or answer["chips"] is None:
        cells["chips"] = "ok"
    else:
        wanted = plan.config.topology.chips // plan.node.spec.workers
        cells["chips"] = chips_problem(answer["chips"], wanted) or "ok"
    if plan.config.program.kind != "trainer":
        cells["devices"] = "ok"
    elif devices is None:
        cells["devices"] = "not probed"
    else:
        found = (devices["local_devices"], devices["backend"])
        cells["devices"] = "ok" if found == (expected, backend) else f"{found[0]} {found[1]}"
    return cells


def _comparison_cell(found: str | None, wanted: str) -> str:
    if found == wanted:
        return "ok"
    return f"{found[:8]}… not {wanted[:8]}…" if found else "missing"


def _print_matrix(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("worker", *COLUMNS):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            str(row["worker"]), *(Text(printable(row[name])) for name in COLUMNS), style="red" if row["wrong"] else None
        )
    Console(file=unsanitized_stream(sys.stdout), soft_wrap=True).print(table)
