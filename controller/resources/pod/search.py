"""Search for capacity: where to ask for a pod, and when to ask again.

Zones, tiers and planes are tried in order; places that lately granted such a slice come first. After a stock-out, the
next place is tried at once; after the last one, the search pauses and starts over. A missing quota or permission rules
its place out. Any other refusal ends the search on that plane.

Each plane has its own round of places. While a request waits in a queue of one plane, the places of the other one are
asked too; the first slice that is READY is the pod, and the other request is given back. An outage of one plane does
not end the search as long as the other one answers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from controller.context import Context
from controller.core.errors import CloudError, RetriesExhaustedError
from controller.core.json_documents import UnreadableError, dump, load
from controller.core.this_process import InterruptedSleepError
from controller.gcp.client import PROPAGATION_SECONDS
from controller.gcp.google_errors import GoogleError
from controller.reconcile import VanishedError
from controller.resources.pod.capacity_log import (
    RECENT_SECONDS,
    CapacityEntry,
    fetch_entries,
    load_entries,
    recent_places_first,
)
from controller.resources.pod.planes import label_places, plane_of, waits_in_queue
from controller.resources.pod.provisioner import Place, Provisioner, ProvisionerName, SliceSpec, SliceStatus
from controller.resources.pod.refusals import HINTS, RULES_OUT_PLACE, Refusal
from controller.resources.pod.slice_requests import Answer, Ask
from controller.resources.pod.slices import Slices, hidden_place

MAX_PAUSE_SECONDS = 60
"""Longest pause in units of the context's pace: five minutes on Google Cloud."""
ALONE_POLLS = 12
"""How long another plane is not asked beside a request, in the same units: it may be granted at once. A minute."""
FIRST_WAIT_SECONDS = 300.0
"""Longest wait in a queue while there are places not asked yet, in a search on several planes."""
FIRST_PROGRESS_SECONDS = 300.0
"""How long no other plane is asked beside a request that Google has begun to serve: most are granted by then."""
SILENT_POLLS = 12
"""How long a plane that does not answer is left alone, in the same units, while another one answers: a minute."""
MAX_INTERNAL_ERRORS = 5
"""Internal errors at Google in a row that end a search."""


@dataclass
class _Round:
    """The places of one plane, asked one after another.

    Attributes:
        ordered: its places; `first` is their order in the first round.
        found: what another controller has requested at the first of them.
        ask: the request that is under way, or the one that ended the search.
        answer: to the last request.
        wakes: when it goes on, as `_Progress.slept`.
        turn: greater than those of the rounds that went on before.
        is_silent: its last request failed, and not by an answer: the plane has an outage.
    """

    plane: str
    ordered: Sequence[Place]
    first: Sequence[Place]
    found: SliceStatus | None = None
    ask: Ask | None = None
    answer: Answer = None
    wakes: float = 0.0
    turn: int = 0
    is_silent: bool = False
    steps: Iterator[float] = field(default_factory=lambda: iter(()))


