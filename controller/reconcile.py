"""Resources, their differences from the plan, and the reconciler, which walks the DAG and acts on differences.

One type describes both the desired and the observed resource, so that their difference is a pure function. `None` in a
desired field means "any value"; fields that are only observed (addresses, etags) have compare=False.

There is no state file: each resource is observed just before each action. Independent resources converge concurrently.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

from controller.context import Context
from controller.core.errors import CloudError, ConfigError
from controller.core.finding import Finding
from controller.core.this_process import InterruptedSleepError
from controller.gcp.client import PROPAGATION_SECONDS
from controller.gcp.google_errors import GoogleError, NotFoundError, ServiceDisabledError

Scope = Literal["run", "pod", "shared", "external"]
ObservedResources = Mapping[str, Any]
"""Observed state of what a resource depends on, by id."""


@dataclass(frozen=True)
class Absent:
    """The resource does not exist: the cloud returned 404, or its host resource is absent."""


@dataclass(frozen=True)
class Pending:
    """An operation is in progress; the reconciler waits for it and does not act."""

    why: str
    seconds: float = float("inf")
    """Maximum duration of this state; the resource's own `timeout` applies too."""
    advice: str = ""
    """What the user can do when the state has lasted that long."""


@dataclass(frozen=True)
class Unknown:
    """The resource cannot be observed; `plan` reports that, `up` stops."""

    why: str


@dataclass(frozen=True)
class NotEnabled(Unknown):
    """The API of the resource is not enabled yet: `plan` expects nothing there, `up` enables the API and looks."""

    service: str = ""


@dataclass(frozen=True)
class Change:
    """One field that differs."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: {_short(self.old)} -> {_short(self.new)}"


@dataclass(frozen=True)
class Diff:
    """Difference that `apply` has to remove."""

    action: Literal["none", "create", "update", "replace"]
    changes: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return self.action != "none"

    def __str__(self) -> str:
        return "; ".join(map(str, self.changes))


@dataclass(frozen=True, kw_only=True)
class Resource(ABC):
    """Kind of object that a plan can require. Subclasses are frozen dataclasses of plain values."""

    kind: ClassVar[str]
    scope: ClassVar[Scope]
    immutable: ClassVar[frozenset[str]] = frozenset()
    """Fields that cannot be changed in place."""

    name: str
    depends_on: tuple[str, ...] = field(default=(), compare=False)
    marked: bool = field(default=True, compare=False)
    """When observed: whether a mark, a label or a record says that Slipway created it."""

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name}"

    def title_of(self, current: Any) -> str:
        """Return the title, with what the observed resource tells beside it. Pure."""
        return self.title

    @abstractmethod
    def observe(self, context: Context, observed: ObservedResources) -> Absent | Pending | Unknown | Self:
        """Return the current state; Absent only on a real 404."""

    @abstractmethod
    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        """Perform one idempotent action towards the desired state; called again until nothing differs."""

    def destroy(self, context: Context) -> None:  # noqa: B027
        """Delete the resource if Slipway created it; no error if it no longer exists.

        By default it stays: an enabled API and the user's secrets; uploads, which are deleted with their bucket, and
        what is on the workers, which are deleted with their node.
        """

    @property
    def timeout(self) -> float:
        """Return how many seconds it may stay pending before that is an error."""
        return 600.0

    @property
    def is_managed(self) -> bool:
        """Return whether Slipway created this observed resource; no other is ever deleted."""
        return self.marked

    def findings(self, current: Any) -> Iterable[Finding]:
        """Yield findings about the observed resource that need no action. Pure."""
        return ()

    def diff(self, current: Absent | Self) -> Diff:
        """Compare all compared fields; a difference in an immutable one means a replacement. Pure."""
        if isinstance(current, Absent):
            return Diff("create", tuple(Change(k, None, v) for k, v in self.spec_fields().items()))
        return difference(self.spec_fields(), vars(current), self.immutable)

    def spec_fields(self) -> dict[str, Any]:
        """Return the compared fields, without the name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.compare and f.name != "name"}


