"""Preemption of this VM: all processes save after the same update, and exit.

The notice is SIGTERM, from the agent, which watches the VM's metadata server, or from a VM shutdown. One notified
process is enough. JAX's coordination service makes all agree independently of the computation: a check costs a
microsecond on the host and never affects results.
https://docs.jax.dev/en/latest/_autosummary/jax.experimental.multihost_utils.reached_preemption_sync_point.html
"""

import signal
import threading
from typing import Any, Self

import jax

PREEMPTED_EXIT_CODE = 75
"""Exit code after a preemption with saved state: EX_TEMPFAIL of sysexits.h."""


class PreemptedError(Exception):
    """Raised on all processes after the same update, once their state is saved."""


class PreemptionNotice:
    """Context manager that listens for the notice; with several processes JAX does so once they have joined."""

    def __init__(self) -> None:
        self._num_polls, self._received = 0, False
        self._previous_handler: Any = None

    def should_stop(self, step: int) -> bool:
        """Return whether all processes should save after `step` updates and exit.

        All must call it at the same points of the program, as often as they like, and get the same result there. Only
        after a notice does a caller wait for processes that are behind.
        """
        self._num_polls += 1
        if not self._sync_point_reached():
            return False
        if jax.process_index() == 0:
            print(f"received a preemption notice: saving a checkpoint after update {step}, then exiting", flush=True)
        return True

    def _sync_point_reached(self) -> bool:
        if jax.process_count() == 1:
            return self._received
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        return reached_preemption_sync_point(self._num_polls)

    def __enter__(self) -> Self:
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)

    def _on_signal(self, *_: object) -> None:
        self._received = True
