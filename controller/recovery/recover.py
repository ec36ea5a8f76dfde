"""Execute what `responses.py` decides when an attempt has failed, and record it."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from controller.agent.protocol import STACKS, STOP, Stacks, State, StopRequest
from controller.checks.fit import suggested_overrides
from controller.context import Context
from controller.core.errors import (
    ProgramFailedError,
    RetriesExhaustedError,
    SlipwayError,
    WorkersDisagreeError,
    WrongDevicesError,
)
from controller.core.text import object_url
from controller.gcp.google_errors import GoogleError
from controller.gcp.outages import OutageLimit
from controller.plan.build import Plan
from controller.reconcile import Absent, Pending
from controller.records.ledger import Ledger
from controller.records.spending import Spending, watchdog_note
from controller.recovery import responses
from controller.recovery.diagnosis import diagnose, workers_and
from controller.recovery.responses import AttemptOutcome, Observation, Verdict, VerdictKind, WorkerStatus, code_text
from controller.recovery.watches import log_excerpt
from controller.resources.pod.node import Node
from controller.resources.pod.provisioner import PodStatus
from controller.ssh.fleet import DiskFullError, Fleet, WorkerError

MAX_PAUSES = 6
"""Number of polls to pause before another try while nothing is reachable."""
ERRORS_BY_KIND: dict[VerdictKind, type[SlipwayError]] = {
    VerdictKind.DEVICE_MISMATCH: WrongDevicesError,
    VerdictKind.WORKERS_DISAGREE: WorkersDisagreeError,
}
HINTS = {
    VerdictKind.OUT_OF_HBM: "`slipway fit` shows what fits; try a smaller loop.micro_batch_size, model.remat=full, "
    "a mesh that splits the weights over more chips (mesh.fsdp), or a larger tpu.accelerator_type",
    VerdictKind.OUT_OF_RAM: "use fewer loader processes, a smaller read-ahead, or hosts with more memory per chip",
    VerdictKind.DISK_FULL: "delete files that the program leaves there, write to the bucket, or attach a data disk "
    "(tpu.data_disk_gb)",
    VerdictKind.DEVICE_MISMATCH: "tpu.accelerator_type, tpu.runtime_version and the program must agree on the devices",
    VerdictKind.CORRUPTION: "get other hardware: `slipway down`, then `up`, which resumes from the last checkpoint; "
    "data that are not the same at every reading need checkpoint.verify_data=false",
    VerdictKind.WORKERS_DISAGREE: "`slipway verify` shows where code, config, packages and data differ",
}
SETUP_DISK_HINT = (
    "delete files there (`slipway ssh --worker N`), get fresh disks with `slipway down`, attach a data disk "
    "(tpu.data_disk_gb), or set env.min_free_gb to what the setup needs, so that this is found first"
)
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')


@dataclass
class RecoveryExecutor:
    """Executes the responses of one `up`; incidents of earlier ones count too."""

    plan: Plan
    context: Context
    ledger: Ledger
    spending: Spending
    poll_seconds: float
    end_pod: Callable[[], None]
    """Deletes the pod of a run that was given up, and ends its time."""
    _incidents: list[responses.Incident] | None = field(default=None)
    _waiting_since: float | None = None
    _incident_recorded: bool = False
    """Whether the incident being handled is recorded already."""
    _outage: OutageLimit | None = None
    """How long Google has not answered; None while it does."""

    def respond(self, outcome: AttemptOutcome, attempt: int, error: SlipwayError | None = None) -> None:
        """Make the next attempt possible.

        `error` is the reason why the program was not launched, if it was not.

        Raises:
            SlipwayError: the run is given up; the error itself, or one whose exit code tells the reason.
            CloudError: Google has answered nothing else for `checkpoint.max_outage_hours`.
        """
        self._incident_recorded = False
        if attempt:  # it was launched, with a record in the bucket
            self._outage = None
        while True:
            try:
                return self._respond(outcome, attempt, error)
            except GoogleError as unreachable:  # deciding offline could decide twice
                if unreachable is error or not unreachable.is_transient:
                    raise
                self._give_up_without_records(outcome, attempt, unreachable)
                self._check_outage(unreachable)
                message = f"Google's API does not respond ({unreachable.message}); waiting"
                self.context.events.note(self.plan.run_id, message)
                self.context.clock.sleep(MAX_PAUSES * self.poll_seconds)

    def _give_up_without_records(self, outcome: AttemptOutcome, attempt: int, error: GoogleError) -> None:
        """Give up a run whose program has ended for good whatever the records say: its pod waits for no bucket.

        One that may be restarted waits: the workers' disks may hold checkpoints that the bucket has not taken.
        """
        if not attempt or outcome.verdict.kind is VerdictKind.HUNG:  # it is stopped first, under the lease
            return
        recovery = self.plan.config.recovery
        decision = responses.decide(outcome.verdict, (), None, recovery, responses.PodCapabilities())
        if decision.response == responses.GIVE_UP:
            self.context.google.hurry()
            self.context.events.note(self.plan.run_id, f"warning: the failure is not on record: {error}")
            self._give_up(outcome, decision, None)

    def _check_outage(self, error: GoogleError) -> None:
        """Raise CloudError if Google has not answered for longer than the program on the workers goes on."""
        if self._outage is None:
            hours = self.plan.config.checkpoint.max_outage_hours
            self._outage = OutageLimit(self.context.clock, object_url(self.plan.bucket), hours)
        self._outage.check(error)

    def _respond(self, outcome: AttemptOutcome, attempt: int, error: SlipwayError | None) -> None:
        verdict = outcome.verdict
        if verdict.kind is VerdictKind.NETWORK_LOST:  # nothing can be looked up or recorded
            if self.plan.config.recovery.policy.network_lost == responses.GIVE_UP:
                raise error or ProgramFailedError(f"{verdict}; the run continues without this controller")
            if isinstance(error, GoogleError):
                self._check_outage(error)
            self.context.events.note(self.plan.run_id, f"{verdict}; waiting")
            self.context.clock.sleep(MAX_PAUSES * self.poll_seconds)
            return
        self.context.before_pod_write()
        past, progress = self._load_incidents(), max(self.ledger.checkpoints(), default=outcome.step)
        past = past[:-1] if self._incident_recorded else past
        decision = responses.decide(verdict, past, progress, self.plan.config.recovery, self._pod_capabilities(verdict))
        if decision.response == responses.WAIT and error is not None and not self._wait_timed_out():
            # The reconciler waits for a node that is being repaired.
            self.context.events.note(self.plan.run_id, f"{verdict}; waiting")
            self.context.clock.sleep(self.poll_seconds)
            return
        self._waiting_since = None
        response = responses.REPLACE_NODE if decision.response == responses.WAIT else decision.response
        self._record_incident(responses.Incident(
            attempt, verdict.kind.value, str(verdict), response, progress, self.context.clock.now(), verdict.evidence,
            verdict.worker if verdict.kind is VerdictKind.CORRUPTION else None,
        ))  # fmt: skip
        places = self._save_stacks(attempt, verdict) if verdict.kind is VerdictKind.HUNG else []
        if response == responses.GIVE_UP:
            self._give_up(outcome, decision, error, places)
        # pods delete themselves when they are idle or the budget is spent
        for life in self.spending.lifetimes():
            word = watchdog_note(self.context.google, self.plan.bucket, life.pod, life.uid) if not life.ended else {}
            if word:
                self.context.events.note(self.plan.run_id, f"the pod deleted itself: {word['reason']}")
        if not self.spending.budget_exceeded():
            message = f"{verdict}; {responses.describe(response, verdict)}"
            self.context.events.note(self.plan.run_id, message, attempt=attempt, verdict=verdict.kind.value)
        self._act(response, verdict)

    def diagnose_setup(self, error: SlipwayError) -> Verdict:
        """Return the verdict on a failed setup of the workers."""
        if isinstance(error, GoogleError) and not error.is_transient:  # the call failed because the pod was taken away
            pod = self._pod()
            return diagnose(
                Observation(pod if pod and pod.state != "ABSENT" else PodStatus(), (), setup_error=f"{error}")
            )
        if isinstance(error, GoogleError):
            return Verdict(VerdictKind.NETWORK_LOST, ("Google's API does not respond", str(error)))
        failed = (error,) if isinstance(error, WorkerError) else getattr(error, "errors", ())
        of = {e.worker: e for e in failed}
        agent_spoke = {worker for worker, e in of.items() if e.kind in ("agent", "auth", "denied", "host_key")}
        workers = tuple(
            WorkerStatus(unreachable=i in of and i not in agent_spoke, error=of[i].message if i in agent_spoke else "")
            for i in range(self.plan.node.spec.workers)
        )
        found: dict[str, Any] = {}
        if isinstance(error, WrongDevicesError):
            found = {"wrong_devices": True, "devices": error.devices, "faulty": error.faulty}
        found["disk_full"] = isinstance(error, DiskFullError)
        details = "".join(f"\n{e.detail}" for e in failed)
        return diagnose(Observation(self._pod(), workers, setup_error=f"{error}", setup_details=details, **found))

    def _wait_timed_out(self) -> bool:
        """Return whether waiting has lasted as long as creating a pod may take."""
        now = self.context.clock.monotonic()
        self._waiting_since = self._waiting_since or now
        return now - self._waiting_since >= self.plan.node.create_seconds

    def _act(self, response: str, verdict: Verdict) -> None:
        """Put the pod into a state from which `up` makes the next attempt."""
        if (pod := self._pod()) is None:
            return  # nothing can be done yet: the next attempt starts with it
        ready = pod.state == "READY"
        if response == responses.MOVE_ZONE:
            self.spending.close_billing(verdict.summary)
            self.plan.node.delete_all(self.context, elsewhere=True)
        elif response == responses.REPLACE_NODE or not ready:  # the reconciler replaces a pod that is not READY
            self.spending.close_billing(verdict.summary)
            if ready:
                self.plan.node.delete_all(self.context)
        elif response == responses.RESTART_WORKER:
            self._node().stop(self.context)
        elif response == responses.RESTART_PROGRAM and not verdict.whole_pod:
            self._stop_programs()

    def _stop_programs(self) -> None:
        payload: StopRequest = {"run_id": self.plan.run_id, "grace_seconds": 5.0}
        self._fleet().call_all(STOP, payload)  # the next attempt handles unreachable workers

    def _give_up(
        self,
        outcome: AttemptOutcome,
        decision: responses.Decision,
        error: SlipwayError | None,
        places: Sequence[str] = (),
    ) -> NoReturn:
        """Raise the final error: the worker concerned, its last output and the matching exit code.

        `places` says where the programs hang.
        """
        verdict = outcome.verdict
        if verdict.kind is VerdictKind.HUNG:  # a program that goes on would keep the pod, and its bill, alive
            self._stop_programs()
        if self.plan.config.cleanup.on_failure == "delete":
            self.end_pod()
        if error is not None and verdict.kind is VerdictKind.DISK_FULL and not isinstance(error, DiskFullError):
            raise DiskFullError(f"{verdict}; to fix: {SETUP_DISK_HINT}", getattr(error, "errors", ())) from error
        if error is not None:
            raise error
        if decision.retries_exhausted:
            raise RetriesExhaustedError(f"{decision.reason}; last failure: {verdict}")
        said = [self._headline(outcome), *([decision.reason] if decision.reason else []), *places]
        ends = dict(outcome.ends)
        if verdict.worker in ends:
            said.append(log_excerpt(ends[verdict.worker]["log_tail"], ends[verdict.worker]["code"]))
        if fix := self._hint(verdict.kind):
            said.append(f"to fix: {fix}")
        logs = f"{object_url(self.plan.bucket, self.ledger.prefix)}/logs/"
        said.append(f"logs: {logs}; fix the cause, then run the same command again")
        raise ERRORS_BY_KIND.get(verdict.kind, ProgramFailedError)("\n".join(said))

    def _headline(self, outcome: AttemptOutcome) -> str:
        verdict, ends = outcome.verdict, dict(outcome.ends)
        if verdict.worker not in ends:
            return str(verdict)
        others: dict[str, list[int]] = defaultdict(list)
        for worker in sorted(ends):
            if worker != verdict.worker and ends[worker]["code"] != 0:
                others[_exit_description(ends[worker])].append(worker)
        after = [workers_and(f"{how} after it", who) for how, who in others.items()]
        end = ends[verdict.worker]
        first = f"{verdict.kind.label}: worker {verdict.worker} {_exit_description(end)}; it failed first"
        together = verdict.kind is VerdictKind.CORRUPTION  # all workers exit, whichever is at fault
        if end["signal"] == "SIGABRT" or together or not verdict.ended:  # JAX aborts all of them; or we stopped it
            first = str(verdict)
        return "\n".join([first, *(["; ".join(after)] if after else [])])

    def _hint(self, kind: VerdictKind) -> str:
        """Return a hint for the user; out of HBM, with the overrides that `slipway fit` found, if any."""
        found = suggested_overrides(self.plan.config) if kind is VerdictKind.OUT_OF_HBM else ""
        return f"set {found}: it fits, as `slipway fit` found" if found else HINTS.get(kind, "")

    def _save_stacks(self, attempt: int, verdict: Verdict) -> list[str]:
        """Dump the stacks of all reachable workers to the bucket while their programs are alive.

        Returns:
            For each worker or group of workers, where its program is.
        """
        fleet = self._fleet()
        who = [i for i in range(len(fleet)) if i not in verdict.unreachable]
        answers = fleet.call_all(STACKS, {"run_id": self.plan.run_id, "attempt": attempt}, workers=who)
        places: dict[str, list[int]] = defaultdict(list)
        for worker, answer in zip(who, answers, strict=True):
            if not isinstance(answer, dict):
                places[str(answer.message)].append(worker)
                continue
            self.ledger.write(f"stacks/attempt-{attempt}/worker-{worker}.txt", _as_text(answer))
            places[innermost_frame(answer)].append(worker)
        lines = [f"worker {', '.join(map(str, workers))}: {place}" for place, workers in places.items()]
        for line in lines:
            self.context.events.note(self.plan.run_id, line)
        folder = f"{object_url(self.plan.bucket, self.ledger.prefix)}/stacks/attempt-{attempt}/"
        self.context.events.note(self.plan.run_id, f"stacks: {folder}")
        return [*lines, f"stacks: {folder}"]

    def _pod_capabilities(self, verdict: Verdict) -> responses.PodCapabilities:
        node = self.plan.node
        gone = verdict.kind is VerdictKind.PREEMPTED and not verdict.from_notice
        if gone or verdict.kind is VerdictKind.NETWORK_LOST:  # the reconciler checks who owns the pod
            return responses.PodCapabilities(places=len(node.places))
        try:
            current = node.observe(self.context, {})
        except GoogleError:
            return responses.PodCapabilities(places=len(node.places))
        restarts = isinstance(current, Node) and current.is_ready and not current.cannot_stop
        ours = not isinstance(current, Node) or current.is_managed
        return responses.PodCapabilities(ours and not node.adopt, restarts and not node.adopt, len(node.places))

    def _load_incidents(self) -> list[responses.Incident]:
        if self._incidents is None:
            self._incidents = self.ledger.incidents(responses.Incident.from_json)
        return self._incidents

    def _record_incident(self, incident: responses.Incident) -> None:
        past = self._load_incidents()
        if self._incident_recorded:
            return
        self.ledger.add_incident(incident.to_json())
        past.append(incident)
        self._incident_recorded = True

    def _pod(self) -> PodStatus | None:
        try:
            return self.plan.node.pod_seen(self.context)
        except GoogleError as error:
            if not error.is_transient:
                raise
            return None

    def _node(self) -> Node:
        current = self.plan.observe_pod(self.context)
        if isinstance(current, Absent | Pending):
            raise ProgramFailedError(f"{self.plan.node.title} no longer exists")
        return current

    def _fleet(self) -> Fleet:
        return self._node().fleet(self.context)


def innermost_frame(answer: Stacks) -> str:
    """Return the innermost frame of the main thread, whose stack comes last in a dump, on one line."""
    stopped = [p for p in answer["processes"] if p["state"].startswith("T")]
    frames = list(FRAME.finditer(answer["text"].rpartition("most recent call first")[2]))
    file = "/".join(frames[0]["file"].split("/")[-2:]) if frames else ""
    at = f"{frames[0]['name']} ({file}:{frames[0]['line']})" if frames else ""
    if stopped:
        return f"stopped by a signal{f', in {at}' if at else ''}"
    names = ", ".join(sorted({f"{p['name']}: {p['state']}" for p in answer["processes"]}))
    return f"in {at}" if at else names or "no program"


def _as_text(answer: Stacks) -> str:
    rows = [
        f"{p['pid']} {p['name']} {p['state']} {p['waits_in']} {p['signal'] or 'no signal'}" for p in answer["processes"]
    ]
    return "\n".join([*rows, answer["text"]])


def _exit_description(end: State) -> str:
    if end["signal"]:
        return f"was terminated by {end['signal']}"
    return f"exited with {code_text(end['code'])}" if end["code"] is not None else f"was lost ({end['error']})"
