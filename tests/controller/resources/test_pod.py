"""The pod's life on the emulated cloud: made, searched for, refused, lost, adopted, stopped, deleted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from controller.clock import Interrupted
from controller.errors import BudgetSpent, CloudError
from controller.plan.pod import node_resource
from controller.reconcile import destroy, reconcile
from controller.resource import Absent, Diff, Pending
from controller.resources.node import Node
from controller.verdict import PodSeen
from tests.controller.localcloud.harness import until
from tests.controller.resources.conftest import Project

A, B = "us-central1-a", "us-east1-b"
TWO_ZONES = (f"tpu.zones=[{B}]", "cloud.bucket_location=us")


@dataclass
class Pod:
    """One pod of a project whose shared parts exist."""

    project: Project
    node: Node

    def up(self) -> Node:
        return reconcile([self.node], self.project.world)[self.node.id]

    def down(self) -> None:
        destroy([self.node], self.project.world)

    def look(self) -> Any:
        return self.node.observe(self.project.world, {})

    def asked(self) -> list[str]:
        """Zone and tier of every request for a pod of ours."""
        return [f"{r['path'].split('/')[6]} {_tier(r['body'])}" for r in self.creations()]

    def creations(self) -> list[dict[str, Any]]:
        log = self.project.cloud.log()
        name = self.node.name
        return [
            r
            for r in log
            if r["method"] == "POST" and name in (r["query"].get("nodeId"), r["query"].get("queuedResourceId"))
        ]

    def left(self) -> list[str]:
        """What of this pod exists: nodes, queued resources, disks."""
        state = self.project.cloud.ok("GET", "emulator/state")
        names = [*state["node"], *state["queued"], *(name for name in state["compute"] if "/disks/" in name)]
        return sorted(name.partition("/locations/")[2] or name for name in names if self.node.name in name)

    @property
    def notes(self) -> str:
        return "\n".join(self.project.notes)


def _tier(body: dict[str, Any]) -> str:
    for word in ("spot", "guaranteed", "reservationName", "provisioningModel"):
        if word in body:
            return word
    found = [word for word, true in body["schedulingConfig"].items() if true]
    return found[0] if found else "on_demand"


def pod(project: Project, *overrides: str, **changes: Any) -> Pod:
    (project.folder / "keys").mkdir(exist_ok=True)
    project.world.draw = lambda: 0.0
    one = ("tpu=v5litepod_8", f"tpu.zone={A}", f"tpu.name={project.tag}-pod")
    words = (*one, *overrides)
    project.cloud.ok("DELETE", "emulator/faults")
    project.settle(*(word for word in words if word != "tpu.adopt=true"))  # the network is there in any case
    node = node_resource(project.config(*words), ())
    return Pod(project, replace(node, **changes))


WAYS = pytest.mark.parametrize("way", ["node", "queued"])


@WAYS
def test_a_pod_is_made_once_and_deleted(project: Project, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}")
    assert isinstance(made.look(), Absent)
    first = made.up()
    assert (first.state, first.zone, first.capacity, first.workers) == ("READY", A, "spot", 1)
    assert made.up().uid == first.uid
    assert len(made.creations()) == 1
    assert first.ours
    made.down()
    assert made.left() == []
    assert isinstance(made.look(), Absent)


@WAYS
def test_a_stock_out_is_asked_again(project: Project, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}")
    project.fault(kind="stockout", times=2, at="request")
    assert made.up().state == "READY"
    assert len(made.creations()) == 3
    assert "no capacity in us-central1-a (spot) (attempt 1)" in made.notes
    assert "asking again in" in made.notes
    made.down()


def test_pauses_double_and_are_spread(project: Project) -> None:
    made = pod(project, "tpu.provisioner=node", max_create_attempts=4)
    project.world.draw = lambda: 1.0
    project.clock.slept.clear()
    project.fault(kind="stockout", times=4, at="request")
    with pytest.raises(BudgetSpent, match=r"after 4 attempts; add zones to tpu\.zones"):
        made.up()
    assert project.clock.slept == [pytest.approx(0.01 * factor) for factor in (2, 4, 8)]
    assert made.left() == []


@WAYS
def test_a_quota_is_not_asked_again(project: Project, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}")
    project.fault(kind="quota")
    with pytest.raises(CloudError, match=r"Quota limit .* Limit: 0 in zone us-central1-a.*request quota at") as refused:
        made.up()
    assert not isinstance(refused.value, BudgetSpent)
    assert len(made.creations()) == 1
    assert made.left() == []


def test_a_quota_that_turns_up_late_is_a_quota(project: Project) -> None:
    made = pod(project, "tpu.provisioner=queued")
    project.fault(kind="quota", at="operation")
    with pytest.raises(CloudError, match="no quota for v5litepod-8"):
        made.up()
    assert made.left() == []


@WAYS
def test_permission_is_not_asked_again(project: Project, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}", *TWO_ZONES)
    project.fault(kind="permission")
    with pytest.raises(CloudError, match=r"denied on .*three causes: you lack roles/tpu\.admin, cloud\.project"):
        made.up()
    assert made.asked() == [f"{A} spot"]


@WAYS
def test_an_unsupported_runtime_names_the_key(project: Project, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}", "tpu.runtime_version=v2-alpha")
    with pytest.raises(CloudError, match=r'Runtime version "v2-alpha" unknown.*set tpu\.runtime_version to null'):
        made.up()
    assert len(made.creations()) == 1


@WAYS
def test_an_operation_that_fails_late_leaves_nothing(project: Project, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}")
    project.fault(kind="failure", message="Something broke in the data centre")
    with pytest.raises(CloudError, match="Something broke in the data centre"):
        made.up()
    assert made.left() == []


@WAYS
def test_the_next_zone_is_asked_at_once(project: Project, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}", *TWO_ZONES)
    project.fault(kind="stockout", times=9, zone=A, at="request")
    assert made.up().zone == B
    assert made.asked() == [f"{A} spot", f"{B} spot"]
    assert f"asking for v5litepod-8 in {B} (spot)" in made.notes
    assert "asking again" not in made.notes
    assert made.up().zone == B  # found there, and left there
    assert made.node.seen(project.world) == PodSeen("READY", health="HEALTHY")
    made.down()
    assert made.left() == []


def test_the_next_tier_is_asked_at_once(project: Project) -> None:
    made = pod(project, "tpu.provisioner=node", "tpu.capacity=[on_demand,spot]", *TWO_ZONES)
    project.fault(kind="stockout", times=9, capacity="on_demand", at="request")
    assert made.up().capacity == "spot"
    assert made.asked() == [f"{A} on_demand", f"{A} spot"]
    assert made.up().capacity == "spot"
    made.down()


def test_a_quota_rules_its_place_out(project: Project) -> None:
    made = pod(project, "tpu.provisioner=queued", *TWO_ZONES)
    project.fault(kind="quota", zone=A, times=9)
    project.fault(kind="stockout", zone=B, times=1, at="request")
    assert made.up().zone == B
    assert made.asked() == [f"{A} spot", f"{B} spot", f"{B} spot"]
    made.down()


def test_a_request_that_waits_too_long_gives_way_to_the_next_zone(project: Project) -> None:
    made = pod(project, "tpu.provisioner=queued", "tpu.create_minutes=0.005", *TWO_ZONES)
    project.fault(kind="stockout", times=1000, zone=A)
    assert made.up().zone == B
    assert "still waiting for resources after" in made.notes
    assert made.left() == [f"{B}/nodes/{made.node.name}", f"{B}/queuedResources/{made.node.name}"]
    made.down()


def test_another_controller_goes_on_waiting_and_then_elsewhere(project: Project) -> None:
    made = pod(project, "tpu.provisioner=queued", "tpu.create_minutes=0.01", *TWO_ZONES)
    project.fault(kind="stockout", times=1000, zone=A)
    place = made.node.places[0]
    search = made.node._search(project.world)  # as one that was killed while it waited
    search.makers[True].create(project.world, search.order, place)
    assert isinstance(made.look(), Pending)
    assert made.up().zone == B
    made.down()


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED"])
def test_a_dead_request_is_deleted_and_made_again(project: Project, state: str) -> None:
    made = pod(project, "tpu.provisioner=queued")
    project.fault(kind="queued", state=state, message="There is no more capacity")
    search = made.node._search(project.world)
    search.makers[True].create(project.world, search.order, made.node.places[0])
    until(lambda: getattr(made.look(), "state", "") == state, f"the request is {state}")
    assert made.up().state == "READY"
    assert f"the node is {state.lower()}: deleting and creating it again" in made.notes
    made.down()


def test_an_expired_request_is_deleted(project: Project) -> None:
    made = pod(project, "tpu.provisioner=queued", valid_until_seconds=0.2, max_create_attempts=2)
    project.fault(kind="stockout", times=100000)
    with pytest.raises(BudgetSpent, match="no capacity"):
        made.up()
    assert len(made.creations()) == 2
    assert made.left() == []


def test_what_still_waits_is_deleted_with_the_pod(project: Project) -> None:
    made = pod(project, "tpu.provisioner=queued")
    project.fault(kind="stockout", times=100000)
    search = made.node._search(project.world)
    search.makers[True].create(project.world, search.order, made.node.places[0])
    assert isinstance(made.look(), Pending)
    made.down()
    assert made.left() == []


def test_whoever_stops_waiting_is_told_that_the_request_stays(project: Project) -> None:
    made = pod(project, "tpu.provisioner=queued")
    project.fault(kind="stockout", times=100000)
    project.clock.interrupt_at = 3
    with pytest.raises(Interrupted):
        made.node.apply(project.world, {}, Diff("create"))
    assert "the request stays in the queue: `slipway up` goes on waiting, `slipway down` takes it back" in made.notes
    assert isinstance(made.look(), Pending)
    made.down()


@WAYS
def test_a_preempted_pod_is_replaced(project: Project, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}")
    first = made.up()
    project.fault(kind="preempted", after_seconds=0)
    until(lambda: made.look().state == "PREEMPTED", "the preemption")
    assert first.seen(project.world).state == "PREEMPTED"
    second = made.up()
    assert second.uid != first.uid
    assert first.seen(project.world).replaced
    made.down()
    assert made.left() == []


@WAYS
def test_another_count_of_workers_is_an_error_that_explains_itself(project: Project, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}")
    project.fault(kind="endpoints", endpoints=2)
    with pytest.raises(CloudError, match=r"says that v5litepod-8 has 1 worker, Google gave 2") as refused:
        made.up()
    assert "tpu.accelerator_type" in str(refused.value)
    assert len(made.creations()) == 1
    assert [f.check for f in made.node.findings(made.look())] == ["endpoints"]
    made.down()
    assert made.left() == []


def foreign(made: Pod, kind: str = "v5litepod-1") -> None:
    """Someone else's pod of the same name."""
    body = made.project.cloud.node_body(made.node.network, kind)
    body["networkConfig"]["subnetwork"] = made.node.subnetwork
    made.project.cloud.act("POST", f"tpu/v2/projects/slipway-local/locations/{A}/nodes?nodeId={made.node.name}", body)


