"""A notice that this VM will go away: all processes save after the same update, and end.

The notice is SIGTERM, of the agent, which watches the VM's metadata server, or of a VM that is shut down. One process
that has it is enough. JAX's coordination service makes all agree, beside whatever they compute: to ask costs a
microsecond of the host, and nothing of a result depends on it.
https://docs.jax.dev/en/latest/_autosummary/jax.experimental.multihost_utils.reached_preemption_sync_point.html
"""

from __future__ import annotations

import signal
import threading
from typing import Any, Self

import jax

PREEMPTED_EXIT_CODE = 75
"""Exit code of a program that was told to go and has saved what it had: EX_TEMPFAIL of sysexits.h."""


class PreemptedError(Exception):
    """Raised on all processes after the same update, once what they had is saved."""


class PreemptionNotice:
    """Listens while it is entered; in a run of several processes JAX does so, from when they have met."""

    def __init__(self) -> None:
        self._asked, self._told = 0, False
        self._previous_handler: Any = None

    def agreed(self, step: int) -> bool:
        """Shall all processes save what they have after `step` updates, and end?

        All must ask at the same places of the program, as often as they like, and are told the same there. Only after a
        notice does who asks wait for another one that is behind.
        """
        self._asked += 1
        if not self._sync_point_reached():
            return False
        if jax.process_index() == 0:
            print(f"a notice that the VM goes away: saving after update {step}, then ending", flush=True)
        return True

    def _sync_point_reached(self) -> bool:
        if jax.process_count() == 1:
            return self._told
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        return reached_preemption_sync_point(self._asked)

    def __enter__(self) -> Self:
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)

    def _take(self, *_: object) -> None:
        self._told = True
