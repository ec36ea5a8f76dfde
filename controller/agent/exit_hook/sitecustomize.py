"""What JAX lacks in a program that Slipway runs: an end that waits for nobody, and a start without a pod.

Python imports a module of this name at start-up; the agent puts this folder on the PYTHONPATH of a user's program.

At exit, JAX waits five minutes for the other processes, which in turn wait for this one in a collective. Therefore,
once `jax.distributed` is initialized, an uncaught exception or a `sys.exit` with an error ends the process without
JAX's exit handler; all other exit handlers run first, for at most `EXIT_SECONDS`. An exception in a thread does not end
a Python program, and does not here. `recovery.exit_on_exception=false` turns this off: `SLIPWAY_EXIT_HOOK=0`.

With `SLIPWAY_ONE_PROCESS`, on `cloud=here`, `jax.distributed.initialize()` without arguments makes a cluster of this
process alone. JAX asks classes of clusters whether they are there; no variable of the environment tells it the number
of processes.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import socket
import sys
import threading
from types import ModuleType, TracebackType
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


class _OneProcess:
    """Adds to JAX, once it is imported, a cluster of this process alone, which is asked before all others."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of JAX's clusters, as the other finders find it, and nothing else's."""
        if name != "jax._src.clusters":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_add(module: ModuleType) -> None:
                load(module)
                self._add_to(module)

            spec.loader.exec_module = load_and_add  # type: ignore[method-assign]
        return spec

    def _add_to(self, clusters: ModuleType) -> None:
        def address(*_: object, **__: object) -> str:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                found = f"127.0.0.1:{free.getsockname()[1]}"
            os.environ["JAX_COORDINATOR_BIND_ADDRESS"] = found  # by default it listens on all interfaces
            return found

        answers = {"is_env_present": True, "get_process_count": 1, "get_process_id": 0, "get_local_process_id": None}
        methods = {name: staticmethod(lambda answer=answer: answer) for name, answer in answers.items()}
        methods["get_coordinator_address"] = staticmethod(address)
        known = clusters.ClusterEnv._cluster_types
        made = type("OneProcess", (clusters.ClusterEnv,), {"name": "slipway", **methods})
        known.remove(made)
        known.insert(0, made)


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
    if os.environ.get("SLIPWAY_EXIT_HOOK") != "0":
        sys.excepthook = _excepthook
        sys.exit = _exit  # type: ignore[assignment]
    if os.environ.get("SLIPWAY_ONE_PROCESS"):
        sys.meta_path.insert(0, _OneProcess())
    _import_shadowed()
