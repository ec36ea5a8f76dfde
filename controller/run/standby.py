"""Stand by while another controller acts on the pod, or hand the run over to a bastion that acts instead.

Who stands by reports which controller acts, watches, and changes nothing. When the other one has gone for good, `up`
says so and takes over. `Handover` creates the bastion, ends a stale one, and releases the lease to it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from importlib.metadata import version
from typing import Any

from controller.context import Context
from controller.core.errors import CloudError, LeaseLostError, SlipwayError
from controller.core.events import BoardScreen
from controller.core.json_documents import DamagedRecordError, dump
from controller.core.this_process import DISTRIBUTION
from controller.emulator import Emulator
from controller.gcp.google_errors import GoogleError
from controller.lease import Lease
from controller.lease_store import LeaseSnapshot
from controller.plan.build import Plan
from controller.reconcile import Absent, among_themselves, reconcile
from controller.records.ledger import Ledger, Result
from controller.recovery.diagnosis import exit_codes
from controller.resources.accounts import BastionRoles
from controller.resources.bastion_vm import Bastion, SlipwayPackage
from controller.resources.machines import SshAccess, WorkerResource
from controller.resources.pod.node import Node, describe
from controller.run.follow import Follower
from controller.ssh.fleet import WorkersFailedError

RECOVERY_POLLS = 6
"""Number of polls that a controller gets to respond to the end of an attempt before we listen to the workers again."""


class StandbyOutcome(Enum):
    """Why watching ended, if the run has no result."""

    LEASE_FREE = auto()
    """The lease is free."""
    DETACHED = auto()
    ENDED = auto()
    """The run was ended on purpose: cancelled, or its pod deleted."""


class LeaderGaveUpError(SlipwayError):
    """The other controller gave up the run; carries its message and exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class FinishedMeanwhileError(LeaseLostError):
    """Another controller finished the run before this one acquired its lease."""

    def __init__(self, result: Result) -> None:
        super().__init__("another controller has finished the run in the meantime")
        self.result = result


class _LeaseChangedError(Exception):
    """The lease has changed."""


@dataclass
class Standby:
    """Viewer of one run that another controller drives."""

    plan: Plan
    context: Context
    ledger: Ledger
    lease: Lease
    screen: BoardScreen
    poll_seconds: float
    _leader: LeaseSnapshot | None = field(default=None)
    _last_message: str = ""
    _last_lease_check: float = 0.0

    @property
    def controls(self) -> str:
        """What the other controller does, for messages."""
        return "controls this pod"

    def watch(self, other: LeaseSnapshot) -> Result | StandbyOutcome:
        """Watch until the run or its controller has ended. Raises LeaderGaveUpError if the run was given up.

        Args:
            other: lease of the controller that acts.
        """
        self._leader = other
        self._note(f"{other.record} {self.controls}; watching, and taking over if it disappears")
        try:
            while True:
                try:
                    ended = self._watch_once()
                except GoogleError as error:
                    if not error.is_transient:
                        raise
                    self._note_once(f"{error}; still watching")  # the lease cannot change hands meanwhile
                    self.context.clock.sleep(self.poll_seconds)
                    continue
                if ended is not None:
                    return ended
        except KeyboardInterrupt:
            self.screen.show_detached()
            return StandbyOutcome.DETACHED

    def _watch_once(self) -> Result | StandbyOutcome | None:
        """Follow the run until something changes; return how watching ends, or None."""
        snapshot = self.lease.read()
        if result := self._result():
            return result
        if snapshot is None or not self.lease.is_held_by_other(snapshot):
            term = snapshot.record if snapshot else None
            if term is None or self._leader is None or term.run_id != self.plan.run_id:
                return StandbyOutcome.LEASE_FREE
            if term.released and term.exit_code is not None:
                if term.exit_code:
                    raise LeaderGaveUpError(term.said, term.exit_code)
                self._note(term.said)
                return StandbyOutcome.ENDED
            gone = "released the pod" if term.released else "stopped responding"
            self._note(f"{term.holder} ({term.driver}) {gone}; taking over")
            return StandbyOutcome.LEASE_FREE
        if snapshot.record.run_id != self.plan.run_id:
            return StandbyOutcome.LEASE_FREE  # the caller reports the controller of the other run
        assert self._leader is not None, "set when watching began"
        if self._leader.record.id != snapshot.record.id:
            self._note(f"now {snapshot.record} {self.controls}")
        self._leader = snapshot
        if self._follow_leader():
            self.screen.show_detached()
            return StandbyOutcome.DETACHED
        return None

    def _result(self) -> Result | None:
        """Return the result; the controller that acts replaces a damaged one when the run finishes."""
        try:
            return self.ledger.result()
        except DamagedRecordError as error:
            self._note_once(f"warning: {error}; still watching")
            return None

    def _follow_leader(self) -> bool:
        """Follow the attempt, or wait a moment if there is none; return whether Ctrl-C was pressed."""
        try:
            node, launches = self.plan.observe_pod(self.context), self.ledger.launches()
            if not (isinstance(node, Node) and node.is_ready and launches and launches[-1].node_uid == node.status.uid):
                if isinstance(node, Absent):
                    self._note_once("the pod does not exist yet")
                else:
                    self._note_once(f"the pod is {describe(node)}")
                self.context.clock.sleep(self.poll_seconds)
                return False
            attempt = launches[-1].attempt
            self.plan.get(SshAccess).authorize_key(self.context, node)
            outcome = Follower(
                context=self.context,
                node=node,
                fleet=node.fleet(self.context),
                run_id=self.plan.run_id,
                attempt=attempt,
                recovery=self.plan.config.recovery,
                exit_codes=exit_codes(self.plan.config.program),
                poll_seconds=self.poll_seconds,
                already_running=True,
                is_leader=False,
                on_tick=self._check_lease,
            ).follow()
        except _LeaseChangedError:
            return False
        except (GoogleError, WorkersFailedError) as error:
            if isinstance(error, GoogleError) and not error.is_transient:
                raise
            self._note_once(f"{error}; still watching")
            self.context.clock.sleep(self.poll_seconds)
            return False
        if outcome is None:
            return True
        holder = self._leader.record.holder if self._leader else "its controller"
        self._note_once(f"{outcome.verdict}; {holder} handles it")
        self._await_recovery(attempt)
        return False

    def _await_recovery(self, attempt: int) -> None:
        """Wait until the controller has responded to the end of an attempt."""
        for _ in range(RECOVERY_POLLS):
            self.context.clock.sleep(self.poll_seconds)
            launches = self.ledger.launches()
            if (
                (launches and launches[-1].attempt != attempt)
                or self._result()
                or self._leader_changed(self.lease.current_other())
            ):
                return

    def _check_lease(self) -> None:
        now = self.context.clock.now()
        if now - self._last_lease_check < self.poll_seconds:
            return
        self._last_lease_check = now
        try:
            snapshot = self.lease.current_other()
        except GoogleError as error:
            if error.is_transient:
                return
            raise
        if self._leader_changed(snapshot):
            raise _LeaseChangedError

    def _leader_changed(self, snapshot: LeaseSnapshot | None) -> bool:
        return snapshot is None or self._leader is None or snapshot.record.token != self._leader.record.token

    def _note_once(self, message: str) -> None:
        if message != self._last_message:
            self._last_message = message
            self._note(message)

    def _note(self, message: str) -> None:
        self.context.events.note(self.plan.run_id, message)


