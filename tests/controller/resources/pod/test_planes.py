"""Planes: where `tpu.plane=auto` looks for capacity, what it finds again, and what a third plane needs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from conf.schema.config import Config
from conf.schema.topology import Topology
from controller.checks.preflight import preflight, probe_cloud
from controller.cleanup.orphans import billed_items
from controller.context import Context, SurplusSlice
from controller.core.errors import CloudError
from controller.core.finding import Issue
from controller.gcp.answers import LABEL
from controller.gcp.google_errors import GoogleError
from controller.plan.needed_permissions import permissions_of_plan
from controller.plan.project_steps import bastion_resources
from controller.reconcile import Absent, Pending
from controller.resources.pod import planes
from controller.resources.pod.capacity_log import load_entries
from controller.resources.pod.node import describe
from controller.resources.pod.plane import PlaneMethods
from controller.resources.pod.planes import PLANES, plane_of
from controller.resources.pod.provisioner import Place, SliceSpec, SliceStatus, pod_object
from controller.resources.pod.refusals import PlaneAdvice
from controller.resources.pod.slices import Slices
from tests.composed import config_of
from tests.controller.localcloud.harness import wait_for
from tests.controller.resources.conftest import EmulatedProject
from tests.controller.resources.fake_pod import Pod, pod, request_slice

ZONE = "us-east5-b"
AUTO = ("tpu=v6e_8", f"tpu.zone={ZONE}")
FULL = {"kind": "stockout", "times": 99, "plane": "tpu_api", "at": "request"}


def test_where_one_plane_is_full_the_other_one_is_asked(project: EmulatedProject) -> None:
    made = pod(project, *AUTO)
    project.inject_fault(**FULL)
    first = made.up()
    assert first.place.provisioner == "instance"
    assert f"no capacity in {ZONE} (spot, TPU API) (attempt 1)" in made.notes
    assert f"requesting v6e-8 in {ZONE} (spot, Compute Engine)" in made.notes
    # Every later command finds it, and nothing differs from what is wanted.
    found = made.observe()
    assert found.status.uid == first.status.uid
    assert not made.node.diff(found)
    assert made.up().status.uid == first.status.uid
    assert len(made.creation_requests()) == 1
    made.down()
    assert isinstance(made.observe(), Absent)
    assert made.machines() == []


def test_after_a_preemption_the_pod_may_come_from_the_other_plane(project: EmulatedProject) -> None:
    made = pod(project, *AUTO)
    first = made.up()
    assert first.place.provisioner == "queued"
    project.inject_fault(kind="preempted", after_seconds=0)
    wait_for(lambda: first.pod_seen(project.context).state in ("PREEMPTED", "ABSENT"), "the preemption")
    # The request waits, and Google says nothing: no queue keeps a search from a plane that was not asked yet.
    project.inject_fault(kind="stockout", times=10**6, plane="tpu_api")
    assert made.up().place.provisioner == "instance"
    assert f"giving back the request in {ZONE} (spot, TPU API): the pod is there" in made.notes
    assert made.leftovers() == []  # nothing on the TPU API
    told = [(entry.provisioner, entry.answer) for entry in load_entries(project.context.state_dir)]
    assert told[-2:] == [("queued", "withdrawn"), ("instance", "granted")]
    project.cloud.call_ok("DELETE", "emulator/faults")
    made.node.delete_all(project.context, elsewhere=True)  # as recovery moves a pod away: round to the first plane
    assert made.up().place.provisioner == "queued"
    made.down()


@pytest.mark.parametrize("kind", ["quota", "permission", "bad_request"])
def test_what_one_plane_lacks_does_not_stop_the_other(project: EmulatedProject, kind: str) -> None:
    fault = {"kind": kind, "times": 99, "plane": "compute_engine"}
    if kind == "bad_request":
        fault |= {"kind": "failure", "code": 400, "message": "Constraint constraints/compute.trustedImages violated"}
    made = pod(project, *AUTO, max_create_attempts=9)
    project.inject_fault(**fault, at="request")
    project.inject_fault(**FULL | {"times": 2})
    assert made.up().place.provisioner == "queued"
    assert f"{ZONE} (spot, Compute Engine)" in made.notes
    made.down()


def ask(made: Pod, *planes_: str) -> None:
    """Send the requests of a search that is killed right after them."""
    places = {plane_of(place.provisioner).title: place for place in made.node.places}
    for name in planes_:
        place = places[PLANES[name].title]
        maker = PLANES[name].provisioners(60.0)[place.provisioner]
        request_slice(made, maker, made.node.spec_in(place), place)


def test_a_plane_that_google_does_not_show_for_a_while_may_have_the_pod(project: EmulatedProject) -> None:
    """As in the minutes after a role was bound. It is neither taken for gone nor made a second time."""
    made = pod(project, *AUTO)
    first = made.up()
    assert first.place.provisioner == "queued"

    def hide(seconds: float) -> None:
        for permission in ("tpu.queuedResources.get", "tpu.nodes.get"):
            project.inject_fault(kind="late_grant", permission=permission, seconds=seconds)

    hide(60)
    with pytest.raises(GoogleError, match=f"Google does not show TPUs of the TPU API in {ZONE} now") as caught:
        first.pod_seen(project.context)
    assert caught.value.is_transient
    with pytest.raises(GoogleError, match="Google does not show"):
        made.down()  # which would leave it, billed
    assert made.node.find(project.context) is None
    project.cloud.call_ok("DELETE", "emulator/faults")
    assert first.pod_seen(project.context).is_usable
    hide(1.0)
    assert made.up().status.uid == first.status.uid
    assert "none is created before they are seen, or 8 minutes are over" in made.notes
    assert (len(made.creation_requests()), made.machines()) == (1, [])
    assert project.context.refused_since == {}
    made.down()


GROUP = ("tpu.accelerator_type=v6e-16",)
"""Two VMs: on Compute Engine a group, which waits for capacity as the queue of the TPU API does."""


def test_what_a_killed_search_holds_on_both_planes_is_waited_for_or_deleted_on_both(project: EmulatedProject) -> None:
    made = pod(project, *AUTO, *GROUP)
    project.inject_fault(kind="stockout", times=10**6, plane="tpu_api")
    project.inject_fault(kind="stockout", times=5, plane="compute_engine")
    ask(made, "tpu_api", "compute_engine")
    waiting = made.observe()
    assert made.node.diff(waiting)
    assert describe(waiting) == f"waiting for resources in {ZONE}"
    listed = sorted(thing.provisioner for thing in billed_items(project.context, []) if thing.name == made.node.name)
    assert listed == ["mig", "queued"]
    assert made.up().place.provisioner == "mig"
    assert len(made.creation_requests()) == 1
    assert made.leftovers() == []
    made.down()
    assert made.machines() == []
    project.inject_fault(kind="stockout", times=10**6)
    ask(made, "tpu_api", "compute_engine")
    made.down()
    assert made.leftovers() == made.machines() == []


def granted_twice(project: EmulatedProject) -> tuple[Pod, list[SliceStatus]]:
    """A pod of which a killed search was granted two slices, both READY."""
    made, context = pod(project, *AUTO, *GROUP), project.context
    context.bucket = f"{project.tag}-bucket"
    ask(made, "tpu_api", "compute_engine")
    wait_for(lambda: [one.is_ready for one in made.node._slices.ranked(context)] == [True, True], "both slices")
    return made, made.node._slices.ranked(context)


@pytest.mark.parametrize("used", ["", "mig"])
def test_of_two_slices_that_a_killed_search_was_granted_one_is_the_pod(project: EmulatedProject, used: str) -> None:
    """The one that a run has had, if there is such a one."""
    given: list[SurplusSlice] = []
    (made, slices), context = granted_twice(project), project.context
    context.on_surplus = given.append
    if used:
        uid = next(one.uid for one in slices if one.place.provisioner == used)
        context.google.upload(context.bucket, pod_object("claims", made.node.name, uid), b"{}")
    observed = made.observe()
    assert [one.place.provisioner for one in observed.surplus] == ["queued" if used == "mig" else "mig"]
    assert "surplus" in str(made.node.diff(observed))
    assert made.up().place.provisioner == (used or "queued")
    assert len(made.node._slices.ranked(context)) == 1
    assert {(one.uid, one.pod) for one in given} == {(observed.surplus[0].uid, made.node.name)}
    assert [entry.ended for entry in load_entries(context.state_dir)] == ["surplus"]
    made.down()
    assert made.leftovers() == made.machines() == []


def test_a_slice_that_a_run_has_had_is_not_given_back_while_google_repairs_it(
    project: EmulatedProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile a request that an earlier search left may be granted."""
    (made, (used, other)), context = granted_twice(project), project.context
    context.google.upload(context.bucket, pod_object("claims", made.node.name, used.uid), b"{}")
    repaired = replace(used, state="REPAIRING", pending=True)
    waiting = replace(other, state="ACCEPTED", pending=True)
    for ranked in ([other, repaired], [repaired, waiting]):
        with monkeypatch.context() as patch:
            patch.setattr(Slices, "ranked", lambda *args, found=ranked, **kwargs: found)
            assert made.observe() == Pending(f"repairing in {ZONE}")
    assert made.up().status.uid == used.uid
    assert [one.uid for one in made.node._slices.ranked(context)] == [used.uid]
    made.down()


