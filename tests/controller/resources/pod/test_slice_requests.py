"""Requests side by side: two scripted planes, on a clock that sleeping moves. Times in seconds."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from controller.context import Context, SurplusSlice
from controller.core.errors import CloudError, RetriesExhaustedError
from controller.core.this_process import InterruptedSleepError
from controller.gcp.answers import LABEL
from controller.gcp.client import PROPAGATION_SECONDS
from controller.gcp.google_errors import UNREACHABLE, ConflictError, ForbiddenError, GoogleError, ServiceDisabledError
from controller.resources.deletions import DeletionPendingError
from controller.resources.pod import planes
from controller.resources.pod.capacity_log import load_entries
from controller.resources.pod.provisioner import Endpoint, Place, SliceSpec, SliceStatus
from controller.resources.pod.refusals import PlaneAdvice
from controller.resources.pod.search import ALONE_POLLS, MAX_INTERNAL_ERRORS, CapacitySearch
from controller.resources.pod.slices import Slices
from tests.fakes.clock import NEVER, ManualClock
from tests.fakes.context import make_context
from tests.fakes.google import KilledError

POLL = 5.0
ALONE = ALONE_POLLS * POLL
SPEC = SliceSpec(
    workers=2, accelerator_type="v6e-8", runtime_version="", network="n", external_ip=False, valid_until_seconds=9000
)
STOCK_OUT = GoogleError("insert", 429, "RESOURCE_EXHAUSTED", "There is no more capacity")
UNAVAILABLE = GoogleError("get", 503, "UNAVAILABLE", "The service is currently unavailable.")
CUT_OFF = GoogleError("get", 503, UNREACHABLE, "timed out; check the network")
BROKEN = GoogleError("get", 500, "INTERNAL", "Internal error")
RETRIES = 31.0
"""How long the client repeats a request before it gives up."""


@dataclass
class Scripted:
    """A plane with one way to create slices, and that way: each request waits `waits`, then takes `takes`.

    `refuses`: what a request is answered with at once. `held`: when what exists was requested, by zone. `outage`: from
    when to when all requests fail, and `outage_error`: how.
    """

    clock: ManualClock
    name: str
    title: str
    waits: float = 0.0
    takes: float = 20.0
    refuses: GoogleError | None = None
    answers_late: bool = False
    cannot_delete: bool = False
    has_vms: bool = False
    outage: tuple[float, float] = (NEVER, NEVER)
    outage_error: GoogleError | None = None
    held: dict[str, tuple[float, Place]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    @property
    def advice(self) -> PlaneAdvice:
        return PlaneAdvice("roles/x", f"tpu.types of {self.name}", "images")

    @property
    def queues(self) -> frozenset[str]:
        return frozenset({self.name})

    def provisioners(self, create_seconds: float) -> dict[str, Any]:
        return {self.name: self}

    def create(self, context: Context, name: str, spec: SliceSpec, place: Place) -> Callable[[], bool] | None:
        self._fail()
        self.log.append(f"{self.clock.elapsed:.0f} {self.name} asked in {place.zone}")
        if self.refuses is not None:
            raise self.refuses
        self.held[place.zone] = (self.clock.elapsed, place)
        granted = self.clock.elapsed + self.waits + self.takes
        return (lambda: self.clock.elapsed >= granted) if self.answers_late else None

    def observe(self, context: Context, name: str, zone: str) -> SliceStatus | None:
        self._fail()
        if zone not in self.held:
            return None
        asked, place = self.held[zone]
        age = self.clock.elapsed - asked
        state = "WAITING_FOR_RESOURCES" if age < self.waits else "PROVISIONING"
        state = "READY" if age >= self.waits + self.takes else state
        created = 1_790_000_000.0 + asked
        return SliceStatus(
            spec=SPEC, place=place, state=state, name=name, pending=state != "READY", created=created,
            uid="" if age < self.waits else f"{self.name}-{asked:.0f}", labels=tuple(LABEL.items()),
            running_since=0.0 if age < self.waits else created + self.waits,
            endpoints=(Endpoint(0, "10.0.0.1", None),) if self.has_vms and age >= self.waits else (),
        )  # fmt: skip

    def delete(
        self, context: Context, name: str, zone: str, *, is_recorded: bool = False, is_hurried: bool = False
    ) -> None:
        self._fail()
        if self.cannot_delete:
            raise DeletionPendingError("not now")
        if self.held.pop(zone, None):
            self.log.append(f"{self.clock.elapsed:.0f} {self.name} deleted in {zone}")

    def _fail(self) -> None:
        begin, end = self.outage
        if begin <= self.clock.elapsed < end:
            self.clock.elapsed += RETRIES
            raise self.outage_error or UNAVAILABLE


@dataclass
class Market:
    """Two planes, and a search on both of them."""

    queue: Scripted
    other: Scripted
    context: Context
    notes: list[str]
    surplus: list[SurplusSlice]
    spec: SliceSpec = SPEC
    zones: tuple[str, ...] = ("a-b-c",)

    @property
    def clock(self) -> ManualClock:
        return self.queue.clock

    @property
    def log(self) -> list[str]:
        return sorted(self.queue.log + self.other.log, key=lambda line: float(line.split()[0]))

    @property
    def asked(self) -> list[str]:
        return [line.partition(" ")[2] for line in self.log if "asked" in line]

    @property
    def entries(self) -> list[tuple[str, str, str]]:
        return [(one.provisioner, one.answer, one.ended) for one in load_entries(self.context.state_dir)]

    def search(self, max_attempts: int = 9) -> CapacitySearch:
        places = [Place(zone, "spot", "", way.name) for zone in self.zones for way in (self.queue, self.other)]
        makers: Any = {"queue": self.queue, "other": self.other}
        specs = dict.fromkeys(makers, self.spec)
        return CapacitySearch(self.context, "node/p", "the pod", "p", specs, places, makers, max_attempts, 1800.0)


@pytest.fixture
def market(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Market:
    clock = ManualClock(1_790_000_000.0)
    queue, other = Scripted(clock, "queue", "the queue"), Scripted(clock, "other", "the other one")
    monkeypatch.setattr(planes, "PLANES", {"queue": cast(Any, queue), "other": cast(Any, other)})
    notes, surplus = list[str](), list[SurplusSlice]()
    context = make_context(None, tmp_path, clock=clock, notes=notes, poll_seconds=POLL)
    context.random_float, context.on_surplus = lambda: 1.0, surplus.append
    return Market(queue, other, context, notes, surplus)


HERE = ["a-b-c"]
NO_FIELD = GoogleError("insert", 400, "INVALID_ARGUMENT", "no such field")
WITHDRAWN = ("other", "withdrawn", "")


@pytest.mark.parametrize(
    ("queue", "other", "told", "seconds"),
    [
        ({}, {}, [], 20),
        ({"waits": ALONE + 30}, {"waits": NEVER}, [WITHDRAWN], ALONE + 50),
        # a flex-start VM: its operation ends when it runs
        ({"waits": ALONE + 60}, {"waits": 7200, "answers_late": True}, [WITHDRAWN], ALONE + 80),
        ({"waits": ALONE + 100}, {"refuses": NO_FIELD}, [("other", "bad_request", "")], ALONE + 120),
        ({"waits": 200, "outage": (100, 330)}, {"waits": ALONE + 300}, [WITHDRAWN], 373),
    ],
    ids=["it grants at once", "it is first", "no answer yet", "the other is ruled out", "granted during its outage"],
)
def test_the_slice_of_the_queue_is_the_pod(market: Market, queue: Any, other: Any, told: Any, seconds: float) -> None:
    vars(market.queue).update(queue)
    vars(market.other).update(other)
    market.search().run()
    assert (list(market.queue.held), market.other.held) == (HERE, {})
    assert market.entries == [("queue", "granted", ""), *told]
    assert market.clock.elapsed == pytest.approx(seconds, abs=1)


@pytest.mark.parametrize("deletes", [True, False])
def test_while_a_request_waits_the_other_plane_is_asked_and_its_slice_is_the_pod(market: Market, deletes: bool) -> None:
    """What Google does not delete yet keeps no pod."""
    market.queue.waits, market.queue.cannot_delete = NEVER, not deletes
    market.search().run()
    asked = ["0 queue asked in a-b-c", f"{ALONE:.0f} other asked in a-b-c"]
    # in the second in which the other slice is READY
    assert market.log == [*asked, *[f"{ALONE + 20:.0f} queue deleted in a-b-c"] * deletes]
    assert market.entries == [("queue", "withdrawn", ""), ("other", "granted", "")]
    assert "giving back the request in a-b-c (spot, queue): the pod is there" in market.notes
    assert ("not now" in market.notes) != deletes
    assert (list(market.other.held), market.surplus) == (HERE, [])


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_slice_beside_the_pod_is_given_back_on_record_and_counted(
    market: Market, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """Also where the controller is killed while it gives it back."""

    def die(*_: Any, **__: Any) -> None:
        raise KilledError

    market.queue.waits, market.queue.takes = ALONE + 8, 14  # READY two seconds after the other one
    if is_killed:
        monkeypatch.setattr(market.queue, "delete", die)
    with pytest.raises(KilledError) if is_killed else nullcontext():
        market.search().run()
    assert list(market.other.held) == HERE
    # It was still coming up, so Google has said that there is capacity, and it may be billed.
    assert market.entries == [("queue", "granted", "surplus"), ("other", "granted", "")]
    assert "giving back the slice in a-b-c (spot, queue): the pod is there" in market.notes
    [given] = {*market.surplus}
    assert (given.pod, given.zone, given.began - market.clock.now()) == ("p", "a-b-c", pytest.approx(-12))
    if not is_killed:
        assert market.queue.held == {}
        assert market.log[-1].startswith(f"{ALONE + 20:.0f} queue deleted")


def test_the_other_plane_goes_through_its_places_meanwhile(market: Market) -> None:
    market.zones, market.queue.waits = ("a-b-c", "d-e-f"), NEVER
    market.other.refuses = STOCK_OUT
    with pytest.raises(RetriesExhaustedError, match="after 7 attempts"):
        market.search(max_attempts=7).run()
    assert market.asked[:3] == ["queue asked in a-b-c", "other asked in a-b-c", "other asked in d-e-f"]
    assert "the other one: retrying in 10 s (attempt 4 of 7)" in market.notes
    assert market.queue.held == market.other.held == {}


@pytest.mark.parametrize("outage", [NEVER, 0.0])
def test_with_a_data_disk_only_one_plane_is_asked_at_a_time(
    market: Market, monkeypatch: pytest.MonkeyPatch, outage: float
) -> None:
    """In an outage nobody knows whether the request was made, and the other plane would need the same disk."""
    monkeypatch.setattr("controller.resources.pod.slice_requests.request_disk", lambda *_: None)
    market.spec, market.queue.waits = replace(SPEC, data_disk_gb=10), NEVER
    market.queue.outage, market.queue.outage_error = (outage, NEVER), CUT_OFF
    with pytest.raises(GoogleError, match=UNREACHABLE) if outage == 0 else nullcontext():
        market.search().run()
    assert market.asked == ([] if outage == 0 else ["queue asked in a-b-c", "other asked in a-b-c"])
    assert market.queue.held == {}
    assert outage == 0 or market.clock.elapsed == 320  # five minutes in the queue, then the other one at once


def test_a_name_that_is_taken_ends_the_search_and_deletes_nothing(market: Market) -> None:
    market.queue.waits = NEVER
    market.other.refuses = ConflictError("insert", 409, "alreadyExists", "it exists already")
    market.search().run()
    assert list(market.queue.held) == HERE  # the next observation says what is whose


def test_ctrl_c_leaves_both_requests_and_the_next_search_waits_for_both(market: Market) -> None:
    market.queue.waits, market.other.waits = 400, 300
    market.clock.interrupt_at = 200
    with pytest.raises(InterruptedSleepError):
        market.search().run()
    assert [note for note in market.notes if "stays in the queue" in note] != []
    assert [*market.queue.held, *market.other.held] == HERE * 2
    market.clock.interrupt_at = NEVER
    found = [one.observe(market.context, "p", "a-b-c") for one in (market.queue, market.other)]
    market.search().run(found=[status for status in found if status is not None])
    assert len(market.asked) == 2  # nothing is requested again
    assert market.clock.elapsed == ALONE + 320
    assert market.entries == [("queue", "withdrawn", ""), ("other", "granted", "")]


@pytest.mark.parametrize("error", [UNAVAILABLE, CUT_OFF, BROKEN], ids=lambda error: error.reason)
@pytest.mark.parametrize("begin", [0.0, 40.0, 90.0])  # when it is asked first, while it waits alone, beside the other
def test_an_outage_of_one_plane_leaves_the_request_of_the_other(
    market: Market, error: GoogleError, begin: float
) -> None:
    market.queue.waits, market.queue.outage, market.queue.outage_error = NEVER, (begin, begin + 600), error
    market.other.waits = 1800
    market.search().run()
    assert list(market.other.held) == HERE
    assert market.queue.held == {}
    # What Google answers to a request itself counts as if an operation had said it: five internal errors rule it out.
    kind = {UNAVAILABLE: "stock_out", BROKEN: "internal"}.get(error, "") if begin == 0.0 else ""
    asked = ["other asked in a-b-c", "queue asked in a-b-c"]  # nothing is forgotten and asked again
    assert sorted(market.asked) == (asked[:1] if kind == "internal" else asked)
    refusals, withdrawn = {("queue", kind, "")} if kind else set(), {("queue", "withdrawn", "")}
    assert {*market.entries} == {("other", "granted", ""), *refusals, *(withdrawn if kind != "internal" else ())}
    told = [note for note in market.notes if "does not answer" in note]
    assert len(told) == (not refusals)


@pytest.mark.parametrize("waits", [0.0, 600.0])
def test_vms_that_run_and_become_no_slice_are_an_error_at_google_and_no_lack_of_capacity(
    market: Market, waits: float
) -> None:
    """They are billed, so they are not asked for for hours; also where there is no other place."""
    market.queue.waits, market.queue.takes, market.queue.has_vms = waits, NEVER, True
    search = market.search(max_attempts=99)
    search = replace(search, places=[place for place in search.places if place.provisioner == "queue"])
    with pytest.raises(CloudError, match=r"its VMs run, but it is still provisioning after 1805 s; try"):
        search.run()
    assert len(market.asked) == MAX_INTERNAL_ERRORS
    assert {answer for _, answer, _ in market.entries} == {"internal"}
    assert market.queue.held == {}


def test_a_machine_without_a_network_ends_the_search_and_loses_no_request(market: Market) -> None:
    market.queue.waits = market.other.waits = NEVER
    market.queue.outage = market.other.outage = (ALONE + 60, NEVER)
    market.queue.outage_error = market.other.outage_error = CUT_OFF
    with pytest.raises(GoogleError, match=UNREACHABLE):
        market.search().run()
    assert [*market.queue.held, *market.other.held] == HERE * 2
    assert market.entries == []


REFUSED = ForbiddenError("get", 403, "PERMISSION_DENIED", "Permission 'x' denied")
DISABLED = ServiceDisabledError("get", 403, "PERMISSION_DENIED", "x.googleapis.com has not been used")


@pytest.mark.parametrize("error", [REFUSED, DISABLED], ids=["permission", "API"])
@pytest.mark.parametrize(("until", "is_there"), [(200.0, True), (200.0, False), (NEVER, True)])
def test_nothing_is_asked_for_while_google_does_not_show_a_place(
    market: Market, error: GoogleError, until: float, is_there: bool
) -> None:
    """What turns up there ends the search. A place that stays closed is waited for once, also by later commands."""
    there = Place("a-b-c", "spot", "", "queue")
    market.queue.outage, market.queue.outage_error = (0.0, until), error
    if is_there:
        market.queue.held["a-b-c"] = (-100.0, there)
    slices = Slices("p", ["a-b-c"], market.search().provisioners)
    assert slices.find(market.context) is None
    market.search().run()
    assert len([note for note in market.notes if "none is created before they are seen" in note]) == 1
    if until < NEVER:
        assert market.asked == ([] if is_there else ["queue asked in a-b-c"])
        assert (list(market.queue.held), market.other.held) == (HERE, {})
        assert market.clock.elapsed >= until
        return
    assert market.asked[-1] == "other asked in a-b-c"
    assert float(market.log[-1].split()[0]) >= PROPAGATION_SECONDS
    market.other.held.clear()
    market.context.refused_since.clear()  # as of another command
    assert slices.find(market.context) is None
    begin = market.clock.elapsed
    market.search().run()
    assert float(market.log[-1].split()[0]) - begin < PROPAGATION_SECONDS


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 1, "%s": "soon"}', '{"format": 1, "%s": [1]}', '{"format": 1, "%s": 1e999}']
)
def test_a_damaged_record_of_closed_places_is_none(market: Market, text: str) -> None:
    market.queue.outage, market.queue.outage_error = (0.0, NEVER), REFUSED
    assert Slices("p", ["a-b-c"], market.search().provisioners).find(market.context) is None
    [place] = market.context.refused_since
    file = market.context.state_dir / "closed_places" / f"{market.context.project}.json"
    file.parent.mkdir(parents=True)
    file.write_text(text.replace("%s", place))
    market.search().run()
    assert market.asked[-1] == "other asked in a-b-c"
    assert PROPAGATION_SECONDS <= float(market.log[-1].split()[0]) < 2 * PROPAGATION_SECONDS


def test_an_outage_of_the_only_plane_is_no_refusal_of_what_waits_there(market: Market) -> None:
    search = market.search()
    market.queue.waits, market.queue.outage = NEVER, (60, NEVER)
    with pytest.raises(GoogleError, match="UNAVAILABLE"):
        replace(search, places=[place for place in search.places if place.provisioner == "queue"]).run()
    assert (list(market.queue.held), market.entries) == (["a-b-c"], [])
