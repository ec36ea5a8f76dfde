"""Search for capacity: where to ask for a pod, and when to ask again.

Zones, tiers and planes are tried in order; places that lately granted such a slice come first. After a stock-out, the
next place is tried at once; after the last one, the search pauses and starts over. A missing quota or permission rules
its place out. Any other refusal ends the search on that plane.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.context import Context
from controller.core.clock import InterruptedSleepError
from controller.core.errors import CloudError, RetriesExhaustedError
from controller.core.formats import FormatError
from controller.gcp.client import PROPAGATION_SECONDS
from controller.gcp.errors import ConflictError, GoogleError
from controller.gcp.operations import wait_compute
from controller.resources.pod import data_disk
from controller.resources.pod.capacity_log import (
    RECENT_SECONDS,
    CapacityEntry,
    fetch_entries,
    load_entries,
    recent_places_first,
    record_answer,
)
from controller.resources.pod.pending_deletion import DeletionPendingError
from controller.resources.pod.planes import label_places, plane_of, waits_in_queue
from controller.resources.pod.provisioner import (
    WAITING_STATES,
    Place,
    Provisioner,
    ProvisionerName,
    SliceSpec,
    SliceStatus,
)
from controller.resources.pod.refusals import HINTS, RULES_OUT_PLACE, Refusal, RefusalKind, classify

MAX_PAUSE_SECONDS = 60
"""Longest pause in units of the context's pace: five minutes on Google Cloud."""

FIRST_WAIT_SECONDS = 300.0
"""Longest wait in a queue in the first round of a search on several planes: another one may have capacity now."""
MAX_INTERNAL_ERRORS = 5
"""Internal errors at Google in a row that end a search."""


def backoff_seconds(round_: int, poll_seconds: float, draw: float) -> float:
    """Return the wait after a number of failed rounds (from 1): exponential, capped, with jitter `draw` in [0, 1)."""
    return poll_seconds * min(MAX_PAUSE_SECONDS, 2.0**round_) * (0.5 + draw / 2)


