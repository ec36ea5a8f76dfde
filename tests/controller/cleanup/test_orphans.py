"""What is billed and used by nobody is found, priced, deleted."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.oauth2.credentials import Credentials

from controller.cleanup import orphans
from controller.cleanup.orphans import BilledItem, PodOverview
from controller.cli import main
from controller.cli.verbs.billed import format_pods
from controller.core.json_documents import dump
from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ForbiddenError
from controller.resources.bastion_vm import IMAGE, POD_LABEL, RUN_LABEL
from tests.controller.cli.verbs.test_up import KEEP, SLOW, let_go, until
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context
from tests.fakes.google import Answers
from tests.planes import Plane, pods

LABELS = {"managed-by": "slipway"}
ONE = ["tpu.accelerator_type=v6e-1", "tpu.zone=us-east5-b"]


def google_of(slipway: SlipwayCli) -> GoogleClient:
    """The emulated cloud's APIs, for things that slipway would not make by itself."""
    cloud = slipway.cloud()
    return GoogleClient(Credentials(token=cloud.token), Clock(), cloud.roots)


def listed(slipway: SlipwayCli, *words: str) -> dict[str, tuple[str, str]]:
    """(use, why) by kind and name."""
    things: list[dict[str, Any]] = slipway.json("orphans", *words)["things"]
    return {f"{thing['kind']} {thing['name']}": (thing["use"], thing["why"]) for thing in things}


@pytest.mark.e2e
def test_a_pod_in_use_is_no_orphan_and_one_left_behind_is(slipway: SlipwayCli, plane: Plane) -> None:
    assert listed(slipway) == {}
    assert "no orphans" in slipway("orphans")[1]
    assert slipway("up", "--detach", SLOW, KEEP, *plane.one)[0] == 0
    status = slipway.json("status", SLOW, KEEP, *plane.one)
    run, pod = status["run"]["id"], status["pod"]["name"]
    found = listed(slipway)
    assert found[f"TPU {pod}"] == (f"{run} is running on it", "")
    assert found["router slipway-us-east5"][0] == "a pod exists in its region"
    bucket = status["run"]["results"].split("/")[2]
    google = google_of(slipway)
    for name in (f"runs/{run}/checkpoints/5/data", f"runs/{run}/checkpoints/40/data"):
        google.upload(bucket, name, b"weights")
    google.close()
    [row] = slipway.json("status", "--all", "cloud=local")["pods"]
    assert (row["pod"], row["zone"], row["accelerator_type"], row["state"]) == (pod, "us-east5-b", "v6e-1", "ready")
    assert (row["run"], row["activity"], row["checkpoint"]) == (run, f"{run} is running on it", 40)
    assert row["checkpoint_age"] >= 0
    assert row["usd_per_hour"] > 0
    let_go(slipway)
    assert slipway("up", SLOW, KEEP, *plane.one)[0] == 0
    found = listed(slipway)
    assert found[f"TPU {pod}"] == ("", f"{run} has finished")
    code, out, _ = slipway("orphans")
    assert code == 0
    assert f"TPU {pod} in us-east5-b: {run} has finished" in out
    assert "per month (list prices)" in out
    assert slipway("orphans", "--delete")[0] == 2  # nobody to ask
    assert slipway.json("orphans", "--delete", "--yes")["deleted"][0] == f"TPU {pod} in us-east5-b"
    assert listed(slipway) == {}
    state = slipway.cloud().get("state")
    assert pods(state) == {}
    assert not any("/routers/" in name for name in state["compute"])


@pytest.mark.e2e
def test_a_run_has_a_limit_and_past_it_is_an_orphan(slipway: SlipwayCli) -> None:
    words = [SLOW, KEEP, *ONE, "budget.max_hours=5"]
    assert slipway("up", "--detach", *words)[0] == 0
    status = slipway.json("status", *words)
    run, name = status["run"]["id"], f"TPU {status['pod']['name']}"
    assert listed(slipway)[name] == (f"{run} is running on it, for 5.0 h at most", "")
    bucket, google = status["run"]["results"].split("/")[2], google_of(slipway)
    [limit] = [
        item["name"]
        for item in google.list_all("storage", "objects.list", "items", bucket=bucket)
        if "/limits/" in item["name"]
    ]
    text = dump({"run": run, "seconds_left": -600.0})
    google.upload(bucket, limit, text.encode(), metadata={"limit": text})
    google.close()
    assert listed(slipway)[name] == ("", f"{run} is 10 min past its limit, and nothing on the pod has ended it")
    let_go(slipway)