def test_a_name_that_is_taken_is_refused_and_left_alone(project: Project) -> None:
    made = pod(project)
    foreign(made)
    with pytest.raises(CloudError, match=r"was not made by slipway and differs .*set tpu\.name to another"):
        made.up()
    assert len(made.creations()) == 1  # the other one's
    made.down()
    assert made.left() == [f"{A}/nodes/{made.node.name}"]


def test_an_adopted_pod_is_used_and_left(project: Project) -> None:
    made = pod(project, "tpu.adopt=true")
    foreign(made, "v5litepod-8")
    node = made.up()
    assert (node.state, node.ours) == ("READY", False)
    made.down()
    assert made.left() == [f"{A}/nodes/{made.node.name}"]
    assert len(made.creations()) == 1


def test_there_must_be_something_to_adopt(project: Project) -> None:
    made = pod(project, "tpu.adopt=true")
    with pytest.raises(CloudError, match=r"there is no pod .* in us-central1-a; tpu\.adopt=true uses one that exists"):
        made.up()
    assert [f.severity for f in made.node.findings(made.look())] == ["error"]
    assert made.creations() == []


def test_an_adopted_pod_must_be_of_the_type(project: Project) -> None:
    made = pod(project, "tpu.adopt=true")
    foreign(made, "v5litepod-1")
    with pytest.raises(CloudError, match=r"accelerator_type: v5litepod-1 -> v5litepod-8.*never changed"):
        made.up()
    assert made.left() == [f"{A}/nodes/{made.node.name}"]


