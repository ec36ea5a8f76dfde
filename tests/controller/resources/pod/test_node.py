"""The pod's life on the emulated cloud: made, lost, adopted, stopped, deleted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller.core.errors import CloudError
from controller.reconcile.resource import Absent
from controller.resources.pod.provisioner import SliceStatus
from controller.resources.pod.tpu_api import nodes
from controller.resources.pod.tpu_api.nodes import parse_node
from tests.controller.localcloud.harness import wait_for
from tests.controller.resources.conftest import EmulatedProject
from tests.controller.resources.fake_pod import EVERY_WAY, INSTANCE, PROVISIONERS, TWO_ZONES, A, B, Pod, pod


@EVERY_WAY
def test_a_pod_is_made_once_replaced_when_it_is_preempted_and_deleted(
    project: EmulatedProject, words: tuple[str, ...]
) -> None:
    made = pod(project, *words)
    assert isinstance(made.observe(), Absent)
    first = made.up()
    assert (first.is_ready, first.is_managed) == (True, True)
    assert (first.place.zone, first.place.capacity) == (made.node.place.zone, "spot")
    assert len(first.status.endpoints) == first.status.spec.workers == made.node.spec.workers
    assert not made.node.diff(first)
    assert made.up().status.uid == first.status.uid
    assert len(made.creation_requests()) == (words[0].startswith("tpu.provisioner"))
    project.inject_fault(kind="preempted", after_seconds=0)
    wait_for(lambda: first.pod_seen(project.context).state in ("PREEMPTED", "ABSENT"), "the preemption")
    second = made.up()
    assert second.is_ready
    assert second.status.uid != first.status.uid
    assert first.pod_seen(project.context).replaced
    made.down()
    assert made.leftovers() == made.machines() == []
    assert isinstance(made.observe(), Absent)


@PROVISIONERS
def test_another_count_of_workers_is_an_error_that_explains_itself(project: EmulatedProject, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}")
    project.inject_fault(kind="endpoints", endpoints=2)
    with pytest.raises(CloudError, match=r"lists 1 worker for v5litepod-8, but Google created 2") as refused:
        made.up()
    assert "tpu.accelerator_type" in str(refused.value)
    assert len(made.creation_requests()) == 1
    assert [f.check for f in made.node.findings(made.observe())] == ["endpoints"]
    made.down()
    assert made.leftovers() == []


def foreign(made: Pod, kind: str = "v5litepod-1") -> None:
    """Someone else's pod of the same name."""
    body = made.project.cloud.node_body(made.node.spec.network, kind)
    body["networkConfig"]["subnetwork"] = made.node.place.subnetwork
    made.project.cloud.call_and_wait(
        "POST", f"tpu/v2/projects/slipway-local/locations/{A}/nodes?nodeId={made.node.name}", body
    )


def test_a_name_that_is_taken_is_refused_and_left_alone(project: EmulatedProject) -> None:
    made = pod(project)
    foreign(made)
    with pytest.raises(CloudError, match=r"was not created by Slipway and differs .*set tpu\.name to another"):
        made.up()
    assert len(made.creation_requests()) == 1  # the other one's
    made.down()
    assert made.leftovers() == [f"{A}/nodes/{made.node.name}"]


def answer(made: Pod, **changes: object) -> dict[str, Any]:
    """Return the node as the API would, with changes; None leaves a field out."""
    path = f"tpu/v2/projects/slipway-local/locations/{A}/nodes/{made.node.name}"
    node = made.project.cloud.call_ok("GET", path) | changes
    return {key: value for key, value in node.items() if value is not None}


def test_a_field_that_google_leaves_out_is_as_requested(project: EmulatedProject) -> None:
    made = pod(project, "tpu.provisioner=node")
    node = made.up()
    full = answer(made)["networkConfig"]
    for changes in (
        {"runtimeVersion": None},
        {"networkConfig": {"enableExternalIps": False}},
        {"networkConfig": None, "networkConfigs": [full]},
        {"networkConfig": full | {"network": full["network"].replace("314159265358", "slipway-local")}},
    ):
        assert not made.node.diff(replace(node, status=parse_node(answer(made, **changes)))), changes
    assert parse_node(answer(made, networkConfig=None, networkConfigs=[])).spec.network == ""
    other = parse_node(answer(made, runtimeVersion="tpu-ubuntu2204-base"))
    assert made.node.diff(replace(node, status=other))
    made.down()