@pytest.mark.e2e
@pytest.mark.deep
@pytest.mark.always_on("compute_engine")
def test_a_cancelled_run_and_a_failed_one_leave_orphans(slipway: SlipwayCli, plane: Plane) -> None:
    fails = 'program.command=[sh,-c,"exit 7"]'
    assert slipway("up", fails, *plane.one)[0] == 5
    [(use, why)] = [found for name, found in listed(slipway).items() if name.startswith("TPU")]
    assert use == ""
    assert why.endswith("exited with code 7")
    assert slipway("up", "--detach", SLOW, *plane.one)[0] == 0
    assert slipway("cancel", SLOW, *plane.one)[0] == 0
    [(use, why)] = [found for name, found in listed(slipway).items() if name.startswith("TPU")]
    assert (use, why.partition(" ")[2]) == ("", "was cancelled")


@pytest.mark.e2e
def test_disks_addresses_bastions_and_queued_requests_are_found_in_all_zones(slipway: SlipwayCli) -> None:
    project = {"project": "slipway-local"}
    assert slipway("up", ECHO_COMMAND, *ONE)[0] == 0  # a network, for the VM
    google = google_of(slipway)
    kind = "projects/slipway-local/zones/us-west4-a/diskTypes/pd-balanced"
    disk = {"name": "old-data", "sizeGb": "100", "type": kind, "labels": LABELS}
    google.call("compute", "disks.insert", **project, zone="us-west4-a", body=disk)
    google.call("compute", "disks.insert", **project, zone="us-west4-a", body=disk | {"name": "theirs", "labels": {}})
    address = {"name": "old-address", "description": "made by slipway"}
    google.call("compute", "addresses.insert", **project, region="europe-west4", body=address)
    network = {"network": "projects/slipway-local/global/networks/slipway"}
    network["subnetwork"] = "projects/slipway-local/regions/us-east5/subnetworks/slipway-us-east5"
    machine = {
        "name": "bastion",
        "machineType": "zones/us-east5-b/machineTypes/e2-micro",
        "labels": LABELS,
        "networkInterfaces": [network],
        "disks": [{"boot": True, "initializeParams": {"sourceImage": IMAGE}}],
    }
    google.call("compute", "instances.insert", **project, zone="us-east5-b", body=machine)
    things = {thing["name"]: thing for thing in slipway.json("orphans")["things"]}
    assert set(things) == {"old-data", "old-address", "bastion", "slipway-us-east5"}
    assert things["old-data"]["usd_per_hour"] == pytest.approx(100 * 0.10 / 730)
    assert things["old-address"]["usd_per_hour"] == pytest.approx(0.01)
    assert things["bastion"]["usd_per_hour"] == pytest.approx(0.0084)
    # A request that waits is not billed, and whoever asked for it may still wait.
    place = "projects/slipway-local/locations/us-east5-b"
    slipway.cloud().post("faults", {"key": "none", "faults": [{"kind": "stockout", "times": 1000}]})
    node = {"acceleratorType": "v6e-1", "runtimeVersion": "v2-alpha-tpuv6e", "labels": LABELS, "networkConfig": network}
    body = {"tpu": {"nodeSpec": [{"parent": place, "nodeId": "waits", "node": node}]}, "spot": {}}
    google.call("tpu", "projects.locations.queuedResources.create", parent=place, queuedResourceId="waits", body=body)
    seen: set[str] = set()

    def found() -> bool:  # now and then a node is tried for
        seen.update(use for name, (use, _) in listed(slipway).items() if name.endswith("TPU waits"))
        return any(use.endswith("not billed until it has a node") for use in seen)

    until(found)
    assert "" not in seen
    google.call("tpu", "projects.locations.queuedResources.delete", name=f"{place}/queuedResources/waits", force=True)
    google.close()
    until(lambda: not pods(slipway.cloud().get("state")))
    assert slipway("orphans", "--delete", "--yes")[0] == 0
    assert listed(slipway) == {}
    assert any(name.endswith("/disks/theirs") for name in slipway.cloud().get("state")["compute"])


BUSY = PodOverview(
    "slipway-v5litepod-16-0ef9e1", "us-central1-a", "v5litepod-16", "ready, unhealthy tensorflow", "gsm8k-1cb75d98",
    "gsm8k-1cb75d98 is running on it", "anna@laptop (laptop)", 120, 95.0, 19.2, ("slow", "stale checkpoint"),
)  # fmt: skip
QUEUED = PodOverview("slow", "us-east5-b", "", "queued", "", "waiting_for_resources", "", None, None, 0.0)
UNKNOWN = PodOverview("odd", "us-east5-b", "v9-1", "ready", "", "not used by any known run", "", None, None, None)