@pytest.mark.parametrize(("held", "is_known"), [("tpu_api", False), ("compute_engine", True)])
def test_a_request_of_another_tier_that_a_killed_search_left_is_not_the_pod(
    project: EmulatedProject, monkeypatch: pytest.MonkeyPatch, held: str, is_known: bool
) -> None:
    """A tpu.name of one's own names a pod of any tier. The request waits, and would be granted before any other.

    If its tier shows only once it is READY, it is replaced then.
    """
    if not is_known:
        monkeypatch.setattr("controller.resources.pod.slices.REQUESTED_FIELDS", frozenset())
    before = pod(project, *AUTO, *GROUP, "tpu.capacity=on_demand")
    made = pod(project, *AUTO, *GROUP)
    other = next(name for name in PLANES if name != held)
    project.inject_fault(kind="stockout", times=20, plane=held, capacity="on_demand")
    project.inject_fault(kind="stockout", times=40, plane=other)
    ask(before, held)
    assert made.up().place.capacity == "spot"
    assert not made.node.diff(made.observe())
    assert ("it was made with other settings" in made.notes) == is_known
    granted = [entry for entry in load_entries(project.context.state_dir) if entry.answer == "granted"]
    assert len(granted) == (1 if is_known else 2)
    made.down()
    assert made.leftovers() == made.machines() == []