@dataclass(frozen=True)
class CapacitySearch:
    """One search for capacity for one pod."""

    context: Context
    subject: str
    title: str
    name: str
    specs: Mapping[ProvisionerName, SliceSpec]
    places: Sequence[Place]
    provisioners: Mapping[ProvisionerName, Provisioner]
    max_attempts: int
    create_seconds: float

    def run(self, after: Place | None = None) -> None:
        """Ask until the pod exists.

        Args:
            after: start with the place that follows this one, which has been tried already.

        Raises:
            RetriesExhaustedError: no capacity after `max_attempts`.
            CloudError: a refusal that no retry would change.
        """
        attempt, rounds, internal = 0, 0, 0
        ruled_out: dict[Place, Refusal] = {}
        ordered = self._ordered_places()
        places = _rotate_after(ordered, after)
        while True:
            for place in places:
                if place in ruled_out:
                    continue
                attempt += 1
                if attempt > self.max_attempts:
                    self._give_up()
                if len(self.places) > 1:
                    self.context.events.note(self.subject, f"requesting {self._type} in {self._label(place)}")
                refusal = self._try_until_visible(place, self._patience(rounds))
                if refusal is None:
                    return
                internal = internal + 1 if refusal.kind == "internal" else 0
                self._handle_refusal(place, refusal, ruled_out, attempt, internal)
            if len(ruled_out) == len(self.places):
                raise CloudError(self._all_ruled_out(ruled_out))
            places = ordered
            rounds += 1
            if attempt >= self.max_attempts:
                self._give_up()
            seconds = backoff_seconds(rounds, self.context.poll_seconds, self.context.random_float())
            message = f"retrying in {seconds:.0f} s (attempt {attempt + 1} of {self.max_attempts})"
            self.context.events.note(self.subject, message)
            self.context.clock.sleep(seconds)

    def _ordered_places(self) -> Sequence[Place]:
        """Return the places in the order in which to try them; see `recent_places_first`."""
        context, now = self.context, self.context.clock.now()
        if len({(place.zone, plane_of(place.provisioner).title) for place in self.places}) == 1:
            return self.places
        entries: list[CapacityEntry] = []
        try:
            entries = load_entries(context.state_dir)
            if context.bucket:
                entries = fetch_entries(context, context.bucket, now - RECENT_SECONDS)
        except (GoogleError, FormatError) as error:  # without a memory, the order is that of the config
            context.events.note(self.subject, f"the bucket's record of capacity is not used: {error}")
        mine = [entry for entry in entries if entry.project == context.project]
        return recent_places_first(self.places, self._type, mine, now)

    def _handle_refusal(
        self, place: Place, refusal: Refusal, ruled_out: dict[Place, Refusal], attempt: int, internal: int
    ) -> None:
        """Note a refusal that leaves other places or times. Raises CloudError for any other one."""
        if refusal.kind == "stock_out" or (refusal.kind == "internal" and internal < MAX_INTERNAL_ERRORS):
            what = "no capacity" if refusal.kind == "stock_out" else "an error at Google"
            self.context.events.note(
                self.subject, f"{what} in {self._label(place)} (attempt {attempt}): {_first_sentence(refusal.message)}"
            )
        elif refusal.kind in RULES_OUT_PLACE or self._plane_count > 1:
            alike = [place] if refusal.kind in RULES_OUT_PLACE else self._same_plane(place)
            ruled_out |= dict.fromkeys(alike, refusal)
            if len(ruled_out) < len(self.places):
                what = "no quota" if refusal.kind == "quota" else "ruled out:"
                self.context.events.note(self.subject, f"{what} in {self._label(place)}: {refusal.message}")
        else:
            raise CloudError(f"{self.name} in {place}: {refusal.message}; {refusal.hint}")

    @property
    def _type(self) -> str:
        return next(iter(self.specs.values())).accelerator_type

    @property
    def _plane_count(self) -> int:
        return len({plane_of(place.provisioner).title for place in self.places})

    def _same_plane(self, place: Place) -> list[Place]:
        plane = plane_of(place.provisioner)
        return [other for other in self.places if plane_of(other.provisioner) == plane]

    def _label(self, place: Place) -> str:
        return dict(zip(self.places, label_places(self.places), strict=True))[place]

    def _all_ruled_out(self, ruled_out: Mapping[Place, Refusal]) -> str:
        words = "; ".join(f"{self._label(place)}: {refusal.message}" for place, refusal in ruled_out.items())
        hints = "; ".join(dict.fromkeys(refusal.hint for refusal in ruled_out.values()))
        if {refusal.kind for refusal in ruled_out.values()} == {"quota"}:
            return f"no quota for {self._type}: {words}; {hints}"
        return f"{self.name} in {words}; {hints}"

    def _try_until_visible(self, place: Place, patience: float) -> Refusal | None:
        """Ask in one place, again and again while Google does not see a new account or role everywhere."""
        late, told = self.context.clock.deadline(PROPAGATION_SECONDS), False
        while (refusal := self._try(place, patience)) is not None and refusal.kind == "propagating" and not late():
            if not told:
                self.context.events.note(self.subject, f"waiting until Google sees new rights: {refusal.message}")
                if "Service Agent" in refusal.message:
                    self._request_service_agent(place)
            told = True
            self.context.clock.sleep(self.context.poll_seconds)
        return refusal

    def _request_service_agent(self, place: Place) -> None:
        """Request the account with which Google creates VMs in the project; usually it makes it by itself."""
        try:
            plane_of(place.provisioner).request_service_agent(self.context, place.zone)
        except GoogleError as error:
            self.context.events.note(self.subject, f"cannot request the TPU Service Agent: {error}")

    def _try(self, place: Place, patience: float) -> Refusal | None:
        """Ask in one place and wait; returns None on success. A refused request leaves nothing behind."""
        context, name, maker = self.context, self.name, self.provisioners[place.provisioner]
        spec = self.specs[place.provisioner]
        fresh, asked = False, context.clock.now()
        try:
            if spec.data_disk_gb is not None:
                disk = data_disk.name_for(name)
                operation = data_disk.request_disk(context, disk, place.zone, spec.data_disk_gb, spec.data_disk_kind)
                if fresh := operation is not None:
                    wait_compute(context, operation)
            maker.create(context, name, spec, place)
            answer = self._wait(maker, place, patience)
        except InterruptedSleepError:
            if waits_in_queue(place):
                message = "the request stays in the queue: `slipway up` resumes waiting, `slipway down` cancels it"
                self.context.events.note(self.subject, message)
            raise
        except ConflictError as error:
            kind = self._classify(place, error)
            if kind == "name_taken":
                return None  # created by someone else meanwhile; the next observation shows by whom
            answer = Refusal(kind, error.message)
        except GoogleError as error:
            kind = self._classify(place, error)
            if error.is_transient and kind in ("unknown", "internal"):
                raise  # not a refusal: Google or the network has an outage
            answer = Refusal(kind, error.message)
            if error.status == 0:  # the operation began and may have left something
                self._delete(maker, place)
        refusal = answer if isinstance(answer, Refusal) else None
        if refusal is not None and fresh:
            data_disk.delete_disk(context, data_disk.name_for(name), place.zone)
        if refusal is None or refusal.kind != "propagating":  # that one is no answer yet
            record_answer(context, name, spec, place, asked, answer)
        return refusal

    def _wait(self, maker: Provisioner, place: Place, patience: float) -> Refusal | SliceStatus:
        """Return the READY slice, or why there is none after `patience` seconds in a queue."""
        context = self.context
        late, too_late = context.clock.deadline(patience), context.clock.deadline(patience + self.create_seconds)
        told = ""
        while True:
            current = maker.observe(context, self.name, place.zone)
            if current is None:
                return Refusal("stock_out", "the requested pod has disappeared")
            if not current.pending:
                break
            if too_late() or (late() and current.state in WAITING_STATES):
                self._delete(maker, place)
                return Refusal("stock_out", f"still {_state_text(current.state)} after {patience:.0f} s")
            if len(self.places) > 1 and current.message and self._has_no_capacity(current, place):
                self._delete(maker, place)
                return Refusal("stock_out", current.message)
            if current.state != told:
                told = current.state
                message = f"{self._label(place)}: {_state_text(told)}"
                context.events.emit("step_started", self.subject, message, title=self.title)
            context.clock.sleep(context.poll_seconds)
        if current.is_ready:
            return current
        self._delete(maker, place)
        return refusal_of_state(current, reserved=place.capacity == "reserved")

    def _delete(self, maker: Provisioner, place: Place) -> None:
        """Delete what a refused request left. One that Google does not delete yet is on record: the search goes on."""
        try:
            maker.delete(self.context, self.name, place.zone)
        except DeletionPendingError as error:
            self.context.events.note(self.subject, str(error))

    def _has_no_capacity(self, current: SliceStatus, place: Place) -> bool:
        """Return whether Google says that a request which it keeps has no capacity now."""
        return classify(current.code, current.message, reserved=place.capacity == "reserved") == "stock_out"

    def _classify(self, place: Place, error: GoogleError) -> RefusalKind:
        return classify(error.reason, error.message, reserved=place.capacity == "reserved")

    def _patience(self, rounds: int) -> float:
        """Return for how many seconds a queued request may wait in one place, after so many complete rounds."""
        if self._plane_count > 1 and rounds == 0:
            return min(FIRST_WAIT_SECONDS, self.create_seconds)
        if len(self.places) > 1:
            return self.create_seconds
        return next(iter(self.specs.values())).valid_until_seconds or float("inf")

    def _give_up(self) -> None:
        where = ", ".join(label_places(self.places))
        raise RetriesExhaustedError(
            f"no capacity for {self._type} in {where} after {self.max_attempts} attempts; {HINTS['stock_out']}"
        )


def refusal_of_state(current: SliceStatus, *, reserved: bool) -> Refusal:
    """Return the refusal that corresponds to a failed request."""
    if current.state == "FAILED" and current.message:
        return Refusal(classify(current.code, current.message, reserved=reserved), current.message)
    return Refusal("stock_out", f"the request is {current.state.lower()}")


def _state_text(state: str) -> str:
    """Format a state such as WAITING_FOR_RESOURCES in lower-case words."""
    return state.lower().replace("_", " ")


def _first_sentence(message: str) -> str:
    """Return the useful part of Google's message, without the advice and the error id that follow."""
    return message.partition(";")[0].partition(" [EID")[0]


def _rotate_after(places: Sequence[Place], after: Place | None) -> Sequence[Place]:
    if after is None or after not in places:
        return places
    at = list(places).index(after) + 1
    return [*places[at:], *places[:at]]