@WAYS
def test_a_stopped_pod_is_started_and_keeps_its_disk(project: Project, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}", "tpu.capacity=on_demand")
    first = made.up()
    assert first.cannot_stop == ""
    first.stop(project.world)
    assert first.seen(project.world).state == "STOPPED"
    again = made.up()
    assert (again.state, again.uid) == ("READY", first.uid)
    assert "the node is stopped: starting it" in made.notes
    made.down()


def test_a_stopped_pod_for_which_there_is_no_room_is_made_anew(project: Project) -> None:
    made = pod(project, "tpu.provisioner=node", "tpu.capacity=on_demand")
    first = made.up()
    first.stop(project.world)
    project.fault(kind="stockout", times=1)
    assert made.up().uid != first.uid
    assert "no capacity to start it in us-central1-a" in made.notes
    made.down()


def test_spot_pods_and_slices_of_several_vms_do_not_stop(project: Project) -> None:
    made = pod(project)
    assert made.node.cannot_stop == "Google stops no spot pods; `slipway down` deletes it"
    assert "pods of one VM only" in replace(made.node, workers=4, capacity="on_demand").cannot_stop


@pytest.mark.parametrize(
    ("kind", "zone", "disk"),
    [("v5litepod_8", A, "pd-balanced"), ("v6e_8", "us-east5-b", "hyperdisk-balanced")],
)
def test_a_data_disk_is_made_attached_and_deleted(project: Project, kind: str, zone: str, disk: str) -> None:
    made = pod(project, f"tpu={kind}", f"tpu.zone={zone}", "tpu.data_disk_gb=100")
    made.up()
    name = f"projects/slipway-local/zones/{zone}/disks/{made.node.name}-data"
    found = project.cloud.ok("GET", "emulator/state")["compute"][name]
    assert (found["sizeGb"], found["type"].rpartition("/")[2]) == ("100", disk)
    made.down()
    assert made.left() == []