def difference(wanted: Mapping[str, Any], observed: Mapping[str, Any], immutable: frozenset[str]) -> Diff:
    """Compare every desired field that is not None; a difference in an immutable one means a replacement."""
    changes = tuple(
        Change(key, observed[key], value)
        for key, value in wanted.items()
        if value is not None and observed[key] != value
    )
    if not changes:
        return Diff("none")
    return Diff("replace" if any(c.field in immutable for c in changes) else "update", changes)


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 1 and all(part == value[0] for part in value):
        return f"{_short(value[0])} on all {len(value)}"
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


LEASED_SCOPES = frozenset({"run", "pod"})
"""Scopes that only the lease holder may change; any controller creates shared ones in the same way."""
BUSY_SECONDS = 300.0
"""How long to wait for what another controller or Google is about to do to a resource, or to one that it needs."""
MAX_WALKS = 4
"""After as many walks over a plan somebody keeps deleting what the others need."""
MAX_ACTS = 8
"""A resource that still differs after this many actions does not converge: something else keeps changing it."""


def topological_order(resources: Iterable[Resource]) -> list[Resource]:
    """Sort resources by what they depend on, else in the given order; ValueError on a cycle or an unknown id."""
    left = {r.id: r for r in resources}
    known = set(left)
    done: list[Resource] = []
    placed: set[str] = set()
    while left:
        ready = [r for r in left.values() if set(r.depends_on) <= placed]
        if not ready:
            unknown = {n for r in left.values() for n in r.depends_on} - known
            raise ValueError(f"unknown needs {sorted(unknown)}" if unknown else f"a cycle among {sorted(left)}")
        for resource in ready:
            del left[resource.id]
            placed.add(resource.id)
            done.append(resource)
    return done


def among_themselves(resources: Iterable[Resource]) -> list[Resource]:
    """Drop what resources depend on outside this list: it is there already, or stays."""
    listed = {resource.id: resource for resource in resources}
    return [replace(r, depends_on=tuple(n for n in r.depends_on if n in listed)) for r in listed.values()]


class VanishedError(CloudError):
    """Something that a resource needs was deleted after it had been seen, as by somebody's `slipway down --all`."""


def reconcile(resources: Sequence[Resource], context: Context) -> dict[str, Any]:
    """Reconcile every resource and return the final observed state of each, by id.

    Raises:
        SlipwayError: the first failure, once everything already under way has stopped.
        KeyboardInterrupt: raised again after the threads have stopped at their next wait.
    """
    for _ in range(MAX_WALKS - 1):
        try:
            return _walk(resources, context)
        except VanishedError as error:
            context.events.note(resources[0].id, f"{error}; looking at everything again")
            context.known_accounts.clear()
            context.clock.sleep(context.poll_seconds)
    return _walk(resources, context)


def _walk(resources: Sequence[Resource], context: Context) -> dict[str, Any]:
    """Reconcile every resource once. Result and errors as of `reconcile`."""
    waiting = topological_order(resources)
    observed: dict[str, Any] = {}
    running: dict[Future[Any], Resource] = {}
    failure: BaseException | None = None
    with ThreadPoolExecutor(max_workers=16, thread_name_prefix="reconcile") as pool:
        try:
            while running or (waiting and failure is None):
                if failure is None:
                    ready = [r for r in waiting if set(r.depends_on) <= set(observed)]
                    waiting = [r for r in waiting if r not in ready]
                    running |= {pool.submit(settle, r, context, dict(observed)): r for r in ready}
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    resource = running.pop(future)
                    error = future.exception()
                    if error is None:
                        observed[resource.id] = future.result()
                    else:
                        failure = failure or error
        except KeyboardInterrupt:
            context.clock.interrupt()
            raise
    if failure is not None:
        raise failure
    return observed


