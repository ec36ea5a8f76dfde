"""Resources and the differences between their desired and observed state. No I/O here.

One type describes both the desired and the observed resource, so that their difference is a pure function. `None` in a
desired field means "any value"; fields that are only observed (addresses, etags) have compare=False.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

from controller.context import Context
from controller.core.finding import Finding

Scope = Literal["run", "pod", "shared", "external"]
ObservedResources = Mapping[str, Any]
"""Observed state of the needs, by id."""


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
        return True

    def findings(self, current: Any) -> Iterable[Finding]:
        """Yield findings about the observed resource that need no action. Pure."""
        return ()

    def diff(self, current: Absent | Self) -> Diff:
        """Compare all compared fields; a difference in a fixed one means a replacement. Pure."""
        if isinstance(current, Absent):
            return Diff("create", tuple(Change(k, None, v) for k, v in self.spec_fields().items()))
        return difference(self.spec_fields(), vars(current), self.immutable)

    def spec_fields(self) -> dict[str, Any]:
        """Return the compared fields, without the name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.compare and f.name != "name"}


def difference(wanted: Mapping[str, Any], observed: Mapping[str, Any], fixed: frozenset[str]) -> Diff:
    """Compare every desired field that is not None; a difference in a fixed one means a replacement."""
    changes = tuple(
        Change(key, observed[key], value)
        for key, value in wanted.items()
        if value is not None and observed[key] != value
    )
    if not changes:
        return Diff("none")
    return Diff("replace" if any(c.field in fixed for c in changes) else "update", changes)


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 1 and all(part == value[0] for part in value):
        return f"{_short(value[0])} on all {len(value)}"
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