def test_a_data_disk_outlives_a_preemption_and_no_vain_attempt(project: Project) -> None:
    made = pod(project, "tpu.provisioner=node", "tpu.data_disk_gb=100", *TWO_ZONES)
    project.fault(kind="stockout", zone=A, at="request")
    assert made.up().zone == B
    disks = [name for name in made.left() if "/disks/" in name]
    assert disks == [f"projects/slipway-local/zones/{B}/disks/{made.node.name}-data"]
    project.fault(kind="preempted", after_seconds=0)
    until(lambda: made.look().state == "PREEMPTED", "the preemption")
    project.fault(kind="stockout", zone=A, at="request")
    made.up()
    assert [name for name in made.left() if "/disks/" in name] == disks
    made.down()
    assert made.left() == []


def test_flex_start_is_asked_for_through_the_newer_api(project: Project) -> None:
    made = pod(project, "tpu.capacity=flex_start")
    assert made.up().capacity == "flex_start"
    [creation] = made.creations()
    assert "/v2alpha1/" in creation["path"]
    assert creation["body"]["provisioningModel"] == "FLEX_START"
    assert made.up().state == "READY"
    made.down()
    assert made.left() == []


def test_what_is_worth_saying_of_a_pod_that_is_there(project: Project) -> None:
    made = pod(project)
    found = replace(made.node, endpoints=(), labels=())
    assert [f.check for f in made.node.findings(found)] == ["foreign_pod"]
    ill = replace(found, labels=(("managed-by", "slipway"),), health="UNHEALTHY_TENSORFLOW")
    [finding] = made.node.findings(ill)
    assert str(finding).startswith("tpu.name: Google calls the pod unhealthy_tensorflow")
