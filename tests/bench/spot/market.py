"""A simulated spot market, and as much of Google's APIs and of a pod as the controller meets there. No time passes.

The market is a list of moments at which whoever has a pod loses it, and of spans without capacity.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.core.clock import Clock, iso_timestamp
from controller.gcp.errors import ConflictError, NotFoundError

EPOCH = 1_790_000_000.0
"""When simulations begin, seconds since the epoch."""


class Over(BaseException):
    """The simulated time has come to its end. Nothing on the way may swallow it."""


@dataclass(frozen=True)
class Market:
    """Times in seconds since the beginning."""

    seconds: float
    losses: tuple[float, ...]
    droughts: tuple[tuple[float, float], ...]

    def next_loss(self, time: float) -> float:
        return next((loss for loss in self.losses if loss > time), float("inf"))

    def room_from(self, time: float) -> float:
        """The first moment, not before `time`, at which there is capacity."""
        return next((end for begin, end in self.droughts if begin <= time < end), time)


def draw_market(seed: int, hours: float, minutes_between: float, longest_drought: float, chance: float) -> Market:
    """Losses come as a Poisson process; each begins a drought with a chance, uniform up to the longest (hours)."""
    draw, time = random.Random(seed), 0.0
    losses: list[float] = []
    droughts: list[tuple[float, float]] = []
    while (time := time + draw.expovariate(1 / (60 * minutes_between))) < hours * 3600:
        losses.append(time)
        if draw.random() < chance:
            droughts.append((time, time + draw.uniform(0, 3600 * longest_drought)))
    return Market(hours * 3600, tuple(losses), tuple(droughts))


class Simulated(Clock):
    """Sleeping moves the time on."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.elapsed, self._end = 0.0, seconds

    def now(self) -> float:
        return EPOCH + self.elapsed

    def monotonic(self) -> float:
        return self.elapsed

    def sleep(self, seconds: float) -> None:
        self.until(self.elapsed + seconds)

    def until(self, elapsed: float) -> None:
        """Raises Over at the end."""
        self.elapsed = max(self.elapsed, min(elapsed, self._end))
        if elapsed >= self._end:
            raise Over


@dataclass
class Pod:
    """One request in Google's queue, and the node that comes of it."""

    body: dict[str, Any]
    asked: float
    room: float
    ready: float
    lost: float
    deleted: float = float("inf")
    set_up: bool = False
    started: set[int] = field(default_factory=set)

    def state(self, now: float) -> str:
        if now < self.room:
            return "WAITING_FOR_RESOURCES"
        return "CREATING" if now < self.ready else "READY" if now < self.lost else "PREEMPTED"

    def paid(self, now: float) -> float:
        """Seconds from READY until it was lost or deleted."""
        return max(0.0, min(now, self.lost, self.deleted) - self.ready)


