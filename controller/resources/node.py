"""The TPU node: one slice, all of its VMs.

https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from controller.errors import BudgetSpent, CloudError
from controller.google import Conflict, GoogleError, NotFound
from controller.operations import OperationFailed, wait_rpc
from controller.resource import Absent, Diff, Have, Pending, Resource, Scope
from controller.resources.bucket import LABEL
from controller.resources.compute import leaf

if TYPE_CHECKING:
    from controller.world import World

SETTLING = frozenset({"CREATING", "RESTARTING", "REIMAGING", "DELETING", "REPAIRING", "STOPPING", "STARTING",
                      "HIDING", "UNHIDING", "UNKNOWN"})  # fmt: skip
TAG = "slipway"
"""Network tag of our workers, which the firewall rules aim at."""
SCOPE = "https://www.googleapis.com/auth/cloud-platform"


@dataclass(frozen=True)
class Endpoint:
    """One worker, as `networkEndpoints` lists it."""

    worker: int
    internal: str
    external: str | None


@dataclass(frozen=True, kw_only=True)
class Node(Resource):
    """A slice that is READY. Preempted, stopped or of another make means: delete it and create it anew."""

    kind: ClassVar[str] = "node"
    scope: ClassVar[Scope] = "pod"
    fixed: ClassVar[frozenset[str]] = frozenset(
        {"state", "accelerator_type", "runtime_version", "capacity", "network", "subnetwork", "external_ip"}
    )
    zone: str = field(compare=False)
    workers: int = field(compare=False)
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
    # observed only
    uid: str = field(default="", compare=False)
    endpoints: tuple[Endpoint, ...] = field(default=(), compare=False)
    ssh_keys: str = field(default="", compare=False)
    labels: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def title(self) -> str:
        return f"TPU {self.accelerator_type} ({self.workers} workers) {self.name}"

    @property
    def patience(self) -> float:
        return self.create_seconds

    @property
    def ours(self) -> bool:
        return set(LABEL.items()) <= set(self.labels)

    def observe(self, world: World, have: Have) -> Absent | Pending | Self:
        try:
            answer = world.google.call("tpu", "projects.locations.nodes.get", name=self.path(world))
        except NotFound:
            return Absent()
        state = answer.get("state", "UNKNOWN")
        if state in SETTLING:
            return Pending(state.lower())
        seen = self._read(answer)
        if state == "READY" and len(seen.endpoints) != self.workers:
            raise CloudError(
                f"{self.title}: the table says {self.workers} workers, Google gave {len(seen.endpoints)}; "
                "conf/tpu_types.yaml is wrong about this type, please report it"
            )
        return seen

    def apply(self, world: World, have: Have, diff: Diff) -> None:
        if diff.action == "create":
            self._create(world)
            return
        seen = self.observe(world, have)
        if not isinstance(seen, Node):
            return
        if not seen.ours:
            words = "; ".join(map(str, diff.changes))
            raise CloudError(f"node {self.name} was not made by slipway and differs ({words}); set tpu.name to another")
        if seen.state != "READY":
            world.events.emit("note", self.id, f"the node is {seen.state.lower()}: deleting and creating it again")
        self.destroy(world)

    def destroy(self, world: World) -> None:
        seen = self.observe(world, {})
        if isinstance(seen, Node) and not seen.ours:
            return
        try:
            operation = world.google.call("tpu", "projects.locations.nodes.delete", name=self.path(world))
        except NotFound:
            return
        wait_rpc(world, "tpu", operation, "projects.locations.operations.get")

    def lost(self, world: World) -> str:
        """Why this node, once READY, is so no more; empty while it is. A later incarnation does not count as it."""
        seen = self.observe(world, {})
        if isinstance(seen, Absent):
            return "the node is gone"
        if isinstance(seen, Pending):
            return f"the node is {seen.why}"
        if self.uid and seen.uid != self.uid:
            return "the node was replaced"
        return "" if seen.state == "READY" else f"the node is {seen.state.lower()}"

    def path(self, world: World) -> str:
        return f"{self._parent(world)}/nodes/{self.name}"

    def _parent(self, world: World) -> str:
        return f"projects/{world.project}/locations/{self.zone}"

    def _create(self, world: World) -> None:
        """Ask until there is capacity; any other refusal is final."""
        for attempt in range(1, self.max_create_attempts + 1):
            try:
                operation = world.google.call(
                    "tpu", "projects.locations.nodes.create", parent=self._parent(world), nodeId=self.name,
                    body=self.body(world),
                )  # fmt: skip
                wait_rpc(world, "tpu", operation, "projects.locations.operations.get")
                return
            except Conflict:
                return  # it came into being meanwhile; the next look decides
            except GoogleError as error:
                if not is_stockout(error):
                    raise
                seconds = min(60.0, world.pace * 2.0**attempt)
                world.events.emit(
                    "note", self.id, f"no capacity in {self.zone} (attempt {attempt}); again in {seconds:.0f} s"
                )
                world.clock.sleep(seconds)
        raise BudgetSpent(
            f"no {self.capacity} {self.accelerator_type} in {self.zone} after {self.max_create_attempts} attempts; "
            "try another tpu.zone or tpu.capacity, or raise recovery.max_create_attempts"
        )

    def body(self, world: World) -> dict[str, Any]:
        """What create is sent; field for field what `gcloud compute tpus tpu-vm create` sends."""
        region = self.zone.rpartition("-")[0]
        return {
            "acceleratorType": self.accelerator_type,
            "runtimeVersion": self.runtime_version,
            "labels": dict(LABEL),
            "metadata": {"ssh-keys": world.ssh_key_line()},
            "networkConfig": {
                "enableExternalIps": self.external_ip,
                "network": f"projects/{world.project}/global/networks/{self.network}",
                "subnetwork": f"projects/{world.project}/regions/{region}/subnetworks/{self.subnetwork}",
            },
            "schedulingConfig": {"preemptible": False, "reserved": False, "spot": self.capacity == "spot"},
            "serviceAccount": {"email": world.account_email(self.service_account), "scope": [SCOPE]},
            "shieldedInstanceConfig": {"enableSecureBoot": False},
            "tags": [TAG],
        }

    def _read(self, answer: dict[str, Any]) -> Self:
        network = answer.get("networkConfig", {})
        endpoints = tuple(
            Endpoint(i, e.get("ipAddress", ""), e.get("accessConfig", {}).get("externalIp"))
            for i, e in enumerate(answer.get("networkEndpoints", []))
        )
        return replace(
            self,
            accelerator_type=answer.get("acceleratorType", ""),
            runtime_version=answer.get("runtimeVersion", ""),
            capacity="spot" if answer.get("schedulingConfig", {}).get("spot") else "on_demand",
            network=leaf(network.get("network", "")),
            subnetwork=leaf(network.get("subnetwork", "")),
            external_ip=network.get("enableExternalIps", False),
            state=answer.get("state", "UNKNOWN"),
            uid=answer.get("id", "") + answer.get("createTime", ""),
            endpoints=endpoints,
            ssh_keys=answer.get("metadata", {}).get("ssh-keys", ""),
            labels=tuple(sorted(answer.get("labels", {}).items())),
        )


def is_stockout(error: GoogleError) -> bool:
    """Did Google refuse for want of capacity (worth asking again), and not of quota (which is not)?

    Both come as RESOURCE_EXHAUSTED; only their words tell them apart.
    """
    if error.reason == "UNAVAILABLE" and isinstance(error, OperationFailed):
        return True
    return error.reason == "RESOURCE_EXHAUSTED" and "quota" not in error.message.lower()
