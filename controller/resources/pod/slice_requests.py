"""One request for a slice, from sending to its answer.

A search may hold a request on each plane, so a request does not sleep: it yields the seconds until it looks again. An
abandoned request may yet become a second slice, in another zone.
"""

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from controller.context import Context
from controller.gcp.answers import poll_compute
from controller.gcp.client import PROPAGATION_SECONDS
from controller.gcp.google_errors import UNREACHABLE, ConflictError, GoogleError
from controller.resources.deletions import DeletionPendingError
from controller.resources.pod.capacity_log import record_answer, record_surplus
from controller.resources.pod.planes import plane_of
from controller.resources.pod.provisioner import (
    WAITING_STATES,
    IsAnswered,
    Place,
    Provisioner,
    SliceSpec,
    SliceStatus,
    data_disk_name,
    delete_disk,
    request_disk,
    state_text,
)
from controller.resources.pod.refusals import Refusal, RefusalKind, classify

Answer = Refusal | SliceStatus | None
"""None: something of the pod's name exists already; the next observation shows whose it is."""


@dataclass(kw_only=True)
class Ask:
    """One request for a slice in one place.

    Attributes:
        label: the place, for the user.
        moves_on: this plane has another place to try, so a lack of capacity is a refusal.
        is_watched: there is any other place to try, so its state is looked at even before Google has answered.
        asked: when it was sent; seconds since the epoch.
        state: as last seen; '' before the first look.
        changed: when that state was first seen; monotonic seconds.
    """

    context: Context
    subject: str
    title: str
    label: str
    name: str
    spec: SliceSpec
    place: Place
    maker: Provisioner
    create_seconds: float
    moves_on: bool
    is_watched: bool
    asked: float = field(default=0.0, init=False)
    state: str = field(default="", init=False)
    changed: float = field(default=0.0, init=False)
    _is_sent: bool = field(default=False, init=False)
    _is_accepted: bool = field(default=False, init=False)
    _has_fresh_disk: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.changed = self.context.clock.monotonic()

    @property
    def waits(self) -> bool:
        """Whether Google keeps the request and has no capacity for it yet."""
        return self.state in WAITING_STATES

    @property
    def held(self) -> SliceStatus | None:
        """What Google has accepted and not answered, for another `answer`."""
        if not self._is_accepted:
            return None
        return SliceStatus(spec=self.spec, place=self.place, state=self.state, name=self.name, created=self.asked)

    def answer(self, patience: float, found: SliceStatus | None = None) -> Generator[float, None, Answer]:
        """Send the request and wait for its answer; again and again while Google does not see new rights everywhere.

        Args:
            patience: seconds that it may wait for capacity.
            found: what another controller has requested in this place; then no request is sent.
        """
        if found is not None:
            self.asked, self._is_sent, self._is_accepted = found.created, True, True
            return (yield from self._settled(self._wait(patience, None)))
        late, told = self.context.clock.deadline(PROPAGATION_SECONDS), False
        while True:
            answer = yield from self._settled(self._send(patience))
            if isinstance(answer, Refusal) and (wish := self._refused_wish(answer)):
                self.context.events.note(
                    self.subject, f"{self.label}: asking again without {wish}, which Google refuses: {answer.message}"
                )
                self.spec = replace(self.spec, without=self.spec.without | {wish})
                continue
            if not isinstance(answer, Refusal) or answer.kind != "propagating" or late():
                return answer
            if not told:
                self.context.events.note(self.subject, f"waiting until Google sees new rights: {answer.message}")
                if "Service Agent" in answer.message:
                    try:
                        plane_of(self.place.provisioner).request_service_agent(self.context, self.place.zone)
                    except GoogleError as error:
                        self.context.events.note(self.subject, f"cannot request the TPU Service Agent: {error}")
            told = True
            yield self.context.poll_seconds

    def give_back(self) -> None:
        """Delete the request, or the slice that has come of it, because the pod has come from another place.

        A slice is on record before, too: a controller that is killed meanwhile leaves its cost.
        """
        if not self._is_sent:
            return
        found = self.maker.observe(self.context, self.name, self.place.zone)
        has_slice = found is not None and bool(found.uid) and found.state not in WAITING_STATES
        what = "slice" if has_slice else "request"
        self.context.events.note(self.subject, f"giving back the {what} in {self.label}: the pod is there")
        given = found if has_slice else None
        if given is not None:
            record_surplus(self.context, self.name, self.spec, self.place, self.asked, given)
        self._delete()
        record_surplus(self.context, self.name, self.spec, self.place, self.asked, given)

    def _settled(self, steps: Generator[float, None, Refusal | SliceStatus]) -> Generator[float, None, Answer]:
        """Wait for the answer and record it. A refused request leaves nothing behind.

        Raises GoogleError if there is no answer, because Google or the network has an outage.
        """
        context = self.context
        try:
            answer = yield from steps
        except ConflictError as error:
            kind = self._classify(error.reason, error.message)
            if kind == "name_taken":
                return None
            answer = Refusal(kind, error.message)
        except GoogleError as error:
            kind = self._classify(error.reason, error.message)
            if error.is_transient and (self._is_accepted or error.reason == UNREACHABLE):
                raise  # not a refusal: what was accepted is still there
            if error.status >= 500 and kind == "unknown":
                kind = "internal"  # whether it comes as an answer or by an operation
            answer = Refusal(kind, error.message)
            if error.status == 0:  # the operation began and may have left something
                self._delete()
            elif error.status >= 500:  # so may the request; what an outage keeps from being deleted holds the name
                with suppress(GoogleError):
                    self._delete()
        if isinstance(answer, Refusal):
            self._is_sent = self._is_accepted = False
            if self._has_fresh_disk:
                delete_disk(context, data_disk_name(self.name), self.place.zone)
            if answer.kind == "propagating" or self._refused_wish(answer):
                return answer  # that one is no answer yet
        record_answer(context, self.name, self.spec, self.place, self.asked, answer)
        return answer

    def _send(self, patience: float) -> Generator[float, None, Refusal | SliceStatus]:
        context, spec, zone = self.context, self.spec, self.place.zone
        self.asked, self._has_fresh_disk = context.clock.now(), False
        if spec.data_disk_gb is not None:
            disk = data_disk_name(self.name)
            operation = request_disk(context, disk, zone, spec.data_disk_gb, spec.data_disk_kind)
            if operation is not None:
                self._has_fresh_disk = True
                is_made = poll_compute(context, operation, self.create_seconds)
                while not is_made():
                    yield context.poll_seconds
        self._is_sent = True
        is_answered = self.maker.create(context, self.name, spec, self.place)
        self._is_accepted = True
        return (yield from self._wait(patience, is_answered))

    def _wait(self, patience: float, is_answered: IsAnswered | None) -> Generator[float, None, Refusal | SliceStatus]:
        """Return the READY slice, or why there is none after `patience` seconds in a queue."""
        context = self.context
        rest = patience - max(0.0, context.clock.now() - self.asked)
        late, too_late = context.clock.deadline(rest), context.clock.deadline(rest + self.create_seconds)
        told = ""
        while True:
            done = is_answered is None or is_answered()
            current = None
            if done or self.is_watched:
                current = self.maker.observe(context, self.name, self.place.zone)
            if current is None and done:
                return Refusal("stock_out", "the requested pod has disappeared")
            if current is not None:
                if current.state != self.state:
                    self.state, self.changed = current.state, context.clock.monotonic()
                if done and not current.pending:
                    break
                if done and current.endpoints and current.running_since and not self.waits:
                    seconds = context.clock.monotonic() - self.changed
                    if seconds > self.create_seconds:  # its VMs run, so there was capacity
                        self._delete()
                        return Refusal(
                            "internal", f"its VMs run, but it is still {state_text(self.state)} after {seconds:.0f} s"
                        )
                elif too_late() or (late() and self.waits):
                    self._delete()
                    return Refusal("stock_out", f"still {state_text(current.state)} after {patience:.0f} s")
                # Google keeps the request, and says that there is no capacity for it now.
                if self.moves_on and current.message and self._classify(current.code, current.message) == "stock_out":
                    self._delete()
                    return Refusal("stock_out", current.message)
                if current.state != told and current.pending:
                    told = current.state
                    message = f"{self.label}: {state_text(told)}"
                    context.events.emit("step_started", self.subject, message, title=self.title)
            yield context.poll_seconds
        if current.is_ready:
            return current
        self._delete()
        if current.state == "FAILED" and current.message:
            return Refusal(self._classify(current.code, current.message), current.message)
        return Refusal("stock_out", f"the request is {current.state.lower()}")

    def _delete(self) -> None:
        """Delete what a request left. One that Google does not delete yet is on record: the search goes on."""
        try:
            self.maker.delete(self.context, self.name, self.place.zone, is_hurried=True)
        except DeletionPendingError as error:
            self.context.events.note(self.subject, str(error))

    def _refused_wish(self, answer: Refusal) -> str:
        advice = plane_of(self.place.provisioner).advice
        return advice.refused_wish(answer.message, self.spec, self.place.capacity)

    def _classify(self, code: str, message: str) -> RefusalKind:
        return classify(code, message, reserved=self.place.capacity == "reserved")