@pytest.mark.parametrize("width", [80, 100, None])
def test_what_tells_pods_apart_is_never_cut(width: int | None) -> None:
    lines = format_pods([BUSY, QUEUED, UNKNOWN], [], ["lost-00c0ffee"], "my-project", width)
    text = " ".join(" ".join(lines).split())
    assert (
        "slipway-v5litepod-16-0ef9e1 ALERT slow, stale checkpoint; v5litepod-16; "
        "us-central1-a; ready, unhealthy tensorflow; gsm8k-1cb75d98 is "
        "running on it; checkpoint 120, 1:35 ago; $19.20 per hour; controlled by anna@laptop (laptop)" in text
    )
    assert "slow us-east5-b; queued; waiting_for_resources; $0.00 per hour odd v9-1" in text
    assert lines[-2] == "3 pods in my-project: $19.20 per hour at list prices"
    assert lines[-1].startswith("lost-00c0ffee was running when last seen from here")
    assert [line for line in "\n".join(lines[:-1]).splitlines() if width and len(line) > width] == []


def test_other_vms_follow() -> None:
    assert format_pods([], [], [], "my-project", 80) == ["no pods of Slipway in my-project"]
    driver = BilledItem("VM", "mine-driver", "us-west4-a", 0.0168, "it controls run-2", "")
    orphan = BilledItem("VM", "old-driver", "us-west4-a", None, "", "run-1 has ended")
    assert format_pods([], [driver, orphan], [], "my-project", 80)[1:] == [
        "VM mine-driver in us-west4-a: it controls run-2; $0.02 per hour",
        "VM old-driver in us-west4-a: run-1 has ended; unknown price",
    ]


@pytest.mark.parametrize("words", [["status", "--all"], ["orphans"]])
def test_this_machine_has_no_pods(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*words, "cloud=here"]) == 2
    assert "cloud=here has no project and no pods; set cloud=gcp or cloud=local" in capsys.readouterr().err


def refuse(*_: Any, **__: Any) -> None:
    raise ForbiddenError("objects.get", 403, "forbidden", "you may not")


@pytest.mark.parametrize("refused", ["the list of buckets", "gs://theirs"])
def test_what_a_record_that_google_refuses_to_show_may_use_is_no_orphan(refused: str) -> None:
    """A pod and a bastion, a day old: nobody deletes what may be in use."""
    vm = {"name": "b", "labels": {**LABELS, RUN_LABEL: "run-1", POD_LABEL: "p"}, "status": "RUNNING"}
    google = Answers({"instances.aggregatedList": {"items": {"zones/us-east5-b": {"instances": [vm]}}}})
    google_, buckets = cast(Any, google), ["theirs"] if refused.startswith("gs:") else []
    google_.object_metadata = google_.download = refuse
    google.answers |= {
        method: ForbiddenError(method, 403, "forbidden", "no")
        for method in ("buckets.list", "objects.list", "objects.get")
    }
    context = make_context(google, clock=ManualClock(start=1e9), notes=(notes := []))
    if not buckets:
        assert list(orphans.slipway_buckets(context)) == []
        assert notes == ["cannot list its buckets, which may have records of runs: no"]
    place = SimpleNamespace(zone="us-east5-b", capacity="spot", provisioner="queued")
    seen = {"name": "p", "place": place, "spec": SimpleNamespace(accelerator_type="v6e-1"), "state": "READY"}
    slice_ = SimpleNamespace(**seen, created=1e9 - 86400, uid="1")
    [machine] = orphans._machines(context, buckets, set(), set())
    for item in (orphans._pod(context, buckets, cast(Any, slice_)), machine):
        assert item.use == f"unknown: you may not read {refused}"


@pytest.mark.parametrize(("age", "use"), [(60.0, "of a run that no bucket knows: just created, or its"), (86400.0, "")])
def test_a_pod_whose_bucket_was_deleted_is_not_called_unused_at_once(age: float, use: str) -> None:
    clock = ManualClock(start=1e9)
    place = SimpleNamespace(zone="us-east5-b", capacity="spot", provisioner="queued")
    seen = {"name": "p", "place": place, "spec": SimpleNamespace(accelerator_type="v6e-1"), "state": "READY"}
    slice_ = SimpleNamespace(**seen, created=clock.now() - age, uid="1")
    found = orphans._pod(make_context(None, clock=clock), [], cast(Any, slice_))
    assert found.use.startswith(use)
    assert bool(found.use) == bool(use)
