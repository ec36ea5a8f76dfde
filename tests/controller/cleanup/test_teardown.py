"""What `down` deletes besides what its config names, and what it says of what others do meanwhile."""

import json
import re
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from controller.cleanup.teardown import Teardown, plan_teardown
from controller.cli.verbs import down
from controller.context import Context
from controller.core.errors import CloudError, LeaseLostError
from controller.gcp.google_errors import ConflictError
from controller.lease_store import BucketLeaseStore, Identity
from controller.plan.build import Plan
from controller.reconcile import Absent, Diff, ObservedResources, Pending, Resource, Scope, Unknown
from controller.resources.pod.node import Node
from controller.run.session import Session
from tests.controller.cleanup.test_orphans import google_of
from tests.controller.cli.verbs.test_up import KEEP, SLOW, until
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.fakes.context import make_context
from tests.planes import Plane, pods

OWNER, SAMPLERS = "tpu.name=mine", "tpu.name=mine-sampler-2"


@pytest.mark.deep
@pytest.mark.e2e
def test_pods_of_samplers_of_an_earlier_config_are_deleted_and_no_other_pod(slipway: SlipwayCli, plane: Plane) -> None:
    assert slipway("up", ECHO_COMMAND, KEEP, SAMPLERS, *plane.one)[0] == 0
    google = google_of(slipway)
    bucket = slipway.json("status", ECHO_COMMAND, KEEP, SAMPLERS, *plane.one)["run"]["results"].split("/")[2]
    listed = google.list_all("storage", "objects.list", "items", bucket=bucket, prefix="pods/mine-sampler-2/claims/")
    [name] = [item["name"] for item in listed]
    assert slipway("down", ECHO_COMMAND, OWNER, *plane.one)[0] == 0
    assert pods(slipway.cloud().get("state")), "another run's pod, whatever its name"
    claim = json.loads(google.download(bucket, name))
    google.upload(bucket, name, json.dumps(claim | {"latest": "run-0a1b2c3d-sampler-2"}).encode())
    google.close()
    assert slipway("down", ECHO_COMMAND, "tpu.name=min", *plane.one)[0] == 0
    assert pods(slipway.cloud().get("state")), "another pod's samplers"
    code, out, err = slipway("down", ECHO_COMMAND, OWNER, *plane.one)
    assert code == 0, err
    assert pods(slipway.cloud().get("state")) == {}, (out, err)


