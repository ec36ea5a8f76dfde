"""Preemption of this VM: all processes save after the same update, and exit.

The notice is SIGTERM, from the agent, which watches the VM's metadata server, or from a VM shutdown. One notified
process is enough. JAX's coordination service makes all agree independently of the computation: a check costs a
microsecond on the host and never affects results.
https://docs.jax.dev/en/latest/_autosummary/jax.experimental.multihost_utils.reached_preemption_sync_point.html
"""

import os
import signal
import threading
import time
from typing import Any, Self

import jax

PREEMPTED_EXIT_CODE = 75
"""Exit code after a preemption with saved state: EX_TEMPFAIL of sysexits.h."""
HOLD_VARIABLE = "TRAINER_HOLD_AT_STEP"
"""Environment variable for drills: the first attempt of a run waits before its next update after that step."""
HOLD_SECONDS = 0.1
"""Interval at which a waiting process asks again whether a notice has come."""


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
        while not self._sync_point_reached():
            if not _is_held(step):
                return False
            time.sleep(HOLD_SECONDS)
            self._num_polls += 1
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


def _is_held(step: int) -> bool:
    """Return whether this attempt waits here for a preemption, as `slipway witness` asks its first one to."""
    return os.environ.get("SLIPWAY_ATTEMPT") == "1" and os.environ.get(HOLD_VARIABLE) == str(step)