def test_what_neither_plane_has_is_said_of_both(project: EmulatedProject) -> None:
    made = pod(project, *AUTO)
    for name in PLANES:
        project.inject_fault(kind="quota", times=99, plane=name)
    with pytest.raises(CloudError, match=r"no quota for v6e-8: .*\(spot, TPU API\): .*\(spot, Compute Engine\): "):
        made.up()
    assert made.leftovers() == []


class Toy:
    """A plane, its checks and its provisioner at once: slices in memory. Nothing but the registry names it."""

    title, queues, account_roles = "the toy", frozenset[str](), ("roles/toy.admin",)
    methods = PlaneMethods(("toy.get",), ("toy.get",), ("toy.create", "toy.delete"), (), ())
    advice = PlaneAdvice("roles/toy.admin", "toy types", "toy images")

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], SliceStatus] = {}
        self.checks = self

    def offers(self, topology: Topology) -> bool:
        return topology.generation == "v6e"

    def obstacles(self, config: Config) -> Iterator[Issue]:
        if config.tpu.provisioner != "auto":
            yield Issue("the toy has no queue", "tpu.provisioner")

    def tier_obstacles(self, config: Config, tier: str) -> Iterator[Issue]:
        if tier == "reserved":
            yield Issue("the toy has no reservations", "tpu.capacity")

    def nothing(self, config: Config | Context, context: Context | None = None) -> Iterator[Any]:
        yield from ()

    image = offered_types = offered_images = listing = leftovers = nothing

    def quota(self, config: Config, context: Context, chips: int | None = None) -> Iterator[Issue]:
        yield Issue("draws on the toy box", severity="note")

    def spec(self, config: Config) -> SliceSpec:
        return SliceSpec.of(config, "toy-image")

    def delete_permission(self, provisioner: str) -> str:
        return "toy.delete"

    def provisioner_for(self, config: Config, tier: str) -> str:
        return "toy"

    def provisioners(self, create_seconds: float) -> dict[str, Any]:
        return {"toy": self}

    def observe(self, context: Context, name: str, zone: str) -> SliceStatus | None:
        return self.held.get((name, zone))

    def create(self, context: Context, name: str, spec: SliceSpec, place: Place) -> None:
        more: Any = {"uid": "7", "created": 1.0, "labels": tuple(LABEL.items())}
        self.held[name, place.zone] = SliceStatus(spec=spec, place=place, state="READY", name=name, **more)

    def delete(
        self, context: Context, name: str, zone: str, *, is_recorded: bool = False, is_hurried: bool = False
    ) -> None:
        self.held.pop((name, zone), None)

    def slices(self, context: Context) -> Iterator[SliceStatus]:
        yield from self.held.values()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    made = Toy()
    monkeypatch.setattr(planes, "PLANES", {**PLANES, "toy": cast(Any, made)})
    return made


