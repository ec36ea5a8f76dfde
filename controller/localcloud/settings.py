"""Settings of the emulated cloud: they may change while it runs, and outlive a restart."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from controller.localcloud.apis.quotas import check_limits
from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Store

STRICT, RELAXED = "strict", "relaxed"
_KIND, _NAME = "setting", "settings"


@dataclass(frozen=True)
class _Values:
    operation_seconds: float = 0.5
    realism: str = STRICT
    caller_roles: tuple[str, ...] = ("roles/owner", "roles/billing.costsManager")
    token_seconds: float = 3600.0
    quotas: Mapping[str, int] = field(default_factory=dict)


class Settings:
    """Current values, kept in the store. Components hold this object and read a value when they need it."""

    def __init__(self, store: Store, **given: Any) -> None:
        """Take the given values, else those of an earlier process, else the defaults; None is not given."""
        self._store = store
        known = {one.name for one in fields(_Values)}
        former = {key: value for key, value in (store.get(_KIND, _NAME) or {}).items() if key in known}
        self._values = _Values(**{**former, **_as_tuple(former)})
        self.update({key: value for key, value in given.items() if value is not None})

    @property
    def operation_seconds(self) -> float:
        return self._values.operation_seconds

    @property
    def quotas(self) -> Mapping[str, int]:
        """Return the limits that differ from those in quotas.py, by the name of the quota."""
        return self._values.quotas

    @property
    def is_strict(self) -> bool:
        """Return whether Google's refusals and delays are emulated that a tool only finds in the way."""
        return self._values.realism == STRICT

    @property
    def caller_roles(self) -> tuple[str, ...]:
        """Roles of the user on the laptop, inherited from a folder: the project's policy does not show them."""
        return self._values.caller_roles

    @property
    def token_seconds(self) -> float:
        """Lifetime of an access token."""
        return self._values.token_seconds

    def delay(self, operations: float) -> float:
        """Return the seconds that a change takes to show everywhere, given as a number of operations."""
        return operations * self.operation_seconds if self.is_strict else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self._values)

    def update(self, change: Mapping[str, Any]) -> None:
        """Change some of the values. Raises ApiError 400 for an unknown name or an invalid value."""
        unknown = set(change) - set(self.as_json())
        if unknown:
            raise ApiError(400, f"Unknown setting {sorted(unknown)[0]}; known: {', '.join(self.as_json())}")
        values = replace(self._values, **{**change, **_as_tuple(change)})
        for name in ("operation_seconds", "token_seconds"):
            seconds = getattr(values, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < 0:
                raise ApiError(400, f"{name} must be a number of seconds, not {seconds!r}")
        roles = values.caller_roles
        if not isinstance(roles, tuple) or not all(isinstance(role, str) for role in roles):
            raise ApiError(400, f"caller_roles must be a list of roles, not {roles!r}")
        if values.realism not in (STRICT, RELAXED):
            raise ApiError(400, f"realism must be {STRICT} or {RELAXED}, not {values.realism!r}")
        check_limits(values.quotas)
        self._values = replace(values, operation_seconds=float(values.operation_seconds))
        self._store.put(_KIND, _NAME, self.as_json())


def _as_tuple(change: Mapping[str, Any]) -> dict[str, Any]:
    roles = change.get("caller_roles")
    return {"caller_roles": tuple(roles)} if isinstance(roles, list) else {}