def test_a_pod_that_is_not_what_was_requested_is_not_made_again(
    project: EmulatedProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pod(project, "tpu.provisioner=node")
    monkeypatch.setattr(nodes, "parse_node", lambda found, *way: parse_node(found | {"runtimeVersion": "other"}, *way))
    with pytest.raises(CloudError, match=r"other settings than requested \(runtime_version: other -> .*slipway down"):
        made.up()
    assert len(made.creation_requests()) == 1
    monkeypatch.undo()
    made.down()


def test_an_adopted_pod_must_be_there_and_of_the_type_and_is_left(project: EmulatedProject) -> None:
    made = pod(project, "tpu.adopt=true")
    with pytest.raises(CloudError, match=r"pod .* does not exist in us-central1-a, and tpu\.adopt=true requires"):
        made.up()
    assert [f.severity for f in made.node.findings(made.observe())] == ["error"]
    assert made.creation_requests() == []
    foreign(made, "v5litepod-8")
    node = made.up()
    assert (node.status.state, node.is_managed) == ("READY", False)
    other = pod(project, "tpu.adopt=true", "tpu=v5litepod_1", f"tpu.zone={A}")
    with pytest.raises(CloudError, match=r"accelerator_type: v5litepod-8 -> v5litepod-1.*never changes"):
        other.up()
    made.down()
    assert made.leftovers() == [f"{A}/nodes/{made.node.name}"]
    assert len(made.creation_requests()) == 1


@pytest.mark.parametrize("words", [("tpu.provisioner=node",), ("tpu.provisioner=queued",), INSTANCE])
def test_a_stopped_pod_is_started_and_keeps_its_disk(project: EmulatedProject, words: tuple[str, ...]) -> None:
    made = pod(project, *words, "tpu.capacity=on_demand")
    first = made.up()
    assert first.cannot_stop == ""
    first.stop(project.context)
    assert first.pod_seen(project.context).state == "STOPPED"
    again = made.up()
    assert (again.status.state, again.status.uid) == ("READY", first.status.uid)
    assert "the node is stopped; starting it" in made.notes
    if words == ("tpu.provisioner=node",):
        again.stop(project.context)
        project.inject_fault(kind="stockout", times=1)
        assert made.up().status.uid != first.status.uid, "there is no room to start it: it is made anew"
        assert "no capacity to start it in us-central1-a" in made.notes
    made.down()
    assert made.leftovers() == made.machines() == []


@pytest.mark.parametrize("kind", ["v5litepod_8", "v6e_8"])
def test_a_data_disk_outlives_a_preemption_and_no_vain_attempt(project: EmulatedProject, kind: str) -> None:
    zone, words = B, ("tpu.provisioner=node", "tpu.data_disk_gb=100", *TWO_ZONES)
    if kind == "v6e_8":
        zone, words = "us-east5-b", ("tpu=v6e_8", "tpu.zone=us-east5-b", "tpu.provisioner=node", "tpu.data_disk_gb=100")
    made = pod(project, *words)
    project.inject_fault(kind="stockout", zone=A, at="request")
    assert made.up().place.zone == zone
    [disk] = [name for name in made.leftovers() if "/disks/" in name]
    assert disk == f"projects/slipway-local/zones/{zone}/disks/{made.node.name}-data"
    found = project.cloud.call_ok("GET", "emulator/state")["compute"][disk]
    kinds = {"v5litepod_8": "pd-balanced", "v6e_8": "hyperdisk-balanced"}
    assert (found["sizeGb"], found["type"].rpartition("/")[2]) == ("100", kinds[kind])
    if kind == "v5litepod_8":
        project.inject_fault(kind="preempted", after_seconds=0)
        wait_for(lambda: made.observe().status.state == "PREEMPTED", "the preemption")
        project.inject_fault(kind="stockout", zone=A, at="request")
        made.up()
        assert [name for name in made.leftovers() if "/disks/" in name] == [disk]
    made.down()
    assert made.leftovers() == []


def test_what_is_worth_saying_of_a_pod_that_is_there(project: EmulatedProject) -> None:
    made = pod(project)
    assert made.node.cannot_stop == "Google cannot stop spot pods; `slipway down` deletes it"
    assert "only pods with one VM" in replace(made.node, spec=replace(made.node.spec, workers=4)).cannot_stop
    status = SliceStatus(spec=made.node.spec, place=made.node.places[0], state="STOPPED")
    assert [f.check for f in made.node.findings(replace(made.node, status=status))] == ["foreign_pod"]
    sick = replace(status, labels=(("managed-by", "slipway"),), health="UNHEALTHY_TENSORFLOW")
    ill = replace(made.node, status=sick)
    [finding] = made.node.findings(ill)
    assert str(finding).startswith("tpu.name: Google reports the pod as unhealthy_tensorflow")
