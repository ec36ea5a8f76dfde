"""Ends a JAX program at once after an uncaught exception, so that its exit does not wait for the other processes.

Python imports a module of this name at start-up; the agent puts this folder on the PYTHONPATH of a user's program. At
exit, JAX waits five minutes for the other processes, which in turn wait for this one in a collective. Therefore, once
`jax.distributed` is initialized, an uncaught exception or a `sys.exit` with an error ends the process without JAX's
exit handler; all other exit handlers run first, for at most `EXIT_SECONDS`. An exception in a thread does not end a
Python program, and does not here. `recovery.exit_on_exception=false` turns this off.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import sys
import threading
from types import TracebackType
from typing import NoReturn

EXIT_SECONDS = 10.0


def _is_distributed() -> bool:
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return getattr(state, "client", None) is not None


def _exit_now(code: int) -> None:
    """Run all exit handlers except JAX's, and end the process even if they hang."""
    timer = threading.Timer(EXIT_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    wait_for_others = getattr(sys.modules.get("jax._src.api"), "clean_up", None)
    if wait_for_others is not None:
        atexit.unregister(wait_for_others)
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:  # the disk of the log may be full
        os._exit(code)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    if _is_distributed() and issubclass(kind, Exception):  # not KeyboardInterrupt
        _exit_now(1)


class _Exit(SystemExit):
    """The exception of `sys.exit`. If nothing catches it, it is deleted when no Python frame is left."""

    def __del__(self) -> None:
        if sys is None or self.code in (None, 0) or not _is_distributed():
            return
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            sys._getframe(1)
        except ValueError:  # called by the interpreter itself, which is about to end
            try:
                if not isinstance(self.code, int):
                    print(self.code, file=sys.stderr)
            finally:
                _exit_now(self.code if isinstance(self.code, int) else 1)


def _exit(status: object = None, /) -> NoReturn:
    """Exit Python by raising SystemExit, as `sys.exit` does."""
    raise _Exit(status)


def _import_shadowed() -> None:
    """Run the `sitecustomize` of the user or of the image, which this one hides."""
    own = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would slow down every start
    path = [folder for folder in sys.path if os.path.abspath(folder) != own]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.excepthook = _excepthook
    sys.exit = _exit  # type: ignore[assignment]
    _import_shadowed()
