"""What a resource is, and what a difference is. No I/O here.

One type serves for the wanted and the observed thing, so that the difference between them is a pure function.
`None` in a wanted field means "whatever it is"; facts that are only observed (addresses, etags) are compare=False.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

if TYPE_CHECKING:
    from controller.context import Context
    from controller.core.finding import Finding

Scope = Literal["run", "pod", "shared", "external"]
ObservedResources = Mapping[str, Any]
"""What the needs were observed to be, by id."""


@dataclass(frozen=True)
class Absent:
    """It does not exist: the cloud answered 404, or what it would live on is absent."""


@dataclass(frozen=True)
class Pending:
    """Something is under way; it is waited for, never acted on."""

    why: str
    seconds: float = float("inf")
    """How long this very state may last; the resource's own patience counts as well."""
    advice: str = ""
    """What the user can do when it has lasted that long."""


@dataclass(frozen=True)
class Unknown:
    """It cannot be observed; `plan` shows that, `up` stops."""

    why: str


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
    """What `apply` has to do."""

    action: Literal["none", "create", "update", "replace"]
    changes: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return self.action != "none"

    def __str__(self) -> str:
        return "; ".join(map(str, self.changes))


@dataclass(frozen=True, kw_only=True)
class Resource(ABC):
    """A kind of thing that a plan wants to exist. Subclasses are frozen dataclasses of plain values."""

    kind: ClassVar[str]
    scope: ClassVar[Scope]
    fixed: ClassVar[frozenset[str]] = frozenset()
    """A change in these fields cannot be made in place."""

    name: str
    needs: tuple[str, ...] = field(default=(), compare=False)

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def title(self) -> str:
        """One short line for people."""
        return f"{self.kind} {self.name}"

    @abstractmethod
    def observe(self, world: Context, have: ObservedResources) -> Absent | Pending | Unknown | Self:
        """What is there now. Absent only on a real 404."""

    @abstractmethod
    def apply(self, world: Context, have: ObservedResources, diff: Diff) -> None:
        """One idempotent act that brings the world nearer; called again until nothing differs."""

    @abstractmethod
    def destroy(self, world: Context) -> None:
        """Remove it if it is ours; no error when it is gone already."""

    @property
    def patience(self) -> float:
        """Seconds it may stay pending before that is an error."""
        return 600.0

    @property
    def ours(self) -> bool:
        """Of an observed thing: did Slipway make it? Only ours is ever deleted."""
        return True

    def findings(self, seen: Any) -> Iterable[Finding]:
        """What the user should know of the observed thing although nothing has to be done about it. Pure."""
        return ()

    def diff(self, seen: Absent | Self) -> Diff:
        """Pure. Compares every field that counts; a fixed one makes it a replacement."""
        if isinstance(seen, Absent):
            return Diff("create", tuple(Change(k, None, v) for k, v in self.wanted().items()))
        return difference(self.wanted(), vars(seen), self.fixed)

    def wanted(self) -> dict[str, Any]:
        """The fields that are compared, without the name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.compare and f.name != "name"}


def difference(wanted: Mapping[str, Any], observed: Mapping[str, Any], fixed: frozenset[str]) -> Diff:
    """Compare every wanted field that is not None; a change in a fixed one makes it a replacement."""
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
