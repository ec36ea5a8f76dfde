"""On the workers: `slipway exec`, `ssh`, `forward` and `logs`."""

import codecs
import json
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TextIO

from controller.agent.protocol import WATCH, WatchRequest
from controller.cli.main import Command
from controller.core.errors import ConfigError
from controller.gcp.errors import NotFoundError
from controller.run.session import Session, open_session
from controller.ssh.fleet import Fleet, WorkerError, WorkersFailedError
from controller.ssh.sessions import PortForward, open_shell

Writer = Callable[[bytes], object]
TextWriter = Callable[[str], object]


def run_exec(command: Command) -> int:
    """`slipway exec -- COMMAND`: run a command on one worker or all at once, and exit with its exit code.

    A single word is a line for the worker's shell; several are a command and its arguments, passed unchanged.
    """
    if not command.remainder:
        raise ConfigError("exec: needs a command after --, such as slipway exec --worker all -- nproc")
    shell = command.remainder[0] if len(command.remainder) == 1 else shlex.join(command.remainder)
    with open_session(command.options) as session:
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
                print(json.dumps({"worker": worker, key: text}), flush=True)
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
                print(json.dumps({"worker": worker, "exit_code": code}), flush=True)
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
        line = shell_command(session.plan.run_id, command.remainder, on_terminal=on_terminal)
        with command.options.showing(f"connecting to worker {worker}"):
            link = session.authorized_fleet().ssh_connection(worker)
        return open_shell(link, line)


def shell_command(run_id: str, words: tuple[str, ...], *, on_terminal: bool) -> str:
    """Return the shell command that enters the run's folder with the environment of its program, once it was launched.

    Args:
        run_id: run whose environment it is; the agent writes it to `shell.sh` at each launch.
        words: command to run there; empty: an interactive shell, or one that reads commands from a pipe.
        on_terminal: whether the shell has a terminal.
    """
    source = f'f="$HOME/.slipway/runs/"{shlex.quote(run_id)}/shell.sh; '
    if words:
        return f'{source}[ -r "$f" ] && . "$f"; {shlex.join(words)}'
    if on_terminal:
        return f'{source}[ -r "$f" ] && exec bash --rcfile "$f" -i; exec "${{SHELL:-/bin/sh}}" -l'
    return f'{source}[ -r "$f" ] && . "$f"; exec "${{SHELL:-/bin/sh}}"'


def run_forward(command: Command) -> int:
    """`slipway forward PORT[:REMOTE]`: reach a port of a worker at 127.0.0.1:PORT until Ctrl-C."""
    port, remote = parse_ports(command.flags.port)
    with open_session(command.options) as session:
        worker = session.parse_worker(command.flags.worker)
        with command.options.showing(f"connecting to worker {worker}"):
            link = session.authorized_fleet().ssh_connection(worker)
            link.connection().open()  # fail now if the connection is broken, not at the first page
        forward = PortForward(link, port, remote, lambda message: print(f"warning: {message}", file=sys.stderr))
        if command.flags.json:
            print(json.dumps({"port": forward.port, "worker": worker, "remote": remote}), flush=True)
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


def parse_ports(text: str) -> tuple[int, int]:
    """Parse `8888` or `9999:8888` as (local port, worker's port). Raises ConfigError if it is neither."""
    local, _, remote = text.partition(":")
    try:
        found = int(local), int(remote or local)
    except ValueError:
        found = (-1, -1)
    if not (0 <= found[0] < 1 << 16 and 0 < found[1] < 1 << 16):
        raise ConfigError(
            f"invalid port {text!r}; use 8888, or 9999:8888 for local port 9999 and port 8888 of the worker"
        )
    return found


def run_logs(command: Command) -> int:
    """`slipway logs`: show the program's output, live from one worker or several, else from the bucket."""
    flags = command.flags
    with open_session(command.options) as session:
        workers = session.parse_workers(flags.worker)
        launches = session.ledger.launches()
        if not launches:
            raise ConfigError(f"{session.plan.run_id} was never launched; run `slipway up` first")
        known = [launch.attempt for launch in launches]
        attempt = known[-1] if flags.attempt is None else flags.attempt
        if attempt not in known:
            raise ConfigError(f"--attempt {attempt}: the run has attempts {', '.join(map(str, known))}")
        if len(launches) > 1 and not flags.json:
            print(f"(attempt {attempt} of {len(launches)}; --attempt N shows another)", file=sys.stderr)
        with command.options.showing("connecting to the workers"):
            fleet = session.fleet()
        show = partial(_show_log, session, fleet, attempt, flags.follow)
        if len(workers) > 1:
            _show_all(show, workers, as_json=flags.json, at_once=flags.follow)
        elif flags.json:
            show(workers[0], lambda text: print(json.dumps({"log": text}), flush=True))
        else:
            show(workers[0], lambda text: print(text, end="", flush=True))
    return 0


def _show_all(
    show_log: Callable[[int, TextWriter], None], workers: Sequence[int], *, as_json: bool, at_once: bool
) -> None:
    """Show several logs line by line, each line with its worker; at once, or one after the other."""
    lock, width = threading.Lock(), len(str(max(workers)))

    def say(worker: int, line: str) -> None:
        with lock:
            print(json.dumps({"worker": worker, "log": line}) if as_json else f"worker {worker:>{width}}| {line}",
                  flush=True)  # fmt: skip

    def show(worker: int) -> str:
        lines = LineBuffer(partial(say, worker))
        try:
            show_log(worker, lambda text: lines.write(text.encode()))
        except (ConfigError, WorkerError) as error:
            return str(error)
        finally:
            lines.flush()
        return ""

    with ThreadPoolExecutor(max_workers=len(workers) if at_once else 1) as pool:
        problems = [problem for problem in pool.map(show, workers) if problem]
    if problems:
        raise ConfigError(problems)


def _show_log(
    session: Session, fleet: Fleet | None, attempt: int, follow: bool, worker: int, write: TextWriter
) -> None:
    """Write the log of a worker: from the worker, else from the bucket.

    Raises:
        ConfigError: it has none.
        WorkerError: its stream breaks off.
    """
    request: WatchRequest = {"run_id": session.plan.run_id, "attempt": attempt, "follow": follow}
    told = False
    try:
        for line in fleet.stream(worker, WATCH, request) if fleet is not None else ():
            if "log" in line:
                told = True
                write(line["log"])
    except WorkerError as error:
        if told or error.kind != "agent":
            raise
    if told:
        return
    try:
        content = session.context.google.download(session.plan.bucket, session.ledger.log_object(worker, attempt))
    except NotFoundError:
        message = f"no log for worker {worker}, attempt {attempt}, on the pod or in the bucket"
        raise ConfigError(message) from None
    write(content.decode(errors="replace"))
