"""On the workers: `slipway exec`, `ssh`, `forward`; and `verify`, a matrix of what must be the same on all."""

import codecs
import hashlib
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from conf.strict_json import dumps
from controller.agent.protocol import (
    FINGERPRINT_DATA,
    OBSERVE,
    PROBE_PEERS,
    Fingerprints,
    Observation,
    ObserveRequest,
)
from controller.cli.main import Command
from controller.config.run_yaml import backend as expected_backend
from controller.core.errors import ConfigError
from controller.core.text import printable, unsanitized_stream
from controller.plan.build import Plan
from controller.resources.devices import chips_problem, peer_payloads
from controller.resources.software import Venv
from controller.run.session import open_session
from controller.ssh.connection import PortForward, open_shell
from controller.ssh.fleet import Fleet, WorkerError, WorkersFailedError

Writer = Callable[[bytes], object]
TextWriter = Callable[[str], object]


def run_exec(command: Command) -> int:
    """`slipway exec -- COMMAND`: run a command on one worker or all at once, and exit with its exit code.

    It runs where `ssh` does: in the environment of the run, once it was launched. A single word is a line for the
    worker's shell; several are a command and its arguments, passed unchanged.
    """
    if not command.remainder:
        raise ConfigError("exec: needs a command after --, such as slipway exec --worker all -- nproc")
    line = command.remainder[0] if len(command.remainder) == 1 else shlex.join(command.remainder)
    with open_session(command.options) as session:
        shell = shell_command(session.plan.run_id, line)
        with command.options.showing("connecting to the workers"):
            fleet = session.authorized_fleet()
        if command.flags.worker != "all" and not command.flags.json:
            link = fleet.connection(session.parse_worker(command.flags.worker))
            return link.follow(shell, _writer_for(sys.stdout), _writer_for(sys.stderr))
        who = range(len(fleet)) if command.flags.worker == "all" else [session.parse_worker(command.flags.worker)]
        return _run_on_workers(fleet, who, shell, as_json=command.flags.json)


def _run_on_workers(fleet: Fleet, workers: range | list[int], shell: str, *, as_json: bool) -> int:
    """Run the command on several workers at once and return the highest exit code, or raise WorkersFailedError."""
    lock = threading.Lock()
    width = len(str(len(fleet) - 1))

    def say(worker: int, key: str, text: str) -> None:
        with lock:
            if as_json:
                print(dumps({"worker": worker, key: text}), flush=True)
            else:
                print(
                    f"worker {worker:>{width}}| {text}", file=sys.stderr if key == "stderr" else sys.stdout, flush=True
                )

    def one(worker: int) -> int | WorkerError:
        out, err = (LineBuffer(lambda text, k=k: say(worker, k, text)) for k in ("stdout", "stderr"))
        try:
            code = fleet.connection(worker).follow(shell, out.write, err.write)
        except WorkerError as error:
            return error
        finally:
            out.flush()
            err.flush()
        if as_json:
            with lock:
                print(dumps({"worker": worker, "exit_code": code}), flush=True)
        return code

    pool = ThreadPoolExecutor(max_workers=len(workers))
    try:
        results = list(pool.map(one, workers))
    except BaseException:  # an interrupt does not wait for the workers
        fleet.close()
        raise
    finally:
        pool.shutdown()
    lost = [result for result in results if isinstance(result, WorkerError)]
    codes = {worker: code for worker, code in zip(workers, results, strict=True) if isinstance(code, int) and code}
    if codes and not as_json:
        print(f"exit codes: {', '.join(f'worker {w}: {c}' for w, c in codes.items())}", file=sys.stderr)
    if lost:
        raise WorkersFailedError("; ".join(map(str, lost)), lost)
    return max(codes.values(), default=0)


class LineBuffer:
    """Splits a byte stream into lines, so that the output of several workers does not mix."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._emit, self._partial = say, b""

    def write(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._emit(line.decode(errors="replace"))

    def flush(self) -> None:
        if self._partial:
            self.write(b"\n")


def _writer_for(stream: TextIO) -> Writer:
    """Return a writer of raw bytes to a file or a pipe, or of sanitized text to a terminal."""
    if not stream.isatty() and hasattr(stream, "buffer"):
        buffer = stream.buffer
        return lambda data: (buffer.write(data), buffer.flush())
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return lambda data: print(decoder.decode(data), end="", file=stream, flush=True)


def run_ssh(command: Command) -> int:
    """`slipway ssh`: open a shell on one worker, or run one command in this terminal, in the environment of the run."""
    with open_session(command.options) as session:
        worker = session.parse_worker(command.flags.worker)
        on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        line = shell_command(session.plan.run_id, shlex.join(command.remainder), on_terminal=on_terminal)
        with command.options.showing(f"connecting to worker {worker}"):
            link = session.authorized_fleet().ssh_connection(worker)
        return open_shell(link, line)


def shell_command(run_id: str, line: str, *, on_terminal: bool = False) -> str:
    """Return the shell command that enters the run's folder with the environment of its program, once it was launched.

    Args:
        run_id: run whose environment it is; the agent writes it to `shell.sh` at each launch.
        line: what the shell does there; empty: it is interactive, or reads commands from a pipe.
        on_terminal: whether the shell has a terminal.
    """
    source = f'f="$HOME/.slipway/runs/"{shlex.quote(run_id)}/shell.sh; '
    if line:
        return f'{source}[ -r "$f" ] && . "$f"; {line}'
    if on_terminal:
        return f'{source}[ -r "$f" ] && exec bash --rcfile "$f" -i; exec "${{SHELL:-/bin/sh}}" -l'
    return f'{source}[ -r "$f" ] && . "$f"; exec "${{SHELL:-/bin/sh}}"'


def run_forward(command: Command) -> int:
    """`slipway forward PORT[:REMOTE]`: reach a port of a worker at 127.0.0.1:PORT until Ctrl-C."""
    port, remote = command.flags.port
    with open_session(command.options) as session:
        worker = session.parse_worker(command.flags.worker)
        with command.options.showing(f"connecting to worker {worker}"):
            link = session.authorized_fleet().ssh_connection(worker)
            link.connection().open()  # fail now if the connection is broken, not at the first page
        forward = PortForward(link, port, remote, lambda message: print(f"warning: {message}", file=sys.stderr))
        if command.flags.json:
            print(dumps({"port": forward.port, "worker": worker, "remote": remote}), flush=True)
        else:
            where = f"forwarding http://127.0.0.1:{forward.port} to port {remote} of worker {worker}"
            print(f"{where}; press Ctrl-C to stop", flush=True)
        try:
            forward.serve()
        except KeyboardInterrupt:
            return 0
        finally:
            forward.close()
    return 0


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
        print(dumps({"run": session.plan.run_id, "workers": rows}, indent=1))
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
    packages = [dumps(a["venv"]["versions"], sort_keys=True) for a in answers if isinstance(a, dict) and a["venv"]]
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
        cells["packages"] = "ok" if dumps(venv["versions"], sort_keys=True) == usual else "different versions"
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
