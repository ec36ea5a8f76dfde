"""A pod of a project, settled against the emulated cloud."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from controller.plan.build import node_resource
from controller.reconcile import destroy, reconcile
from controller.resources.pod.instance_states import TAKEN_STATES
from controller.resources.pod.node import Node
from controller.resources.pod.provisioner import Place, Provisioner, SliceSpec
from tests.controller.localcloud.harness import wait_for
from tests.controller.resources.conftest import EmulatedProject

A, B = "us-central1-a", "us-east1-b"
LOST_STATES = TAKEN_STATES | {"ABSENT"}
"""Of a pod that is preempted: the VMs of a group may be deleted before anybody looks."""
TWO_ZONES = (f"tpu.fallback_zones=[{B}]", "cloud.bucket_location=us")


@dataclass
class Pod:
    """One pod of a project whose shared parts exist."""

    project: EmulatedProject
    node: Node

    def up(self) -> Node:
        return reconcile([self.node], self.project.context)[self.node.id]

    def down(self) -> None:
        destroy([self.node], self.project.context)

    def observe(self) -> Any:
        return self.node.observe(self.project.context, {})

    def asked(self) -> list[str]:
        """Zone and tier of every request for a pod of ours."""
        return [f"{r['path'].split('/')[6]} {_tier(r['body'])}" for r in self.creation_requests()]

    def creation_requests(self) -> list[dict[str, Any]]:
        log = self.project.cloud.request_log()
        name = self.node.name
        return [
            r
            for r in log
            if r["method"] == "POST" and name in (r["query"].get("nodeId"), r["query"].get("queuedResourceId"))
        ]

    def leftovers(self) -> list[str]:
        """What of this pod exists: nodes, queued resources, disks."""
        state = self.project.cloud.call_ok("GET", "emulator/state")
        names = [*state["node"], *state["queued"], *(name for name in state["compute"] if "/disks/" in name)]
        return sorted(name.partition("/locations/")[2] or name for name in names if self.node.name in name)

    def machines(self) -> list[str]:
        """What of this pod exists on Compute Engine, without its disk: full names."""
        state = self.project.cloud.call_ok("GET", "emulator/state")
        return sorted(name for name in state["compute"] if self.node.name in name and "/disks/" not in name)

    @property
    def notes(self) -> str:
        return "\n".join(self.project.notes)


def request_slice(made: Pod, maker: Provisioner, spec: SliceSpec, place: Place) -> None:
    """Send the requests that make a slice, until Google has answered them."""
    is_answered = maker.create(made.project.context, made.node.name, spec, place)
    if is_answered is not None:
        wait_for(is_answered, "the answer")


def _tier(body: dict[str, Any]) -> str:
    for word in ("spot", "guaranteed", "reservationName", "provisioningModel"):
        if word in body:
            return word
    found = [word for word, true in body["schedulingConfig"].items() if true]
    return found[0] if found else "on_demand"


def pod(project: EmulatedProject, *overrides: str, **changes: Any) -> Pod:
    project.context.random_float, project.network = lambda: 0.0, "of-pods"
    words = ("tpu=v5litepod_8", f"tpu.zone={A}", f"tpu.name={project.tag}-pod", *overrides)
    project.cloud.call_ok("DELETE", "emulator/faults")
    config = project.config(*words)
    tpu = config.tpu.model_copy(update={"adopt": False})  # the network is there in any case
    project.create_for_pods(config.model_copy(update={"tpu": tpu}))
    return Pod(project, replace(node_resource(config, ()), **changes))


ZONE = "us-east5-b"
GROUP = ("tpu=v6e_8_ce", f"tpu.zone={ZONE}")
INSTANCE = ("tpu=v6e_8", "tpu.plane=compute_engine", f"tpu.zone={ZONE}")
EVERY_WAY = pytest.mark.parametrize(
    "words",
    [("tpu.provisioner=node",), ("tpu.provisioner=queued",), GROUP, INSTANCE],
    ids=["node", "queued", "mig", "instance"],
)
"""By what API of which plane a pod is asked for."""
PROVISIONERS = pytest.mark.parametrize("way", ["node", "queued"])
"""By what API a pod is asked for."""
