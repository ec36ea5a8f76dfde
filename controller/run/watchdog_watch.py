"""Looks after the watchdog of a pod while its run is followed: whether it lives, and whether Google refuses it."""

import threading
from collections.abc import Callable

from controller.agent.protocol import WATCHDOG_STATE
from controller.agent.watchdog_protocol import WatchdogState
from controller.context import Context
from controller.core.errors import LeaseLostError, SlipwayError
from controller.core.this_process import InterruptedSleepError
from controller.lease import LeaseHeldError
from controller.resources.pod.node import Node
from controller.ssh.fleet import Fleet

LOOK_SECONDS = 30.0
"""Interval of the looks: what is wrong is said within a minute."""


class WatchdogWatch:
    """Asks worker 0 in a thread of its own, so that a worker that does not answer holds up nothing."""

    def __init__(self, context: Context, node: Node, fleet: Fleet, start_again: Callable[[], bool]) -> None:
        """Prepare it; `start_again` starts the watchdog unless its time is up, and raises SlipwayError if it cannot."""
        self._context, self._node, self._fleet, self._start_again = context, node, fleet, start_again
        self._is_due = context.clock.deadline(LOOK_SECONDS)
        self._look: threading.Thread | None = None
        self._state: WatchdogState | None = None
        self._said = ""

    def tick(self) -> None:
        """Look if it is time; act on what the last look has found.

        Raises LeaseLostError if another controller has the pod.
        """
        if self._look is not None and not self._look.is_alive():
            self._look, self._is_due = None, self._context.clock.deadline(LOOK_SECONDS)
            if self._state is not None:
                self._judge(self._state)
        if self._look is None and self._is_due():
            self._state = None
            self._look = threading.Thread(target=self._ask, daemon=True, name="watchdog")
            self._look.start()

    def _ask(self) -> None:
        try:
            [answer] = self._fleet.call_all(WATCHDOG_STATE, {}, workers=[0])
        except (SlipwayError, InterruptedSleepError):  # an interrupt ends the run in the thread that follows it
            return
        self._state = answer if isinstance(answer, dict) else None

    def _judge(self, state: WatchdogState) -> None:
        if not state["running"]:
            self._restart()
        elif state["refused"]:
            self._say(f"warning: the pod should be gone, but Google refuses its watchdog: {state['refused']}")
        else:
            self._said = ""

    def _restart(self) -> None:
        try:
            started = self._start_again()
        except (LeaseHeldError, LeaseLostError):
            raise
        except SlipwayError as error:
            rest = "only this controller, and the dead man's switch if the pod has one, end the pod at its limit"
            self._say(f"warning: the pod's watchdog has died and does not start again, so {rest}: {error}")
            return
        if started:
            self._context.events.note(self._node.id, "warning: the pod's watchdog had died; it is started again")

    def _say(self, message: str) -> None:
        if message != self._said:
            self._said = message
            self._context.events.note(self._node.id, message)
