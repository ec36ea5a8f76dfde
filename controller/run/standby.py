"""An `up` while another controller acts on the pod: it says who does, watches, and changes nothing.

When the other one has gone for good, it says so, and the `up` goes on in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from controller.context import Context
from controller.core.errors import SlipwayError
from controller.core.ui import Screen
from controller.gcp.client import GoogleError
from controller.lease.lease import Lease
from controller.lease.store import Seen
from controller.plan.build import Plan
from controller.reconcile.resource import Absent, Pending
from controller.records.ledger import Launch, Ledger, Result
from controller.resources.pod.node import Node, describe
from controller.resources.workers.ssh_access import SshAccess
from controller.run.follow import Follower
from controller.ssh.fleet import WorkersFailed

REST_POLLS = 6
"""After the end of an attempt its controller is given so many polls until the workers are listened to again."""


class Left(Enum):
    """Why there is nothing to watch any more, where the run has no result."""

    FREE = auto()
    """The lease can be had."""
    DETACHED = auto()
    ENDED = auto()
    """On purpose: cancelled, or its pod deleted."""


class Ended(SlipwayError):
    """The other controller has given up the run; its words, and its exit code."""

    def __init__(self, words: str, exit_code: int) -> None:
        super().__init__(words)
        self.exit_code = exit_code


class _Changed(Exception):
    """The lease is not what it was."""


@dataclass
class Beside:
    """`up` as a viewer of one run."""

    plan: Plan
    world: Context
    ledger: Ledger
    lease: Lease
    screen: Screen
    poll_seconds: float
    _holder: Seen | None = field(default=None)
    _told: str = ""
    _asked: float = 0.0

    def watch(self, other: Seen) -> Result | Left:
        """Until the run has ended, or its controller has.

        Args:
            other: who acts.

        Raises:
            Ended: the run was given up.
        """
        self._holder = other
        self._note(f"{other.term} acts on this pod; watching, and taking over should that one be gone")
        try:
            while True:
                seen = self.lease.last()
                if result := self.ledger.result():
                    return result
                if seen is None or not self.lease.is_others(seen):
                    return self._after(seen)
                if seen.term.run_id != self.plan.run_id:
                    return Left.FREE  # of this run; whoever asks is told of the other
                if self._holder.term.id != seen.term.id:
                    self._note(f"now {seen.term} acts on this pod")
                self._holder = seen
                if self._look_on():
                    self.screen.show_detached()
                    return Left.DETACHED
        except KeyboardInterrupt:
            self.screen.show_detached()
            return Left.DETACHED

    def _after(self, last: Seen | None) -> Left:
        """What becomes of us now that nobody has the lease, by what its last holder has left there."""
        term = last.term if last else None
        if term is None or self._holder is None or term.run_id != self.plan.run_id:
            return Left.FREE
        if term.released and term.exit_code is not None:
            if term.exit_code:
                raise Ended(term.said, term.exit_code)
            self._note(term.said)
            return Left.ENDED
        gone = "has let go" if term.released else "has not been heard of any more"
        self._note(f"{term.holder} ({term.driver}) {gone}; taking over")
        return Left.FREE

    def _look_on(self) -> bool:
        """Follow what there is to follow, or wait a moment; whether Ctrl-C was pressed."""
        try:
            node, launches = self.plan.observe_pod(self.world), self.ledger.launches()
            if not (isinstance(node, Node) and node.is_ready and _is_on(node, launches)):
                self._tell_of(node)
                self.world.clock.sleep(self.poll_seconds)
                return False
            attempt = launches[-1].attempt
            self.plan.get(SshAccess).let_in(self.world, node)
            outcome = Follower(
                world=self.world,
                node=node,
                fleet=self.world.fleet(node),
                run_id=self.plan.run_id,
                attempt=attempt,
                recovery=self.plan.config.recovery,
                poll_seconds=self.poll_seconds,
                begun=True,
                acting=False,
                glance=self._glance,
            ).follow()
        except _Changed:
            return False
        except (GoogleError, WorkersFailed) as error:
            if isinstance(error, GoogleError) and not error.passes:
                raise
            self._tell(f"{error}; still watching")
            self.world.clock.sleep(self.poll_seconds)
            return False
        if outcome is None:
            return True
        holder = self._holder.term.holder if self._holder else "its controller"
        self._tell(f"{outcome.verdict}; {holder} sees to it")
        self._rest(attempt)
        return False

    def _rest(self, attempt: int) -> None:
        """Until the controller has done something about the end of an attempt."""
        for _ in range(REST_POLLS):
            self.world.clock.sleep(self.poll_seconds)
            launches = self.ledger.launches()
            if launches[-1].attempt != attempt or self.ledger.result() or self._is_other(self.lease.look()):
                return

    def _glance(self) -> None:
        now = self.world.clock.now()
        if now - self._asked < self.poll_seconds:
            return
        self._asked = now
        try:
            seen = self.lease.look()
        except GoogleError as error:
            if error.passes:
                return
            raise
        if self._is_other(seen):
            raise _Changed

    def _is_other(self, seen: Seen | None) -> bool:
        return seen is None or self._holder is None or seen.term.token != self._holder.term.token

    def _tell_of(self, node: Absent | Pending | Node) -> None:
        if isinstance(node, Absent):
            self._tell("there is no pod yet")
        else:
            self._tell(f"the pod is {describe(node)}")

    def _tell(self, words: str) -> None:
        """Say what is new."""
        if words != self._told:
            self._told = words
            self._note(words)

    def _note(self, words: str) -> None:
        self.world.events.note(self.plan.run_id, words)


def _is_on(node: Node, launches: list[Launch]) -> bool:
    return bool(launches) and launches[-1].node_uid == node.status.uid
