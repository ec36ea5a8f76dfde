"""The pod: one slice, all of its VMs, wherever among its places there was room.

How it is made is the business of `controller/provision`; here is what is wanted, what differs, and what may be done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from controller.core.errors import CloudError
from controller.core.finding import Finding
from controller.core.text import counted
from controller.gcp.client import GoogleError
from controller.reconcile.resource import Absent, Diff, Have, Pending, Resource, Scope
from controller.recovery.diagnosis import PodSeen
from controller.resources.pod import data_disk
from controller.resources.pod.node_api import DELETE_SECONDS, TAG, NodeProvisioner, path
from controller.resources.pod.provisioner import WAITING, Endpoint, Order, Place, Provisioner, Slice
from controller.resources.pod.queued_api import QueuedProvisioner
from controller.resources.pod.refusals import classify
from controller.resources.pod.search import Search
from controller.resources.project.bucket import LABEL

if TYPE_CHECKING:
    from controller.context import Context

_UNDELETED = "it is Google that does not finish: run this again later, or set tpu.name to another"

__all__ = ["TAG", "Endpoint", "Node", "Place"]


@dataclass(frozen=True, kw_only=True)
class Node(Resource):
    """A slice that is READY, in any of its places. Preempted or of another make means: delete it and create it anew."""

    kind: ClassVar[str] = "node"
    scope: ClassVar[Scope] = "pod"
    fixed: ClassVar[frozenset[str]] = frozenset(
        {"state", "accelerator_type", "runtime_version", "capacity", "network", "subnetwork", "external_ip", "workers"}
    )
    zone: str = field(compare=False)
    workers: int
    service_account: str = field(compare=False)
    max_create_attempts: int = field(compare=False)
    create_seconds: float = field(compare=False)
    accelerator_type: str
    runtime_version: str
    capacity: str
    network: str
    subnetwork: str
    external_ip: bool
    state: str = "READY"
    places: tuple[Place, ...] = field(default=(), compare=False)
    """Where to ask, in order; empty: in `zone` for `capacity` alone."""
    valid_until_seconds: float | None = field(default=None, compare=False)
    reservation: str | None = field(default=None, compare=False)
    data_disk_gb: int | None = field(default=None, compare=False)
    data_disk_kind: str = field(default="pd-balanced", compare=False)
    adopt: bool = field(default=False, compare=False)
    # observed only
    uid: str = field(default="", compare=False)
    endpoints: tuple[Endpoint, ...] = field(default=(), compare=False)
    ssh_keys: str = field(default="", compare=False)
    labels: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    health: str = field(default="", compare=False)
    created: float = field(default=0.0, compare=False)
    queued: bool = field(default=False, compare=False)

    @property
    def title(self) -> str:
        return f"TPU {self.accelerator_type} ({counted(self.workers, 'worker')}) {self.name}"

    @property
    def patience(self) -> float:
        if any(place.queued for place in self._places) and len(self._places) == 1:
            return self.create_seconds + (self.valid_until_seconds or float("inf"))
        return 2 * self.create_seconds

    @property
    def ours(self) -> bool:
        return not self.adopt and set(LABEL.items()) <= set(self.labels)

    @property
    def zones(self) -> tuple[str, ...]:
        """Where it may be; an observed one is where it is."""
        return (self.zone,) if self.uid else tuple(dict.fromkeys(place.zone for place in self._places))

    def wanted(self) -> dict[str, Any]:
        """Of an adopted pod only what cannot be done without."""
        keys = ("accelerator_type", "state", "workers")
        return {k: v for k, v in super().wanted().items() if not self.adopt or k in keys}

    def diff(self, seen: Absent | Resource) -> Diff:
        return Resource.diff(self._in(seen) if isinstance(seen, Node) else self, seen)

    def findings(self, seen: Any) -> Iterator[Finding]:
        if isinstance(seen, Absent) and self.adopt:
            yield Finding("adopted_exists", "error", "tpu.adopt", self._nothing_to_adopt())
        if not isinstance(seen, Node):
            return
        if self.adopt and self.diff(seen):
            yield Finding("adopted_fits", "error", "tpu.adopt", self._unlike(self.diff(seen)))
        elif not seen.ours and not self.adopt:
            words = f"{self.name} was not made by slipway: it is used and never deleted, as tpu.adopt=true would say"
            yield Finding("foreign_pod", "warning", "tpu.name", words)
        if seen.state == "READY" and seen.workers != self.workers:
            yield Finding("endpoints", "error", "tpu.accelerator_type", self._wrong_count(seen))
        if seen.health.startswith("UNHEALTHY"):
            words = f"Google calls the pod {seen.health.lower()}; if programs do not start there, `slipway down` and up"
            yield Finding("unhealthy", "warning", "tpu.name", words)

    def observe(self, world: Context, have: Have) -> Absent | Pending | Self:
        found = self._look(world)
        if found is None:
            return Absent()
        if found.pending and (self.adopt or self._is_ours(found)) and not self._waited_enough(world, found):
            words = found.state.lower().replace("_", " ")
            why = f"{words} in {found.zone}" if found.queued else words
            return Pending(why, DELETE_SECONDS, _UNDELETED) if found.state == "DELETING" else Pending(why)
        return self._read(found)

    def there(self, world: Context) -> Self | None:
        """What there is, settled or not."""
        found = self._look(world)
        return None if found is None else self._read(found)

    def apply(self, world: Context, have: Have, diff: Diff) -> None:
        """Search for room, or make room for that by deleting what is there, if it is ours; or start it again."""
        found = self._look(world)
        if self.adopt:
            raise CloudError(self._nothing_to_adopt() if found is None else self._unlike(diff))
        if found is None:
            self._search(world).run()
            return
        seen = self._read(found)
        if not self._is_ours(found):
            words = "; ".join(map(str, diff.changes))
            raise CloudError(
                f"node {self.name} in {found.zone} was not made by slipway and differs ({words}); it is left as it is: "
                "set tpu.name to another"
            )
        if seen.state == "READY" and {c.field for c in diff.changes} == {"workers"}:
            raise CloudError(f"{self.title}: {self._wrong_count(seen)}")
        if seen.state == "STOPPED" and self._start(world, seen):
            return
        if seen.state != "READY":
            world.events.note(self.id, f"the node is {seen.state.lower()}: deleting and creating it again")
        self._clear(world)
        waited = found.state in WAITING
        self._search(world).run(after=self._place_of(found) if waited else None)

    def destroy(self, world: Context) -> None:
        if self.adopt:
            return
        self._clear(world)
        for zone in self.zones if self.data_disk_gb else ():
            data_disk.delete(world, self._disk_name, zone)

    def seen(self, world: Context, since: float = 0.0) -> PodSeen:
        """What Google says of this incarnation of the pod now.

        Args:
            since: symptoms that showed before are left out; seconds since the epoch.
        """
        found = self._look(world)
        if found is None:
            return PodSeen("ABSENT")
        return PodSeen(
            state=found.state,
            replaced=bool(self.uid and found.uid and found.uid != self.uid),
            health=found.health,
            health_words=found.health_words,
            symptoms=tuple(symptom for time, symptom in found.symptoms if time >= since),
            maintenance=found.maintenance,
        )

    def discard(self, world: Context, *, elsewhere: bool = False) -> None:
        """Delete what there is of ours, whatever its state; `elsewhere`: and make it anew, the next place first."""
        found = self._look(world)
        self._clear(world)
        if elsewhere and found is not None:
            self._search(world).run(after=self._place_of(found))

    def keys_now(self, world: Context) -> str:
        """The SSH keys that an observed node has by now."""
        found = self._look(world)
        return found.ssh_keys if found else ""

    def path(self, world: Context) -> str:
        """The full name; of a wanted one in the zone that is tried first."""
        return path(world, self.name, self.zone)

    def paths(self, world: Context) -> set[str]:
        """The full names that it may have."""
        return {path(world, self.name, zone) for zone in self.zones}

    def stop(self, world: Context) -> None:
        """Stop an observed node of which `cannot_stop` says nothing."""
        self._nodes.stop(world, self.name, self.zone)

    @property
    def cannot_stop(self) -> str:
        """Why an observed node cannot be stopped; empty if it can: https://cloud.google.com/tpu/docs/managing-tpus-tpu-vm"""
        if self.workers > 1:
            return f"Google stops pods of one VM only, and {self.name} has {self.workers}"
        if self.capacity in ("spot", "preemptible"):
            return f"Google stops no {self.capacity} pods; `slipway down` deletes it"
        return ""

    @property
    def _places(self) -> tuple[Place, ...]:
        return self.places or (Place(self.zone, self.capacity, self.subnetwork),)

    @property
    def _disk_name(self) -> str:
        return f"{self.name[:58]}-data"

    @property
    def _nodes(self) -> NodeProvisioner:
        return NodeProvisioner(self.create_seconds)

    @property
    def _makers(self) -> dict[bool, Provisioner]:
        """By whether they queue."""
        return {True: QueuedProvisioner(self.create_seconds), False: self._nodes}

    def _search(self, world: Context) -> Search:
        order = Order(
            name=self.name,
            accelerator_type=self.accelerator_type,
            runtime_version=self.runtime_version,
            network=self.network,
            external_ip=self.external_ip,
            service_account=self.service_account,
            valid_until_seconds=self.valid_until_seconds,
            reservation=self.reservation,
            data_disk=self._disk_name if self.data_disk_gb else None,
            data_disk_gb=self.data_disk_gb,
        )
        return Search(
            world=world,
            subject=self.id,
            title=self.title,
            order=order,
            places=self._places,
            makers=self._makers,
            max_attempts=self.max_create_attempts,
            create_seconds=self.create_seconds,
            disk_kind=self.data_disk_kind if self.data_disk_gb else None,
        )

    def _look(self, world: Context) -> Slice | None:
        """What is there in any zone: a READY one before one that comes, before one that is dead."""
        found: list[Slice] = []
        for zone in self.zones:
            for maker in self._makers.values():
                seen = maker.observe(world, self.name, zone)
                if seen is not None:
                    found.append(seen)
                    break
            if found and found[-1].state == "READY":
                return found[-1]
        return min(found, key=lambda s: not s.pending, default=None)

    def _clear(self, world: Context) -> None:
        """Delete what is there of ours in any zone, but for data disks."""
        for zone in self.zones:
            for maker in self._makers.values():
                seen = maker.observe(world, self.name, zone)
                if seen is not None and self._is_ours(seen):
                    maker.delete(world, self.name, zone)

    def _start(self, world: Context, seen: Self) -> bool:
        """Start a stopped node rather than make another; False where Google does not do that, or has no room for it."""
        if seen.cannot_stop:
            return False
        world.events.note(self.id, "the node is stopped: starting it")
        try:
            self._nodes.start(world, self.name, seen.zone)
        except GoogleError as error:
            if classify(error.reason, error.message) != "stock_out":
                raise
            world.events.note(self.id, f"no capacity to start it in {seen.zone}: {error.message}")
            return False
        return True

    def _waited_enough(self, world: Context, found: Slice) -> bool:
        """Has a queued request waited so long that the next place is to be tried?"""
        others = len(self._places) > 1
        return others and found.state in WAITING and world.clock.now() - found.created > self.create_seconds

    def _in(self, seen: Node) -> Self:
        """What is wanted of a pod that is where `seen` is."""
        place = self._place_of(seen)
        return replace(self, zone=place.zone, capacity=place.capacity, subnetwork=place.subnetwork)

    def _place_of(self, seen: Node | Slice) -> Place:
        here = [place for place in self._places if place.zone == seen.zone] or list(self._places)
        return next((place for place in here if place.capacity == seen.capacity), here[0])

    def _is_ours(self, found: Slice) -> bool:
        return not self.adopt and set(LABEL.items()) <= set(found.labels)

    def _read(self, found: Slice) -> Self:
        return replace(
            self,
            zone=found.zone,
            workers=len(found.endpoints) if found.state == "READY" else self.workers,
            accelerator_type=found.accelerator_type,
            runtime_version=found.runtime_version,
            capacity=found.capacity,
            network=found.network,
            subnetwork=found.subnetwork,
            external_ip=found.external_ip,
            state=found.state,
            uid=found.uid,
            endpoints=found.endpoints,
            ssh_keys=found.ssh_keys,
            labels=found.labels,
            health=found.health,
            created=found.created,
            queued=found.queued,
        )

    def _wrong_count(self, seen: Node) -> str:
        return (
            f"conf/tpu_types.yaml says that {self.accelerator_type} has {counted(self.workers, 'worker')}, Google gave "
            f"{seen.workers}; the table is wrong about this type or the pod is not whole: `slipway down` deletes it; "
            "please report it, and choose another tpu.accelerator_type meanwhile"
        )

    def _nothing_to_adopt(self) -> str:
        return (
            f"there is no pod {self.name} in {', '.join(self.zones)}; tpu.adopt=true uses one that exists: create it, "
            "change tpu.name or tpu.zone, or set tpu.adopt=false"
        )

    def _unlike(self, diff: Diff) -> str:
        words = "; ".join(map(str, diff.changes))
        return (
            f"pod {self.name} is not what the config says ({words}), and an adopted pod is never changed: change "
            "tpu.accelerator_type or the pod, or set tpu.adopt=false and another tpu.name"
        )