def settle(resource: Resource, context: Context, observed: dict[str, Any]) -> Any:
    began = context.clock.monotonic()
    late, service_late = context.clock.deadline(resource.timeout), context.clock.deadline(PROPAGATION_SECONDS)
    busy_late = context.clock.deadline(BUSY_SECONDS)
    pending, stuck = None, late
    acts: list[Diff] = []
    announced = False
    try:
        while True:
            # Deadlines hold as of before a look or an act: a controller that was stopped for long tries once more.
            was_late, was_stuck, service_was_late, busy_was_late = late(), stuck(), service_late(), busy_late()
            current = _observe(resource, context, observed)
            if isinstance(current, Unknown):
                raise ConfigError(f"{resource.title}: {current.why}")
            if isinstance(current, Pending):
                if not announced:
                    announced = True
                    context.events.emit("step_started", resource.id, current.why, title=resource.title)
                if current != pending:
                    pending, stuck, was_stuck = current, context.clock.deadline(current.seconds), False
                if was_stuck or was_late:
                    raise CloudError(_timeout_error(resource, current, context.clock.monotonic() - began))
                context.clock.sleep(context.poll_seconds)
                continue
            pending = None
            diff = resource.diff(current)
            if not diff:
                findings = list(resource.findings(current))
                if errors := [finding for finding in findings if finding.severity == "error"]:
                    raise ConfigError(errors)
                for finding in findings:
                    context.events.note(resource.id, str(finding))
                action = acts[0].action if acts else "none"
                seconds = round(context.clock.monotonic() - began, 3)
                context.events.emit("step_done", resource.id, title=resource.title, action=action, seconds=seconds)
                return current
            if len(acts) >= MAX_ACTS:
                raise CloudError(f"{resource.title} does not converge: {diff}")
            announced = True
            message = diff.action if isinstance(current, Absent) else str(diff)
            context.events.emit("step_started", resource.id, message, title=resource.title)
            acts.append(diff)
            if resource.scope in LEASED_SCOPES:
                context.before_pod_write()
            try:
                resource.apply(context, observed, diff)
            except ServiceDisabledError:  # Google takes some minutes to propagate an enabled API
                if service_was_late:
                    raise
                acts.pop()
                context.clock.sleep(context.poll_seconds)
            except NotFoundError as error:
                if resource.scope != "shared" or not resource.depends_on:
                    raise
                raise VanishedError(f"{resource.title}: {error.message}") from error
            except GoogleError as error:
                if not error.is_busy or busy_was_late:
                    raise
                acts.pop()
                context.clock.sleep(context.poll_seconds)
    except InterruptedSleepError:
        raise
    except Exception as error:
        context.events.emit("step_failed", resource.id, str(error), title=resource.title)
        raise


def _timeout_error(resource: Resource, current: Pending, seconds: float) -> str:
    advice = f"; {current.advice}" if current.advice else ""
    return f"{resource.title}: still not ready after {seconds:.0f} s: {current.why}{advice}"


def _observe(resource: Resource, context: Context, observed: dict[str, Any]) -> Any:
    try:
        return resource.observe(context, observed)
    except ServiceDisabledError as error:
        # Google takes some minutes to propagate an enabled API.
        return Pending(f"{error.service} is not enabled everywhere yet")


def destroy(resources: Sequence[Resource], context: Context) -> None:
    """Delete resources, dependents first."""
    for resource in reversed(topological_order(resources)):
        began = context.clock.monotonic()
        context.events.emit("step_started", resource.id, "delete", title=resource.title)
        try:
            _destroy_when_ready(resource, context)
        except Exception as error:
            context.events.emit("step_failed", resource.id, str(error), title=resource.title)
            raise
        seconds = round(context.clock.monotonic() - began, 3)
        context.events.emit("step_done", resource.id, title=resource.title, action="delete", seconds=seconds)


def _destroy_when_ready(resource: Resource, context: Context) -> None:
    """Delete a resource once nothing else is under way on it."""
    late = context.clock.deadline(BUSY_SECONDS)
    while True:
        was_late = late()  # as in `settle`
        try:
            return resource.destroy(context)
        except NotFoundError:
            return None  # somebody else has deleted it since it was seen
        except GoogleError as error:
            if not error.is_busy or was_late:
                raise
        context.clock.sleep(context.poll_seconds)