class Google:
    """Queued resources and nodes on a market, and a bucket; in the place of `controller.gcp.client.Google`."""

    def __init__(self, market: Market, clock: Simulated, create_seconds: float, delete_seconds: float) -> None:
        self.market, self.clock = market, clock
        self._create_seconds, self._delete_seconds = create_seconds, delete_seconds
        self.objects: dict[str, bytes] = {}
        self.pods: list[Pod] = []

    @property
    def pod(self) -> Pod | None:
        """The one that there is; of several requests, which a search may hold for a while, the one that is READY."""
        held = [pod for pod in self.pods if pod.deleted == float("inf")]
        return max(held, key=lambda pod: pod.state(self.clock.elapsed) == "READY", default=None)

    def root(self, api: str) -> str:
        return f"https://{api}.googleapis.com/"

    def paid(self) -> float:
        return sum(pod.paid(self.clock.elapsed) for pod in self.pods)

    def call(self, api: str, method: str, **given: Any) -> dict[str, Any]:
        match method.rpartition("projects.locations.")[2] or method:
            case "queuedResources.get":
                return self._queued(given["name"])
            case "nodes.get":
                return self._node(given["name"])
            case "queuedResources.create":
                room = self.market.room_from(self.clock.elapsed)
                ready = room + self._create_seconds
                lost = self.market.next_loss(ready)
                self.pods.append(Pod(given["body"], self.clock.elapsed, room, ready, lost))
                return {"name": "operation", "done": True}
            case "queuedResources.delete":
                pod = self._there(given["name"])
                pod.deleted = self.clock.elapsed
                self.clock.sleep(self._delete_seconds)
                return {"name": "operation", "done": True}
            case "objects.list":
                return self._list(given["prefix"], given.get("delimiter", ""))
        raise AssertionError(f"this cloud knows no {api} {method}")

    def list_all(self, api: str, method: str, items: str, **given: Any) -> Iterator[dict[str, Any]]:
        yield from self.call(api, method, **given)[items]

    def download(self, bucket: str, name: str) -> bytes:
        if name not in self.objects:
            raise NotFoundError("storage objects.get", 404, "notFound", name)
        return self.objects[name]

    def upload(self, bucket: str, name: str, content: bytes, *, generation: int | None = None) -> dict[str, Any]:
        if generation == 0 and name in self.objects:
            raise ConflictError("storage objects.insert", 412, "conditionNotMet", name)
        self.objects[name] = content
        return {"name": name}

    def _list(self, prefix: str, delimiter: str) -> dict[str, Any]:
        names = sorted(name for name in self.objects if name.startswith(prefix))
        rest = [name.removeprefix(prefix) for name in names]
        folders = {part.partition(delimiter)[0] for part in rest if delimiter and delimiter in part}
        prefixes = sorted(f"{prefix}{folder}{delimiter}" for folder in folders)
        return {
            "items": [{"name": name, "updated": iso_timestamp(self.clock.now())} for name in names],
            "prefixes": prefixes,
        }

    def _there(self, name: str) -> Pod:
        if self.pod is None:
            raise NotFoundError("tpu", 404, "NOT_FOUND", name)
        return self.pod

    def _queued(self, name: str) -> dict[str, Any]:
        pod = self._there(name)
        node = pod.state(self.clock.elapsed)
        state = {"READY": "ACTIVE", "CREATING": "PROVISIONING", "PREEMPTED": "SUSPENDED"}.get(node, node)
        return {**pod.body, "name": name, "state": {"state": state}, "createTime": iso_timestamp(EPOCH + pod.asked)}

    def _node(self, name: str) -> dict[str, Any]:
        pod = self._there(name)
        if (state := pod.state(self.clock.elapsed)) == "WAITING_FOR_RESOURCES":
            raise NotFoundError("tpu", 404, "NOT_FOUND", name)
        endpoints = [{"ipAddress": f"10.0.0.{i + 2}", "accessConfig": {}} for i in range(4)]
        fields = {
            "name": name,
            "id": f"{len(self.pods)}",
            "createTime": iso_timestamp(EPOCH + pod.room),
            "state": state,
        }
        spot = {"schedulingConfig": {"spot": True}}
        return {**pod.body["tpu"]["nodeSpec"][0]["node"], **spot, **fields, "networkEndpoints": endpoints}


class Fleet:
    """The agents of a pod's workers, all of one mind."""

    def __init__(self, pod: Pod, workers: int) -> None:
        self._pod, self._workers = pod, workers

    def __len__(self) -> int:
        return self._workers

    def call_all(
        self, command: str, payload: dict[str, Any] | Sequence[dict[str, Any]], workers: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        given = payload if isinstance(payload, dict) else payload[0]
        if command == "start":
            self._pod.started.add(given["attempt"])
        running = given.get("attempt") in self._pod.started
        return [{"active": None, "state": "running" if running else "absent"} for _ in range(self._workers)]

    def close(self) -> None:
        return
