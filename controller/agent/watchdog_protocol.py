"""Requests and answers of the watchdog's commands, `set_watchdog` and `watchdog_state` (see `protocol`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from typing import NotRequired


class SetWatchdogRequest(TypedDict):
    project: str
    deletes: list[str]
    delete_permission: str
    projects_api: str
    idle_seconds: NotRequired[float | None]
    seconds_left: NotRequired[float | None]
    bucket: NotRequired[str | None]
    note_object: NotRequired[str]


class WatchdogState(TypedDict):
    """State of the watchdog; `refused` is why a deletion failed."""

    running: bool
    idle_seconds: float | None
    seconds_left: float | None
    refused: str | None


class InstalledWatchdog(WatchdogState):
    """Watchdog with `allowed`: whether the service account may delete the pod, or null if unknown."""

    allowed: bool | None
