"""Settings of the emulated cloud: they may change while it runs, and outlive a restart."""

from collections.abc import Mapping
from typing import Any

from controller.localcloud.apis.quotas import check_limits
from controller.localcloud.delays import DELAYS, FIELD_PACE
from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Store

STRICT, RELAXED = "strict", "relaxed"
_KIND, _NAME = "setting", "settings"
_DEFAULTS = {
    "operation_seconds": 0.1,
    "realism": STRICT,
    "caller_roles": ("roles/owner", "roles/billing.costsManager"),
    "token_seconds": 3600.0,
    "quotas": {},
}


def check_seconds(name: str, seconds: object) -> None:
    """Raise ApiError 400 unless this is a number of seconds."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < 0:
        raise ApiError(400, f"{name} must be a number of seconds, not {seconds!r}")


class Settings:
    """Current values, kept in the store. Components hold this object and read a value when they need it.

    Attributes:
        operation_seconds: the pace of all delays; see `delays.py`.
        caller_roles: roles of the user on the laptop, inherited from a folder: the project's policy does not show them.
        token_seconds: lifetime of an access token.
        quotas: the limits that differ from those in quotas.py, by the name of the quota.
    """

    operation_seconds: float
    realism: str
    caller_roles: tuple[str, ...]
    token_seconds: float
    quotas: Mapping[str, int]

    def __init__(self, store: Store, **given: Any) -> None:
        """Take the given values, else those of an earlier process, else the defaults; None is not given."""
        self._store = store
        former = store.get(_KIND, _NAME) or {}
        vars(self).update(_DEFAULTS | {key: value for key, value in former.items() if key in _DEFAULTS})
        self.update({key: value for key, value in given.items() if value is not None})

    @property
    def is_strict(self) -> bool:
        """Return whether Google's refusals and delays are emulated that a tool only finds in the way."""
        return self.realism == STRICT

    @property
    def has_limits(self) -> bool:
        """Return whether requests can be too many; they cannot where everything takes no time."""
        return self.is_strict and self.operation_seconds > 0

    def delay(self, kind: str, name: str = "") -> float:
        """Return the seconds that something takes at the current pace; `name` tells it from others of its kind."""
        row = DELAYS[kind]
        return 0.0 if row.is_lag and not self.is_strict else row.seconds(name) * self.operation_seconds / FIELD_PACE

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _DEFAULTS}

    def update(self, change: Mapping[str, Any]) -> None:
        """Change some of the values. Raises ApiError 400 for an unknown name or an invalid value."""
        values = self.as_json()
        if unknown := set(change) - set(values):
            raise ApiError(400, f"Unknown setting {sorted(unknown)[0]}; known: {', '.join(values)}")
        values |= change
        for name in ("operation_seconds", "token_seconds"):
            check_seconds(name, values[name])
        roles = values["caller_roles"]
        if not isinstance(roles, list | tuple) or not all(isinstance(role, str) for role in roles):
            raise ApiError(400, f"caller_roles must be a list of roles, not {roles!r}")
        if values["realism"] not in (STRICT, RELAXED):
            raise ApiError(400, f"realism must be {STRICT} or {RELAXED}, not {values['realism']!r}")
        check_limits(values["quotas"])
        values |= {"operation_seconds": float(values["operation_seconds"]), "caller_roles": tuple(roles)}
        vars(self).update(values)
        self._store.put(_KIND, _NAME, values)
