"""Calls that process 0 makes and all processes carry out, so that a plugged-in function can run on process 0 alone."""

import base64
import json
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from trainer.distributed import runtime
from trainer.distributed.preemption import PreemptedError

HEARTBEAT_SECONDS = 60.0
"""Interval of the lines that tell the controller that the program does not hang."""


class EvaluationTimeoutError(BaseException):
    """The time of an evaluation is up. Functions that catch every Exception do not catch it."""


class Calls:
    """The functions of one evaluation that need all processes. Their arguments must be JSON.

    Process 0 uses `call` and then `finish`; the others use `follow`. Every call has the same arguments on every
    process, so all of them compute, or fail, in the same way.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = functions
        self._busy = self._is_late = False
        self._preempted: PreemptedError | None = None

    def call(self, name: str, **arguments: Any) -> Any:
        """Call a function on all processes, and return its result here."""
        self.check()
        self._busy = True
        try:
            _broadcast({"call": name, "arguments": arguments})
            found = self._functions[name](**arguments)
        except PreemptedError as error:
            self._preempted = error
            raise
        finally:
            self._busy = False
        self.check()
        return found

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """Tell the other processes the result of the evaluation."""
        _broadcast({"result": result})
        return result

    def follow(self) -> dict[str, Any]:
        """Carry out the calls of process 0 until the evaluation is over, and return its result."""
        while "result" not in (told := _broadcast({})):
            try:
                self._functions[told["call"]](**told["arguments"])
            except PreemptedError:
                raise
            except Exception:  # noqa: S112 - process 0 has the same one, and reports it
                continue
        return told["result"]

    def check(self) -> None:
        """Raise what ends the evaluation: a preemption, or the end of its time."""
        if self._preempted is not None:
            raise self._preempted
        if self._is_late:
            raise EvaluationTimeoutError

    @contextmanager
    def time_limit(self, name: str, seconds: float) -> Iterator[None]:
        """Interrupt what runs in this block after so many seconds, or after the call that is under way.

        Code in C that never looks for signals is not interrupted; the program then prints nothing, and counts as hung.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # signals reach the main thread only
            return
        began = time.monotonic()

        def tick(*_: object) -> None:
            spent = time.monotonic() - began
            self._is_late = spent >= seconds
            if not self._is_late:
                print(f"evaluation {name} has taken {spent:.0f} of at most {seconds:.0f} s", flush=True)
            elif not self._busy:
                raise EvaluationTimeoutError

        handler = signal.signal(signal.SIGALRM, tick)
        interval = seconds / max(1, round(seconds / HEARTBEAT_SECONDS))
        left = signal.setitimer(signal.ITIMER_REAL, interval, interval)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *left)
            signal.signal(signal.SIGALRM, handler)


def _broadcast(message: dict[str, Any]) -> dict[str, Any]:
    """Return process 0's message on every process."""
    if jax.process_count() == 1:
        return message
    text = base64.b64encode(zlib.compress(json.dumps(message).encode(), 1)).decode() if message else ""
    return json.loads(zlib.decompress(base64.b64decode(runtime.gather_texts(text)[0])))
