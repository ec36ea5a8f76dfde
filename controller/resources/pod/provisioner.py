"""What is ordered, what is found, and the one small interface between them.

Two ways to a slice are implemented: TPU nodes (`node.py`) and queued resources (`queued.py`). Google offers new
generations (7x) through Compute Engine alone: that would be a third, with the same three methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from controller.recovery.diagnosis import Symptom

if TYPE_CHECKING:
    from controller.context import Context

WAITING = frozenset({"CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES"})
"""States of a queued request that has got nothing yet; Google uses the last two for the same thing."""


@dataclass(frozen=True)
class Endpoint:
    """One worker, as `networkEndpoints` lists it."""

    worker: int
    internal: str
    external: str | None


@dataclass(frozen=True)
class Place:
    """One possibility to ask for: a zone, a capacity tier, and the way that tier is asked for."""

    zone: str
    capacity: str
    subnetwork: str
    queued: bool = False

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]

    def __str__(self) -> str:
        return f"{self.zone} ({self.capacity})"


@dataclass(frozen=True)
class Order:
    """What is wanted, wherever it is made. `data_disk` is the name of an existing disk of the zone, or None."""

    name: str
    accelerator_type: str
    runtime_version: str
    network: str
    external_ip: bool
    service_account: str
    valid_until_seconds: float | None = None
    reservation: str | None = None
    data_disk: str | None = None
    data_disk_gb: int | None = None


@dataclass(frozen=True)
class Slice:
    """What is there under a name in a zone.

    `state` is Google's word, of the node or else of the queued request. `pending` says that it will change by itself.
    `created` is in seconds since the epoch; `message` is Google's, where a request has failed.
    `symptoms` come with the times at which they showed; `maintenance` is PENDING or ONGOING where some is announced.
    """

    zone: str
    state: str
    pending: bool
    queued: bool
    accelerator_type: str
    runtime_version: str
    capacity: str
    network: str
    subnetwork: str
    external_ip: bool
    uid: str
    created: float
    endpoints: tuple[Endpoint, ...]
    ssh_keys: str
    labels: tuple[tuple[str, str], ...]
    health: str = ""
    health_words: str = ""
    symptoms: tuple[tuple[float, Symptom], ...] = ()
    maintenance: str = ""
    code: str = ""
    message: str = ""


class Provisioner(Protocol):
    """One way to a slice."""

    def observe(self, world: Context, name: str, zone: str) -> Slice | None:
        """What this way has made there; None: nothing."""
        ...

    def create(self, world: Context, order: Order, place: Place) -> None:
        """Ask for it. Returns once it exists or waits in a queue.

        Raises:
            GoogleError: Google's refusal, at once or when the work had begun.
        """
        ...

    def delete(self, world: Context, name: str, zone: str) -> None:
        """Remove it; no error when it is gone already."""
        ...