@dataclass
class RemoteStandby(Standby):
    """Viewer of a run that another controller drives on another pod, whose workers it does not follow.

    `lease` is that of the run.
    """

    @property
    def controls(self) -> str:
        pod = self._leader.record.pod if self._leader else ""
        return f"drives this run on the pod {pod}"

    def _follow_leader(self) -> bool:
        self.context.clock.sleep(self.poll_seconds)
        return False


HANDOVER, BASTION_LOG = "handover.json", "bastion.log"
BASTION_HOME = "~/.slipway"
START_TIMEOUT_SECONDS = 1200.0
"""Maximum time until a bastion acts: a boot, and the installation of some packages on a small machine."""
LOG_TAIL_LINES = 20


@dataclass(frozen=True)
class Handover:
    """Handover of a run from this machine to the bastion of its plan."""

    plan: Plan
    context: Context
    ledger: Ledger
    lease: Lease
    emulator: Emulator | None
    poll_seconds: float

    def start_bastion(self, document: Callable[[], dict[str, Any]]) -> int:
        """Create everything except the pod, then the bastion; return the lease token used.

        `document` returns what the bastion rebuilds the plan from; called once the bucket exists.
        """
        first = [r for r in self.plan.resources if not isinstance(r, Node | WorkerResource | Bastion | BastionRoles)]
        reconcile(among_themselves(first), self.context)
        before = self.lease.read()
        token = self.lease.ensure()
        if before is not None and before.record.driver == "bastion" and not before.record.released:
            self.bastion.destroy(self.context)  # the VM may exist although nothing acts there
        self.ledger.write(HANDOVER, dump(document()))
        machine = replace(self.bastion, orders=dump(self._orders()))
        roles = [r for r in self.plan.resources if isinstance(r, BastionRoles)]
        reconcile(among_themselves([machine, *roles]), self.context)
        self.lease.release()
        self.lease.listen()  # nobody holds it while the bastion boots
        return token

    def wait_for_lease(self, token: int) -> LeaseSnapshot:
        """Wait until the bastion has acquired the lease, or even released it again, or somebody else; return the lease.

        Raises CloudError if the bastion ended or did not start in time; the message includes its log.
        """
        late = self.context.clock.deadline(START_TIMEOUT_SECONDS)
        while (snapshot := self.lease.read()) is None or snapshot.record.token <= token:
            gone = isinstance(self.bastion.observe(self.context, {}), Absent)
            if gone or late():
                self.lease.obey_requests()  # whoever ends the run deletes it
                raise CloudError(
                    f"{self.bastion.title} {'ended early' if gone else 'did not start in time'}:\n{self._log_tail()}"
                )
            self.context.clock.sleep(self.poll_seconds)
        return snapshot

    @property
    def bastion(self) -> Bastion:
        return self.plan.get(Bastion)

    def _log_tail(self) -> str:
        kept = self.ledger.read(BASTION_LOG) or b""
        text = self.bastion.serial_output(self.context) or kept.decode(errors="replace")
        return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])

    def _orders(self) -> dict[str, Any]:
        package = self.plan.get(SlipwayPackage)
        emulator = self.emulator
        return {
            "bucket": self.plan.bucket,
            "package": package.object,
            "sha256": package.snapshot.archive_sha256,
            "version": version(DISTRIBUTION),
            "install": emulator is None,
            "handover": f"{self.ledger.prefix}/{HANDOVER}",
            "log": f"{self.ledger.prefix}/{BASTION_LOG}",
            "instance": self.bastion.path(self.context.project),
            "home": BASTION_HOME,
            "roots": {} if emulator is None else emulator.roots,
            "ssh_config": None if emulator is None else str(emulator.ssh_config),
            "iap": None if emulator is None else emulator.iap,
            "pace": self.context.poll_seconds,
        }
