"""Parts of pods of Compute Engine on the emulated cloud; their life is that of all pods, in ../test_node.py."""

from __future__ import annotations

import pytest

from controller.cleanup.orphans import billed_items, delete
from controller.core.errors import CloudError
from controller.resources.pod.compute_engine.requests import change
from controller.resources.pod.planes import PLANES
from tests.controller.resources.conftest import EmulatedProject
from tests.controller.resources.fake_pod import GROUP, INSTANCE, ZONE, Pod, pod

PARTS = ("/instanceGroupManagers/", "/instances/", "/resourcePolicies/", "/instanceTemplates/")


def parts(made: Pod) -> list[str]:
    """What of a pod exists: kinds of resources."""
    return sorted(part.strip("/") for name in made.machines() for part in PARTS if part in name)


def test_a_zone_without_capacity_is_left_and_nothing_stays_there(project: EmulatedProject) -> None:
    made = pod(project, *GROUP, "tpu.fallback_zones=[us-east1-d]", "cloud.bucket_location=us")
    project.inject_fault(kind="stockout", zone=ZONE, times=9)
    assert made.up().place.zone == "us-east1-d"
    assert f"no capacity in {ZONE} (spot)" in made.notes
    assert len(parts(made)) == 5  # a group with two VMs, a policy and a template
    made.down()
    assert parts(made) == []


def test_what_a_killed_controller_left_is_found_and_deleted(project: EmulatedProject) -> None:
    made, context = pod(project, *GROUP), project.context
    place = made.node.places[0]
    [maker] = [one for name, one in PLANES["compute_engine"].provisioners(0.0).items() if name == place.provisioner]
    maker.create(context, made.node.name, made.node.spec, place)
    listed = [thing for thing in billed_items(context, []) if made.node.name in thing.name]
    assert [thing.kind.removeprefix("queued ") for thing in listed] == ["TPU"]
    delete(context, listed[0])
    assert parts(made) == []


def test_a_policy_and_a_template_without_a_group_are_replaced(project: EmulatedProject) -> None:
    made, context = pod(project, *GROUP), project.context
    made.up()
    change(context, "instanceGroupManagers.delete", zone=ZONE, instanceGroupManager=made.node.name)
    assert parts(made) == ["instanceTemplates", "resourcePolicies"]
    assert made.observe().status.state == "GONE"
    assert made.up().is_ready
    made.down()
    assert parts(made) == []


def test_a_group_that_another_user_made_is_used_and_left(project: EmulatedProject) -> None:
    owner = pod(project, *GROUP)
    owner.up()
    adopter = pod(project, *GROUP, "tpu.adopt=true")
    assert adopter.up().is_ready
    adopter.down()
    assert parts(owner) == sorted(["instanceGroupManagers", "instanceTemplates", "instances", "instances",
                                   "resourcePolicies"])  # fmt: skip
    owner.down()


def test_the_machine_type_of_a_pod_that_is_adopted_must_fit(project: EmulatedProject) -> None:
    owner = pod(project, *INSTANCE)
    owner.up()
    adopter = pod(project, "tpu=v6e_4", "tpu.plane=compute_engine", f"tpu.zone={ZONE}", "tpu.adopt=true")
    with pytest.raises(CloudError, match=r"does not match the config \(accelerator_type: v6e-8 -> v6e-4\)"):
        adopter.up()
    owner.down()
    assert parts(owner) == []
