"""One request for a slice, from sending to its answer; and every slice that has the pod's name.

A search may hold a request on each plane, so a request does not sleep: it yields the seconds until it looks again. An
abandoned request may yet become a second slice, in another zone.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any

from controller.context import Context
from controller.gcp.answers import poll_compute
from controller.gcp.client import PROPAGATION_SECONDS
from controller.gcp.google_errors import (
    UNREACHABLE,
    ConflictError,
    ForbiddenError,
    GoogleError,
    NotFoundError,
    ServiceDisabledError,
)
from controller.resources.deletions import DeletionPendingError, deletions_here
from controller.resources.pod.capacity_log import SURPLUS, record_answer, record_end, record_surplus
from controller.resources.pod.plane import Plane
from controller.resources.pod.planes import plane_of
from controller.resources.pod.provisioner import (
    WAITING_STATES,
    IsAnswered,
    Place,
    Provisioner,
    ProvisionerName,
    SliceSpec,
    SliceStatus,
    claim_name,
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
                    self._request_service_agent()
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

        Raises:
            GoogleError: there is no answer, because Google or the network has an outage.
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
            self.maker.delete(self.context, self.name, self.place.zone)
        except DeletionPendingError as error:
            self.context.events.note(self.subject, str(error))

    def _request_service_agent(self) -> None:
        """Request the account with which Google creates VMs in the project; usually it makes it by itself."""
        try:
            plane_of(self.place.provisioner).request_service_agent(self.context, self.place.zone)
        except GoogleError as error:
            self.context.events.note(self.subject, f"cannot request the TPU Service Agent: {error}")

    def _refused_wish(self, answer: Refusal) -> str:
        advice = plane_of(self.place.provisioner).advice
        return advice.refused_wish(answer.message, self.spec, self.place.capacity)

    def _classify(self, code: str, message: str) -> RefusalKind:
        return classify(code, message, reserved=self.place.capacity == "reserved")


REQUESTED_FIELDS = frozenset(
    {"accelerator_type", "capacity", "machine_type", "network", "runtime_version", "subnetwork"}
)
"""Fields that show of a request that waits what it will become, where they are not empty."""


@dataclass(frozen=True)
class Slices:
    """Every slice of one name in some zones."""

    name: str
    zones: Sequence[str]
    provisioners: Mapping[ProvisionerName, Provisioner]

    def find(self, context: Context, uids: Collection[str] = (), *, surely: bool = False) -> SliceStatus | None:
        """Return a READY slice if there is one, else one that is coming up, else a dead one.

        A slice with one of the `uids` comes first in any state. Among READY ones, a slice whose deletion is on record
        comes last: the search went on without it. None is sure only with `surely`, which may raise as `_refuse_doubt`.
        """
        found = next(iter(self.ranked(context, uids, all_places=False)), None)
        if found is None and surely:
            self._refuse_doubt(context)
        return found

    def ranked(self, context: Context, uids: Collection[str] = (), *, all_places: bool = True) -> list[SliceStatus]:
        """Return the slices in the order of `find`; without `all_places` only up to the first that nothing precedes."""

        def rank(status: SliceStatus) -> tuple[bool, ...]:
            is_wanted = not uids or status.uid in uids
            return not is_wanted, not status.is_ready, self.is_abandoned(context, status), not status.pending

        found: list[SliceStatus] = []
        for zone, ways in self._where:
            status = next((status for _, status in self._slices_at(context, zone, ways)), None)
            if status is not None:
                found.append(status)
                if not all_places and not any(rank(status)[:3]):
                    break
        found.sort(key=rank)
        if found and found[0].is_under_repair:
            context.fleets.expect_new_host_keys(found[0].uid)
        return found

    def is_abandoned(self, context: Context, status: SliceStatus) -> bool:
        """Return whether the deletion of a slice is on record on this machine."""
        here = (one for one in deletions_here(context, []) if one.pod == self.name)
        return (status.place.zone, status.created) in {(one.zone, one.created_seconds) for one in here}

    def delete(
        self, context: Context, condition: Callable[[SliceStatus], bool], why: str = "deleted", *, surely: bool = False
    ) -> None:
        """Delete every slice that meets the condition; their data disks stay. `why` is for the record of capacity.

        A slice that is given back is on record before, too: a controller that is killed meanwhile leaves its cost. With
        `surely`, where there is none, this raises as `_refuse_doubt`.
        """
        deleted = False
        for zone, ways in self._where:
            for provisioner, status in self._slices_at(context, zone, ways):
                if condition(status):
                    if why == SURPLUS:
                        record_end(context, self.name, status, why)
                    provisioner.delete(context, self.name, zone)
                    record_end(context, self.name, status, why)
                    deleted = True
        if surely and not deleted:
            self._refuse_doubt(context)

    def pod_and_others(self, context: Context, is_managed: Callable[[SliceStatus], bool]) -> list[SliceStatus]:
        """Return the slice that is the pod; on several planes, after it what else a killed search may have left.

        A slice that a run has had is the pod, and never one of the others; nor is one whose deletion is on record.
        """
        found = self.ranked(context, all_places=self.has_several_planes)
        if not self.has_several_planes or not found or not is_managed(found[0]):
            return found[:1]
        there = [status for status in found if status.is_ready or (status.pending and status.uid)]
        used = [status for status in there if len(there) > 1 and self._has_had_run(context, status)]
        if used and not any(status.is_ready for status in used):
            return used[:1]  # Google is repairing it; nothing is asked for or given back until it is READY
        best = next(iter(used), found[0])
        others = [
            status for status in found
            if status not in (best, *used) and (status.is_ready or status.pending) and status.state != "DELETING"
            and is_managed(status) and not self.is_abandoned(context, status)
        ]  # fmt: skip
        return [best, *others]

    def give_back(self, context: Context, surplus: Sequence[SliceStatus]) -> None:
        """Delete what a search that was killed has left beside the pod."""
        where = {(other.place.zone, other.place.provisioner) for other in surplus}
        for other in surplus:
            what = f"what is {state_text(other.state)} in {other.place}"
            context.events.note(f"node/{self.name}", f"giving back {what}: the pod is there")
        try:
            self.delete(context, lambda other: (other.place.zone, other.place.provisioner) in where, why=SURPLUS)
        except DeletionPendingError as error:  # it is on record, and so none of the pod's from now on
            context.events.note(f"node/{self.name}", str(error))

    def _has_had_run(self, context: Context, status: SliceStatus) -> bool:
        """Return whether a run has claimed a slice."""
        if not context.bucket:
            return False
        name = claim_name(self.name, status.uid)
        try:
            context.google.call("storage", "objects.get", bucket=context.bucket, object=name)
        except NotFoundError:
            return False
        return True

    @property
    def has_several_planes(self) -> bool:
        return len(self._ways_by_plane) > 1

    @property
    def _where(self) -> list[tuple[str, list[ProvisionerName]]]:
        """Return each zone with each plane."""
        return list(product(self.zones, self._ways_by_plane))

    def unknown(self, context: Context) -> list[str]:
        """Return the places where Google refused to say at the last look whether the pod is there.

        A refusal that lasts longer than new rights need is no longer one: the place is closed to the caller.
        """
        places = [hidden_place(zone, plane_of(ways[0])) for zone, ways in self._where]
        begin = context.clock.now() - PROPAGATION_SECONDS
        return [place for place in places if context.refused_since.get(place, begin) > begin]

    def _refuse_doubt(self, context: Context) -> None:
        """Raise a transient GoogleError if a place is unknown."""
        if unknown := self.unknown(context):
            words = f"Google does not show {' and '.join(unknown)} now"
            raise GoogleError(f"look for {self.name}", 503, "REFUSED", words)

    @property
    def _ways_by_plane(self) -> list[list[ProvisionerName]]:
        """Return the names of the provisioners, grouped by plane."""
        return [list(names) for _, names in groupby(self.provisioners, plane_of)]

    def _slices_at(
        self, context: Context, zone: str, ways: Sequence[ProvisionerName]
    ) -> Iterator[tuple[Provisioner, SliceStatus]]:
        """Yield what one plane has in a zone; nothing where Google refuses to say so, which `unknown` tells then."""
        place, is_refused = hidden_place(zone, plane_of(ways[0])), False
        for provisioner in (self.provisioners[name] for name in ways):
            try:
                status = provisioner.observe(context, self.name, zone)
            except (ForbiddenError, ServiceDisabledError) as error:
                if len(self._where) == 1:
                    raise
                is_refused = True
                context.refused_since.setdefault(place, context.clock.now())
                if isinstance(error, ForbiddenError) and place not in context.permission_denied:
                    context.permission_denied.add(place)  # closed to the project, or to the caller
                    context.events.note(f"node/{self.name}", f"cannot look for {place}: {error.message}")
                continue
            if status is not None:
                context.refused_since.pop(place, None)
                yield provisioner, status
        if not is_refused:
            context.permission_denied.discard(place)
            context.refused_since.pop(place, None)


def differs_where_known(status: SliceStatus, wanted: Mapping[str, Any]) -> bool:
    """Return whether a request that waits is one for another slice than the wanted one."""
    seen = status.spec.at(status.place)
    differing = {name for name in REQUESTED_FIELDS if seen.get(name) and seen[name] != wanted.get(name)}
    if seen["workers"] not in (0, wanted["workers"]):  # of a group whose VMs are not complete yet
        differing -= {"accelerator_type"}
    return bool(differing)


def hidden_place(zone: str, plane: Plane) -> str:
    """Return the entry of `Context.permission_denied` for pods of a plane in a zone, which the caller may not see."""
    return f"TPUs of {plane.title} in {zone}"