@dataclass
class _Progress:
    """What all planes of a search have in common. `slept`: for how many seconds the search has slept."""

    rounds: list[_Round] = field(default_factory=list[_Round])
    attempt: int = 0
    internal: int = 0
    slept: float = 0.0
    ruled_out: dict[Place, Refusal] = field(default_factory=dict[Place, Refusal])


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

    def run(self, after: Place | None = None, found: Sequence[SliceStatus] = ()) -> None:
        """Ask until the pod exists; a pod that turns up where Google did not show it before ends the search.

        Args:
            after: start with the place that follows this one, which has been tried already.
            found: what another controller has requested and waits; at most one of each plane is waited for.

        Raises:
            RetriesExhaustedError: no capacity after `max_attempts`.
            CloudError: a refusal that no retry would change.
        """
        if self._appears():
            return
        progress = self._begin(after, found)
        live = list(progress.rounds)
        try:
            while live:
                ended = self._go_on(live, progress)
                if ended is None:
                    continue
                live.remove(ended)
                if ended.ask is not None:
                    if isinstance(ended.answer, SliceStatus):
                        # Delete what the other planes hold: a slice bills from the moment it is READY.
                        for ask in (one.ask for one in live if one.ask is not None):
                            ask.give_back()
                    return
        except InterruptedSleepError:
            asks = [one.ask for one in live if one.ask is not None]
            if any(waits_in_queue(ask.place) for ask in asks):
                message = "the request stays in the queue: `slipway up` resumes waiting, `slipway down` cancels it"
                self.context.events.note(self.subject, message)
            raise
        if len(progress.ruled_out) == len(self.places):
            raise CloudError(self._all_ruled_out(progress.ruled_out))
        where = ", ".join(label_places(self.places))
        raise RetriesExhaustedError(
            f"no capacity for {self._type} in {where} after {self.max_attempts} attempts; {HINTS['stock_out']}"
        )

    def _appears(self) -> bool:
        """Wait while a place where the pod may be is unknown; return whether something turns up in one of them.

        The places that stay closed are on record, for the next search.
        """
        context, told = self.context, False
        slices = Slices(self.name, list(dict.fromkeys(place.zone for place in self.places)), self.provisioners)
        file = context.state_dir / "closed_places" / f"{context.project.replace(':', '_')}.json"
        with suppress(OSError, UnreadableError, TypeError, ValueError):  # then they are waited for again
            known = load(file.read_bytes(), str(file))
            for place in context.refused_since.keys() & known:
                context.refused_since[place] = min(context.refused_since[place], float(known[place]))
        while unknown := slices.unknown(context):
            if not told:
                minutes = f"{PROPAGATION_SECONDS / 60:g} minutes"
                what = f"the pod may be among the {' and the '.join(unknown)}, which Google does not show"
                context.events.note(
                    self.subject, f"{what}: none is created before they are seen, or {minutes} are over"
                )
                told = True
            context.clock.sleep(context.poll_seconds)
            seen = [hidden_place(one.place.zone, plane_of(one.place.provisioner)) for one in slices.ranked(context)]
            if {*unknown} & {*seen}:
                return True
        if context.refused_since or file.exists():
            context.local_notes.write(file, dump(dict(context.refused_since)))
        return False

    def _begin(self, after: Place | None, found: Sequence[SliceStatus]) -> _Progress:
        """Return the rounds of all planes, in the order of their first places."""
        ordered, progress = self._ordered_places(), _Progress()
        first = _rotate_after(ordered, after)
        for title in dict.fromkeys(plane_of(place.provisioner).title for place in first):
            mine = [place for place in ordered if plane_of(place.provisioner).title == title]
            one = _Round(title, mine, [place for place in first if place in mine])
            held = next((status for status in found if plane_of(status.place.provisioner).title == title), None)
            if held is not None:
                _hold(one, held)
            one.steps = self._walk(one, progress)
            progress.rounds.append(one)
        return progress

    def _go_on(self, live: Sequence[_Round], progress: _Progress) -> _Round | None:
        """Let the round whose time comes first go on, and return it if it has ended. Sleeps until then."""
        one = min(live, key=lambda each: (each.wakes, each.turn))
        if one.wakes > progress.slept:
            self.context.clock.sleep(one.wakes - progress.slept)
            progress.slept = one.wakes
        one.turn = 1 + max(each.turn for each in live)
        try:
            seconds = next(one.steps, None)
        except GoogleError as error:
            others = [other for other in live if other is not one]
            if not error.is_transient or self._takes_turns or all(other.is_silent for other in others):
                raise
            seconds = self._outlast(one, progress, error)
        else:
            one.is_silent = False
        if seconds is None:
            return one
        one.wakes = progress.slept + seconds
        return None

    def _outlast(self, one: _Round, progress: _Progress, error: GoogleError) -> float:
        """Let a round go on after an outage of its plane, with what it holds there; return in how many seconds."""
        if not one.is_silent:
            message = f"{one.plane} does not answer ({error.message}); trying again while the search goes on elsewhere"
            self.context.events.note(self.subject, message)
        one.is_silent = True
        if one.ask is not None and one.ask.held is not None:
            _hold(one, one.ask.held)
        elif one.ask is not None:
            one.ask, progress.attempt = None, progress.attempt - 1
        one.steps = self._walk(one, progress)
        return SILENT_POLLS * self.context.poll_seconds

    def _walk(self, one: _Round, progress: _Progress) -> Iterator[float]:
        """Ask in the places of one plane, round after round. Ends with `one.ask` if the pod exists, else without."""
        context, places, rounds = self.context, one.first, 0
        while True:
            for place in places:
                if place in progress.ruled_out:
                    continue
                while one.found is None and any(map(self._is_left_alone, progress.rounds)):
                    yield context.poll_seconds
                yield from self._ask(one, place, progress, rounds)
                if not isinstance(one.answer, Refusal):
                    return
                one.ask = None
                progress.internal = progress.internal + 1 if one.answer.kind == "internal" else 0
                self._handle_refusal(place, one.answer, progress)
                if progress.attempt >= self.max_attempts:
                    return
                yield 0.0
            if all(place in progress.ruled_out for place in one.ordered):
                return
            places, rounds = one.ordered, rounds + 1
            # exponential, capped, with jitter
            seconds = context.poll_seconds * min(MAX_PAUSE_SECONDS, 2.0**rounds) * (0.5 + context.random_float() / 2)
            where = f"{one.plane}: " if len(progress.rounds) > 1 else ""
            message = f"{where}retrying in {seconds:.0f} s (attempt {progress.attempt + 1} of {self.max_attempts})"
            context.events.note(self.subject, message)
            yield seconds

    def _ask(self, one: _Round, place: Place, progress: _Progress, rounds: int) -> Iterator[float]:
        """Ask in one place, or go on waiting for what was found there; sets `one.ask` and `one.answer`."""
        found, one.found = one.found, None
        if found is None:
            progress.attempt += 1
            if len(self.places) > 1:
                self.context.events.note(self.subject, f"requesting {self._type} in {self._label(place)}")
        one.ask = Ask(
            context=self.context,
            subject=self.subject,
            title=self.title,
            label=self._label(place),
            name=self.name,
            spec=self.specs[place.provisioner],
            place=place,
            maker=self.provisioners[place.provisioner],
            create_seconds=self.create_seconds,
            moves_on=self._moves_on(one),
            is_watched=len(self.places) > 1,
        )
        one.answer = yield from one.ask.answer(self._patience(one, rounds), found)

    def _is_left_alone(self, one: _Round) -> bool:
        """Return whether no other plane shall be asked beside a request: it may just be about to be granted.

        Two slices cannot have the same data disk, so a request with one is always left alone.
        """
        if one.ask is None or one.is_silent:
            return False
        limit = ALONE_POLLS * self.context.poll_seconds if one.ask.waits else FIRST_PROGRESS_SECONDS
        return self._takes_turns or self.context.clock.monotonic() - one.ask.changed < limit

    @property
    def _takes_turns(self) -> bool:
        """Whether only one plane is asked at a time."""
        return self._plane_count > 1 and any(spec.data_disk_gb is not None for spec in self.specs.values())

    def _moves_on(self, one: _Round) -> bool:
        """Return whether a place without capacity is left: there is another one, or another plane has its turn."""
        return len(one.ordered) > 1 or self._takes_turns

    def _patience(self, one: _Round, rounds: int) -> float:
        """Return for how many seconds a queued request may wait in one place, after so many complete rounds."""
        if self._moves_on(one):
            is_first = self._plane_count > 1 and rounds == 0
            return min(FIRST_WAIT_SECONDS, self.create_seconds) if is_first else self.create_seconds
        return self.specs[one.ordered[0].provisioner].valid_until_seconds or float("inf")

    def _handle_refusal(self, place: Place, refusal: Refusal, progress: _Progress) -> None:
        """Note a refusal that leaves other places or times.

        Raises:
            VanishedError: the network is gone, and what the pod needs is to be looked at again.
            CloudError: nothing is left to try.
        """
        internal = refusal.kind == "internal" and progress.internal < MAX_INTERNAL_ERRORS
        if refusal.kind == "stock_out" or internal:
            what = "an error at Google" if internal else "no capacity"
            useful = refusal.message.partition(";")[0].partition(" [EID")[0]  # advice and the error's id follow
            said = f"(attempt {progress.attempt}): {useful}"
            self.context.events.note(self.subject, f"{what} in {self._label(place)} {said}")
        elif refusal.kind == "network":
            raise VanishedError(f"{self.name} in {place}: {refusal.message}; {self._hint(place, refusal)}")
        elif refusal.kind in RULES_OUT_PLACE or self._plane_count > 1:
            by_place = refusal.kind in RULES_OUT_PLACE
            progress.ruled_out |= dict.fromkeys([place] if by_place else self._same_plane(place), refusal)
            if len(progress.ruled_out) < len(self.places):
                what = "no quota" if refusal.kind == "quota" else "ruled out:"
                self.context.events.note(self.subject, f"{what} in {self._label(place)}: {refusal.message}")
        else:
            raise CloudError(f"{self.name} in {place}: {refusal.message}; {self._hint(place, refusal)}")

    def _same_plane(self, place: Place) -> list[Place]:
        plane = plane_of(place.provisioner)
        return [one for one in self.places if plane_of(one.provisioner) == plane]

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
        except (GoogleError, OSError) as error:  # without a memory, the order is that of the config
            context.events.note(self.subject, f"the record of capacity is not used: {error}")
        mine = [entry for entry in entries if entry.project == context.project]
        return recent_places_first(self.places, self._type, mine, now)

    @property
    def _type(self) -> str:
        return next(iter(self.specs.values())).accelerator_type

    @property
    def _plane_count(self) -> int:
        return len({plane_of(place.provisioner).title for place in self.places})

    def _hint(self, place: Place, refusal: Refusal) -> str:
        return plane_of(place.provisioner).advice.hint(refusal.kind)

    def _label(self, place: Place) -> str:
        return dict(zip(self.places, label_places(self.places), strict=True))[place]

    def _all_ruled_out(self, ruled_out: Mapping[Place, Refusal]) -> str:
        words = "; ".join(f"{self._label(place)}: {refusal.message}" for place, refusal in ruled_out.items())
        hints = "; ".join(dict.fromkeys(self._hint(place, refusal) for place, refusal in ruled_out.items()))
        if {refusal.kind for refusal in ruled_out.values()} == {"quota"}:
            return f"no quota for {self._type}: {words}; {hints}"
        return f"{self.name} in {words}; {hints}"


def _hold(one: _Round, held: SliceStatus) -> None:
    """Begin a round with what has been requested already, if that is in one of its zones."""
    if there := [place for place in one.ordered if place.zone == held.place.zone]:
        at = next((place for place in there if place.capacity == held.place.capacity), there[0])
        one.found, one.first = held, [at, *(_rotate_after(one.ordered, at)[:-1])]


def _rotate_after(places: Sequence[Place], after: Place | None) -> Sequence[Place]:
    if after is None or after not in places:
        return places
    at = list(places).index(after) + 1
    return [*places[at:], *places[:at]]
