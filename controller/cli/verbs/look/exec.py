"""`slipway exec -- COMMAND`: run a command on one worker or all at once, and exit with its exit code.

A single word is a line for the worker's shell; several are a command and its arguments, passed unchanged.
"""

import codecs
import json
import shlex
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import BinaryIO, TextIO

from controller.cli.main import Command
from controller.core.errors import ConfigError
from controller.run.session import open_session
from controller.ssh.connect import WorkerError
from controller.ssh.fleet import Fleet, WorkersFailedError

Writer = Callable[[bytes], object]


def run(command: Command) -> int:
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
        return partial(_write_bytes, stream.buffer)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return lambda data: print(decoder.decode(data), end="", file=stream, flush=True)


def _write_bytes(buffer: BinaryIO, data: bytes) -> None:
    buffer.write(data)
    buffer.flush()
