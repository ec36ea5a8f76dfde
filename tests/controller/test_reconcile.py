"""The engine against fakes of its own: order, waiting, acting only on a difference, and failing loudly."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import pytest

from controller.context import Context
from controller.core.errors import CloudError, ConfigError
from controller.core.events import Event
from controller.gcp.client import PROPAGATION_SECONDS
from controller.gcp.google_errors import GoogleError, NotFoundError, ServiceDisabledError
from controller.reconcile import (
    BUSY_SECONDS,
    MAX_WALKS,
    Absent,
    Change,
    Diff,
    ObservedResources,
    Pending,
    Resource,
    Scope,
    Unknown,
    destroy,
    reconcile,
    topological_order,
)
from tests.fakes.context import make_context


@dataclass(frozen=True, kw_only=True)
class Thing(Resource):
    """A thing in a dict; `script` overrides what is seen, one look after the other."""

    kind: ClassVar[str] = "thing"
    scope: ClassVar[Scope] = "pod"
    immutable: ClassVar[frozenset[str]] = frozenset({"make"})
    store: dict[str, Any] = field(compare=False)
    make: str = "a"
    size: int | None = 1
    script: list[Any] = field(default_factory=list, compare=False)
    log: list[str] = field(default_factory=list, compare=False)
    stubborn: bool = field(default=False, compare=False)

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Pending | Unknown | Self:
        assert set(self.depends_on) <= set(observed)
        if self.script:
            return self.script.pop(0)
        return self.store.get(self.name, Absent())

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        self.log.append(f"{diff.action} {self.name}")
        if diff.action == "replace":
            self.destroy(context)
        elif not self.stubborn:
            self.store[self.name] = self

    def destroy(self, context: Context) -> None:
        self.log.append(f"destroy {self.name}")
        self.store.pop(self.name, None)


@pytest.fixture
def context() -> Context:
    return make_context(None, poll_seconds=1.0)


def things(**depends_on: tuple[str, ...]) -> tuple[dict[str, Any], list[str], list[Thing]]:
    store, log = dict[str, Any](), list[str]()
    made = [
        Thing(name=n, depends_on=tuple(f"thing/{d}" for d in ds), store=store, log=log) for n, ds in depends_on.items()
    ]
    return store, log, made


@pytest.fixture
def told(context: Context) -> list[Event]:
    """The events, as they come."""
    events: list[Event] = []
    context.events.add_listener(events.append)
    return events


def test_each_comes_after_its_needs_and_a_second_time_nothing_is_done(context: Context, told: list[Event]) -> None:
    store, log, made = things(c=("b",), b=("a",), a=())
    reconcile(made, context)
    assert log == ["create a", "create b", "create c"]
    assert set(reconcile(made, context)) == {"thing/a", "thing/b", "thing/c"}
    assert len(log) == 3
    assert set(store) == {"a", "b", "c"}
    of_a = [(event.kind, event.data.get("action")) for event in told if event.subject == "thing/a"]
    assert of_a == [("step_started", None), ("step_done", "create"), ("step_done", "none")]
    destroy(made, context)
    assert log[3:] == ["destroy c", "destroy b", "destroy a"]


def test_independent_branches_run_at_the_same_time(context: Context) -> None:
    both = threading.Barrier(2, timeout=240)

    @dataclass(frozen=True, kw_only=True)
    class Meeting(Thing):
        def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
            both.wait()  # passes only if the other is here too
            super().apply(context, observed, diff)

    store: dict[str, Any] = {}
    reconcile([Meeting(name="x", store=store), Meeting(name="y", store=store)], context)
    assert set(store) == {"x", "y"}


def test_pending_is_waited_for_never_acted_on_and_for_ever_an_error(context: Context) -> None:
    """A state may have less time than the resource."""
    store, log, [thing] = things(a=())
    store["a"], creating, deleting = thing, Pending("creating"), Pending("deleting", 30, "run it again later")
    reconcile([replace(thing, script=[creating] * 5)], context)
    assert context.clock.now() == 5.0
    reconcile([replace(thing, script=[creating] * 100 + [deleting] * 20 + [thing])], context)
    with pytest.raises(CloudError, match="still not ready after 50 s: deleting; run it again later"):
        reconcile([replace(thing, script=[creating] * 20 + [deleting] * 100)], context)
    with pytest.raises(CloudError, match="still not ready after 600 s: creating"):
        reconcile([replace(thing, script=[creating] * 10_000)], context)
    assert log == []


@pytest.mark.parametrize("state", [Pending("creating"), Pending("deleting", 30)])
def test_a_controller_that_was_stopped_for_long_looks_once_more(context: Context, state: Pending) -> None:
    """It is stopped between the answer and the deadline."""

    @dataclass(frozen=True, kw_only=True)
    class Stopped(Thing):
        def observe(self, context: Context, observed: ObservedResources) -> Absent | Pending | Unknown | Self:
            seen = super().observe(context, observed)
            if len(self.script) == 1:
                context.clock.sleep(100_000)
            return seen

    store: dict[str, Any] = {}
    store["a"] = thing = Stopped(name="a", store=store)
    reconcile([replace(thing, script=[state, state, thing])], context)
    with pytest.raises(CloudError, match="still not ready after 100002 s"):
        reconcile([replace(thing, script=[state, state, state])], context)


@dataclass(frozen=True, kw_only=True)
class Shared(Thing):
    """A thing that all share; `refusals` are raised by its requests that change it, one after the other."""

    scope: ClassVar[Scope] = "shared"
    refusals: list[GoogleError] = field(default_factory=list, compare=False)

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        super().apply(context, observed, diff)

    def destroy(self, context: Context) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        super().destroy(context)


NOT_READY = GoogleError("compute routers.insert", 400, "resourceNotReady", "The resource 'n' is not ready")
HIDDEN = GoogleError("compute operation", 0, "RESOURCE_NOT_READY", "")
TOO_OFTEN = GoogleError("compute routers.patch", 403, "RESOURCE_OPERATION_RATE_EXCEEDED", "")
INVALID = GoogleError("compute routers.insert", 400, "INVALID_ARGUMENT", "Invalid value for field 'resource.name'")
DISABLED = ServiceDisabledError("tpu", 403, "PERMISSION_DENIED", "tpu.googleapis.com has not been used before")
GONE = NotFoundError("compute routers.insert", 404, "notFound", "The resource 'n' was not found")


@pytest.mark.parametrize("busy", [NOT_READY, HIDDEN, TOO_OFTEN])
def test_what_another_controller_is_about_to_do_is_waited_for(context: Context, busy: GoogleError) -> None:
    store, log = dict[str, Any](), list[str]()
    thing = Shared(name="a", store=store, log=log, refusals=[busy] * 20)
    reconcile([thing], context)
    assert (log, context.clock.now()) == (["create a"], 20.0)
    thing.refusals.extend([busy] * 20)
    destroy([thing], context)
    assert (log[1:], context.clock.now()) == (["destroy a"], 40.0)


@pytest.mark.parametrize(("refusal", "seconds"), [(NOT_READY, BUSY_SECONDS), (INVALID, 0.0)])
def test_a_refusal_that_lasts_is_an_error(context: Context, refusal: GoogleError, seconds: float) -> None:
    for act in (reconcile, destroy):
        began = context.clock.now()
        with pytest.raises(GoogleError, match=str(refusal.message)):
            act([Shared(name="a", store={}, refusals=[refusal] * 10_000)], context)
        assert context.clock.now() - began == seconds


@pytest.mark.parametrize(("act", "refusal"), [(reconcile, NOT_READY), (reconcile, DISABLED), (destroy, NOT_READY)])
def test_a_controller_that_was_stopped_while_it_acted_acts_once_more(
    context: Context, act: Callable[..., Any], refusal: GoogleError
) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Stopped(Shared):
        def _refuse(self) -> None:
            if self.refusals:
                context.clock.sleep(100_000)
                raise self.refusals.pop(0)

        def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
            self._refuse()
            super().apply(context, observed, diff)

        def destroy(self, context: Context) -> None:
            self._refuse()
            super().destroy(context)

    store: dict[str, Any] = {}
    act([Stopped(name="a", store=store, refusals=[refusal])], context)
    with pytest.raises(GoogleError):
        act([Stopped(name="a", store={}, refusals=[refusal] * 2)], context)


def test_what_somebody_deletes_meanwhile_is_made_again_with_all_that_it_needs(context: Context) -> None:
    """`down --all` of somebody else deletes a network that this controller has seen; and never ends doing so."""
    store, log = dict[str, Any](), list[str]()
    network = Shared(name="network", store=store, log=log)

    @dataclass(frozen=True, kw_only=True)
    class Router(Shared):
        times: list[int]

        def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
            if self.times:
                self.times.pop()
                store.clear()
                raise GONE
            super().apply(context, observed, diff)

    router = Router(name="router", depends_on=(network.id,), store=store, log=log, times=[1, 2])
    reconcile([network, router], context)
    assert log == ["create network"] * 3 + ["create router"]
    store.clear()
    with pytest.raises(CloudError, match=r"^thing router: The resource 'n' was not found$"):
        reconcile([network, replace(router, times=[1] * 100)], context)
    assert log[4:] == ["create network"] * MAX_WALKS
    destroy([Shared(name="router", store=store, refusals=[GONE])], context)


def test_a_fixed_field_means_replace_and_others_update(context: Context) -> None:
    store, log, [thing] = things(a=())
    store["a"] = replace(thing, make="old")
    reconcile([thing], context)
    assert log == ["replace a", "destroy a", "create a"]
    store["a"] = replace(thing, size=7)
    reconcile([thing], context)
    assert log[3:] == ["update a"]


def test_none_means_whatever_it_is_and_unknown_stops(context: Context) -> None:
    _, log, [thing] = things(a=())
    assert replace(thing, size=None).diff(replace(thing, size=9)) == Diff("none")
    assert thing.diff(replace(thing, size=9)) == Diff("update", (Change("size", 9, 1),))
    with pytest.raises(ConfigError, match="thing a: no credentials"):
        reconcile([replace(thing, script=[Unknown("no credentials")])], context)
    assert log == []


@dataclass(frozen=True, kw_only=True)
class Disabled(Thing):
    """Its API is enabled but refuses the first `refusals` creations."""

    refusals: int

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        if len(self.log) < self.refusals:
            self.log.append("refused")
            raise DISABLED
        super().apply(context, observed, diff)


def test_an_api_that_is_not_enabled_everywhere_is_waited_for(context: Context) -> None:
    _, log, [thing] = things(a=())
    patient = Disabled(name="a", store=thing.store, log=log, refusals=20)
    reconcile([patient], context)
    assert log == ["refused"] * 20 + ["create a"]
    with pytest.raises(ServiceDisabledError):
        reconcile([replace(patient, refusals=10**6, store={})], context)
    assert context.clock.now() > PROPAGATION_SECONDS


def test_what_does_not_converge_is_said_so(context: Context) -> None:
    _, log, [thing] = things(a=())
    with pytest.raises(CloudError, match="does not converge: make: None -> a; size: None -> 1"):
        reconcile([replace(thing, stubborn=True)], context)
    assert len(log) == 8


def test_a_failure_stops_what_depends_on_it_and_only_that(context: Context, told: list[Event]) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Broken(Thing):
        def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
            raise CloudError("broken")

    store: dict[str, Any] = {}
    after = Thing(name="after", depends_on=("thing/bad",), store=store)
    with pytest.raises(CloudError, match="broken"):
        reconcile([Broken(name="bad", store=store), Thing(name="good", store=store), after], context)
    assert set(store) == {"good"}
    assert ("step_failed", "thing/bad") in {(e.kind, e.subject) for e in told}


@pytest.mark.parametrize(
    ("depends_on", "words"), [({"a": ("b",), "b": ("a",)}, "cycle"), ({"a": ("x",)}, "unknown needs")]
)
def test_a_plan_that_is_no_dag_is_refused(depends_on: dict[str, tuple[str, ...]], words: str) -> None:
    _, _, made = things(**depends_on)
    with pytest.raises(ValueError, match=words):
        topological_order(made)
