"""A worker process that answers one line of JSON with another, until a limit of the kernel ends it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class TimeLimitError(Exception):
    """The process used up its time."""


class OutputLimitError(Exception):
    """The process wrote too much."""


class ProcessDiedError(Exception):
    """The process ended during a request, for another reason."""


class WorkerProcess:
    """One process, started when needed, and restarted after it dies."""

    def __init__(self, module: str, *arguments: str) -> None:
        """Take the words of `python -m module arguments`."""
        self._words: Sequence[str] = ("-m", module, *arguments)
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: Any) -> Any:
        """Return the answer. Raises TimeLimitError, OutputLimitError or ProcessDiedError if the process dies.

        One that dies for another reason than a limit is asked once more: perhaps this request was not at fault.
        """
        try:
            return self._ask_once(request)
        except ProcessDiedError:
            return self._ask_once(request)

    def _ask_once(self, request: Any) -> Any:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request, default=str) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply.endswith("\n"):
            self._raise_exit_error(process)
        return json.loads(reply)

    def stop(self) -> None:
        """End the process, after its current request."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        # the order of SymPy's sets must not differ between processes
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
        env = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
            encoding="utf-8",
            process_group=0,
        )
        return self._process

    def _raise_exit_error(self, process: subprocess.Popen[str]) -> NoReturn:
        assert process.stdout is not None
        code = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        process.stdout.close()
        try:
            assert process.stdin is not None
            process.stdin.close()
        except BrokenPipeError:
            pass  # what it was not there to read
        self._process = None
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            raise TimeLimitError
        if code == -signal.SIGXFSZ:
            raise OutputLimitError
        raise ProcessDiedError(f"its process ended with code {code}")