@pytest.mark.deep
@pytest.mark.e2e
def test_a_pod_that_another_controller_creates_after_down_has_looked_is_deleted_too(
    slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt may stand for an hour, and a bastion takes a minute to boot."""
    words = [SLOW, KEEP, "tpu.accelerator_type=v6e-1", "tpu.zone=us-east5-b", "tpu.provisioner=node"]
    words += ["tpu.data_disk_gb=10"]
    assert slipway("up", ECHO_COMMAND, *words[1:])[0] == 0
    delete_node(slipway)
    looks: list[list[str]] = []

    def look_then_up(session: Session, everything: bool) -> Teardown:
        teardown = plan_teardown(session, everything)
        looks.append([resource.kind for resource in teardown.present])
        assert slipway("up", "--detach", *words)[0] == 0
        assert pods(slipway.cloud().get("state"))
        return teardown

    monkeypatch.setattr(down, "plan_teardown", look_then_up)
    code, out, err = slipway("down", *words)
    assert code == 0, err
    assert looks == [["data disk"]], "so that the pod is found only later"
    assert re.search(r"✓ TPU v6e-1 .* deleted .*\n +✓ data disk .* deleted", out + err)
    state = slipway.cloud().get("state")
    assert pods(state) == {}
    assert not [path for path in state["compute"] if "/disks/" in path]
    assert "/cancels/0001.json" in json.dumps(state["objects"]), "the run began after the look, and ended"


@dataclass(frozen=True, kw_only=True)
class Part(Resource):
    """A part of a pod that was deleted; `now` is what a later look finds, None: itself."""

    kind: ClassVar[str] = "part"
    scope: ClassVar[Scope] = "pod"
    now: Absent | Pending | Unknown | None

    def observe(self, context: Context, observed: ObservedResources) -> Any:
        return self if self.now is None else self.now

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None: ...


def test_down_says_what_is_there_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another controller may make it again while this one deletes."""
    looks = {"gone": Absent(), "going": Pending("deleting"), "hidden": Unknown("you may not look"), "back": None}
    parts: list[Resource] = [Part(name=name, now=now) for name, now in looks.items()]
    context = make_context(None)
    undo = SimpleNamespace(disable_command=lambda _: "gcloud")
    plan: Any = SimpleNamespace(node=SimpleNamespace(name="pod"), get=lambda _: undo, own_code=True)
    session: Any = SimpleNamespace(context=context, plan=plan, require_pod=lambda: None)
    made = Teardown(session, False, [], parts, set(), True, False)
    assert [part.name for part in made.left()] == ["back"]
    monkeypatch.setattr(Teardown, "execute", lambda self, listener: None)
    monkeypatch.setattr(down, "open_session", lambda options, **_: nullcontext(session))
    monkeypatch.setattr(down, "plan_teardown", lambda session, everything: made)
    monkeypatch.setattr(down, "View", lambda plan, json_lines: nullcontext())
    monkeypatch.setattr(down, "unreadable_places", lambda session: [])
    options = SimpleNamespace(showing=lambda what: nullcontext(lambda text: None))
    command: Any = SimpleNamespace(options=options, flags=SimpleNamespace(json=True, all=False, yes=True))
    with pytest.raises(CloudError, match=r"^part back is there again: another controller has made it"):
        down.run_down(command)
    assert json.loads(capsys.readouterr().out)["deleted"] == ["part/gone", "part/going", "part/hidden"]


@pytest.mark.deep
@pytest.mark.e2e
def test_a_controller_that_takes_the_pod_over_stops_down_with_an_error(
    slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert slipway("up", ECHO_COMMAND, KEEP)[0] == 0
    bucket = results_bucket(slipway)

    def lose(resources: list[Resource], context: Context) -> None:
        """Another controller takes the lease, as after a night's sleep of this machine, while down waits."""
        [resource] = resources
        store = BucketLeaseStore(context.google, bucket, resource.name)
        other = Identity("laptop", "run-of-another", holder="someone@elsewhere", pod=resource.name)
        while (snapshot := store.read()) is not None:
            with suppress(ConflictError):  # it was renewed in between
                store.write(other.new_record(snapshot.record.token + 1, time.time(), 60), snapshot.generation)
                break
        context.clock.sleep(600)

    monkeypatch.setattr("controller.cleanup.teardown.destroy", lose)
    code, _, err = slipway("down", ECHO_COMMAND, KEEP)
    assert code == LeaseLostError.exit_code
    assert "took over; this controller stopped and changes nothing more" in err


@pytest.mark.e2e
@pytest.mark.parametrize("later", ["ready", pytest.param("pending", marks=pytest.mark.deep)])
def test_down_ends_the_record_goes_on_where_samplers_are_lost_and_deletes_the_bucket_last(
    slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    """The pod was being created at the look, or is under repair all the time; `cancel` may end samplers meanwhile."""

    def look(session: Session, everything: bool) -> Teardown:
        teardown = plan_teardown(session, everything)
        [at] = [i for i, row in enumerate(teardown.rows) if isinstance(row.observed, Node)]
        teardown.rows[at] = replace(teardown.rows[at], observed=Pending("is being created"))
        return teardown

    def lose(plan: Plan, context: Context, why: str, **_: Any) -> list[str]:
        context.clock.interrupt()  # as their lease does
        return ["mine-sampler-1: another controller took over"]

    assert slipway("up", ECHO_COMMAND, KEEP)[0] == 0
    with monkeypatch.context() as patch:
        if later == "pending":
            patch.setattr(Teardown, "_look_again", lambda _: None)
        patch.setattr(down, "plan_teardown", look)
        patch.setattr("controller.cleanup.teardown.end_pods", lose)
        code, out, err = slipway("down", ECHO_COMMAND, KEEP)
    assert code == 0, err
    assert "mine-sampler-1: another controller took over" in out + err
    assert pods(slipway.cloud().get("state")) == {}
    google, bucket = google_of(slipway), results_bucket(slipway)
    listed = google.list_all("storage", "objects.list", "items", bucket=bucket, prefix="runs/")
    [life] = [json.loads(google.download(bucket, i["name"])) for i in listed if "/pods/" in i["name"]]
    assert life["reason"] == "deleted by down"
    google.close()
    # The lease is released before its bucket is deleted.
    assert slipway("up", "program.command=[ls]", KEEP)[0] == 0
    before = len(slipway.mutations())
    code, out, err = slipway("down", "--all", "--yes", ECHO_COMMAND, KEEP)
    assert code == 0, (out, err)
    done = slipway.mutations()[before:]
    [at] = [i for i, request in enumerate(done) if re.fullmatch(r"DELETE /storage/v1/b/[^/]+", request)]
    assert 0 < max(i for i, request in enumerate(done) if request.startswith("POST /upload/")) < at
    assert done[at - 1].startswith("DELETE /storage/v1/b/"), "its objects go first"


def results_bucket(slipway: SlipwayCli) -> str:
    return slipway.json("status", ECHO_COMMAND, KEEP)["run"]["results"].split("/")[2]


def delete_node(slipway: SlipwayCli) -> None:
    """Delete the only node by hand, as in the console."""
    [name] = pods(slipway.cloud().get("state"))
    google = google_of(slipway)
    google.call("tpu", "projects.locations.nodes.delete", name=name)
    google.close()
    until(lambda: not pods(slipway.cloud().get("state")))