def test_a_third_plane_needs_only_a_line_in_the_registry(project: EmulatedProject, toy: Toy) -> None:
    made = pod(project, *AUTO)
    project.inject_fault(kind="quota", times=99)  # of both other planes
    config = project.config(*AUTO, "program.command=[python,-V]")
    assert [finding for finding in preflight(config) if finding.severity == "error"] == []
    assert made.node.places[-1].provisioner == "toy"
    needs = {need.permission for need in permissions_of_plan(config, project.context.project)}
    assert {"toy.get", "toy.create", "toy.delete"} <= needs
    assert "draws on the toy box" in [found.message for found in probe_cloud(config, project.context)]
    roles = {role for one in bastion_resources(config, "b", "r", []) for role in getattr(one, "roles", ())}
    assert "roles/toy.admin" in roles
    first = made.up()
    assert (first.place.provisioner, first.spec_in(first.place).runtime_version) == ("toy", "toy-image")
    assert not made.node.diff(made.observe())
    assert [entry.provisioner for entry in load_entries(project.context.state_dir)][-1] == "toy"
    assert [thing.provisioner for thing in billed_items(project.context, []) if thing.name == made.node.name] == ["toy"]
    made.down()
    assert toy.held == {}


def said_of(*words: str) -> list[str]:
    return [str(finding) for finding in preflight(config_of("tpu=v6e_8", "program=command", *words))]


def test_a_plane_refuses_by_its_own_words_and_one_that_does_not_exist_is_refused(toy: Toy) -> None:
    said = said_of("tpu.plane=toy", "tpu.provisioner=node", "tpu.capacity=reserved")
    assert {"tpu.provisioner: the toy has no queue", "tpu.capacity: the toy has no reservations"} <= {*said}
    assert "tpu.plane: there is no plane 'gke'; choices: auto, tpu_api, compute_engine, toy" in said_of("tpu.plane=gke")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("tpu.max_run_hours=4", "the TPU API {}max_run_hours: only Compute Engine ends a pod by itself"),
        ("tpu.machine_type=ct6e-standard-4t", "the TPU API {}machine_type: the TPU API chooses"),
        ("tpu.runtime_version=projects/p/global/images/i", "the TPU API {}runtime_version: projects/p"),
        ("tpu.provisioner=node", "Compute Engine {}provisioner: node is a way of the TPU API"),
        ("tpu.capacity=preemptible", "Compute Engine {}capacity: Compute Engine has no preemptible"),
        ("tpu.runtime_version=v2-alpha-tpuv6e-x", "Compute Engine {}runtime_version: v2-alpha-tpuv6e-x"),
    ],
)
def test_a_key_of_one_plane_leaves_that_one(word: str, said: str) -> None:
    config = config_of("tpu=v6e_8", "program=command", word)
    assert len(planes.planes_for(config)) == 1
    [why] = planes.planes_not_tried(config)
    assert why.startswith(said.format("is not tried: tpu."))
    assert len({plane_of(place.provisioner) for place in planes.places_for(config)}) == 1


def test_a_tier_of_one_plane_is_asked_of_that_one() -> None:
    config = config_of("tpu=v6e_8", "program=command", "tpu.capacity=[preemptible,spot]")
    found = [(place.capacity, place.provisioner) for place in planes.places_for(config)]
    assert found == [("preemptible", "node"), ("spot", "queued"), ("spot", "instance")]
    assert planes.planes_not_tried(config) == []
