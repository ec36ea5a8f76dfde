"""What answers of Google mean, what is recorded of them, what other machines see, and the order of zones."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from controller.context import Context
from controller.core.json_documents import dump
from controller.gcp.google_errors import GoogleError
from controller.resources import deletions
from controller.resources.deletions import PendingDeletion
from controller.resources.pod import capacity_log, search
from controller.resources.pod.capacity_log import CapacityEntry, fetch_entries, load_entries, recent_places_first
from controller.resources.pod.planes import PLANES
from controller.resources.pod.provisioner import Place, SliceSpec, SliceStatus, pod_object
from controller.resources.pod.refusals import HINTS, classify
from tests.controller.localcloud.harness import wait_for
from tests.controller.resources.conftest import EmulatedProject
from tests.controller.resources.fake_pod import TWO_ZONES, A, B, pod
from tests.fakes.context import make_context
from tests.fakes.google import MemoryStorage


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        (
            "stock_out",
            "RESOURCE_EXHAUSTED",
            'There is no more capacity in the zone "europe-west4-a"; you can try in another zone where Cloud TPU Nodes '
            "are offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x1]",
        ),
        ("stock_out", "FAILED_PRECONDITION", "Insufficient reserved capacity. Contact customer support [EID: 0x2]"),
        ("stock_out", "INVALID_ARGUMENT", "Bad request. update is not supported while in state PREEMPTED"),
        ("stock_out", "UNAVAILABLE", "The service is currently unavailable"),
        ("stock_out", "DEADLINE_EXCEEDED", "The queued resource has expired"),
        ("stock_out", "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'R' and limit 'R per minute'"),
        (
            "quota",
            "RESOURCE_EXHAUSTED",
            "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0 in region x.",
        ),
        ("quota", "RESOURCE_EXHAUSTED", "Quota 'TPUV4sPodPerProjectPerRegionForTPUAPI' exhausted. Limit 20800"),
        ("compute_quota", "403", "Quota 'SSD_TOTAL_GB' exceeded. Limit: 500.0 in region us-central1."),
        ("compute_quota", "QUOTA_EXCEEDED", "Quota 'HDB_TOTAL_GB' exceeded. Limit: 500.0 in region us-central1."),
        ("compute_quota", "403", "Quota 'E2_CPUS' exceeded. Limit: 24.0 in region us-central1."),
        ("compute_quota", "403", "Quota 'CPUS_ALL_REGIONS' exceeded.  Limit: 12.0 globally."),
        ("quota", "QUOTA_EXCEEDED", "Quota 'TPUS_PER_TPU_FAMILY' exceeded. Limit: 0.0 in region us-east5."),
        ("permission", "PERMISSION_DENIED", "Permission denied on 'locations/us-central2-b' (or it may not exist)."),
        ("permission", "PERMISSION_DENIED", "Permission 'tpu.nodes.create' denied on 'projects/p'"),
        ("runtime", "INVALID_ARGUMENT", "Cloud TPU received a bad request. Runtime version \"v2-alpha\" unknown"),
        ("type", "INVALID_ARGUMENT", 'Accelerator type "v4-8" was not found in us-central1-a'),
        ("reservation", "NOT_FOUND", "Reservation projects/p/locations/z/reservations/r does not exist"),
        ("name_taken", "ALREADY_EXISTS", "Resource 'projects/p/locations/z/nodes/n' already exists"),
        ("propagating", "INVALID_ARGUMENT", "Service account x@y.iam.gserviceaccount.com does not exist."),
        ("network", "NOT_FOUND", "The resource 'projects/p/global/networks/n' was not found"),
        ("network", "400", "The resource 'projects/p/regions/us-east5/subnetworks/s' was not found"),
        ("network", "INVALID_ARGUMENT", "The resource projects/p/regions/r/subnetworks/s was not found."),
        ("bad_request", "NOT_FOUND", "The resource 'projects/p/zones/z/disks/networks' was not found"),
        ("internal", "INTERNAL", "An internal error has occurred"),
        ("internal", "UNKNOWN", "an internal error has occurred"),
        ("compute_quota", "RESOURCE_EXHAUSTED", "You have reached IN_USE_ADDRESSES limit. [EID: 0x3]"),
        ("compute_quota", "FORBIDDEN", "Quota 'INSTANCES' exceeded. Limit: 8.0 in region us-central1."),
        (
            "propagating",
            "PERMISSION_DENIED",
            "Cloud TPU got permission denied when trying to access the customer project. Make sure that the IAM "
            "account 'service-1@cloud-tpu.iam.gserviceaccount.com' has the 'TPU Service Agent' role",
        ),
        (
            "permission",
            "PERMISSION_DENIED",
            'User does not have permission to submit requests for accelerator type "v6e-4" in location us-east5-a',
        ),
        ("stock_out", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "'zonesAvailable': ''"),
        ("quota", "QUOTA_EXCEEDED", "Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 0.0 in region us-east5."),
        ("compute_quota", "quotaExceeded", "Quota 'INSTANCES' exceeded.  Limit: 8.0 in region us-east5."),
        ("internal", "INTERNAL_ERROR", "Internal error. Please try again or contact Google Support."),
        ("name_taken", "alreadyExists", "The resource 'projects/p/zones/z/instances/pod' already exists"),
        ("type", "invalid", "Machine type with name 'ct6e-standard-4t' does not exist in zone 'us-west1-a'."),
        ("propagating", "RESOURCE_NOT_FOUND", "The resource 'sa@p.iam' of type 'serviceAccount' was not found."),
        ("type", "invalid", "This user agent is not allowed to use the machine type"),
        ("bad_request", "invalid", "MIGs with TPU accelerator topology require BULK mode in target size policy"),
        ("unknown", "WEIRD", "nobody has seen this"),
        ("type", "NOT_FOUND", "v5litepod-16 could not be found in the zonal resources of us-east1-c"),
    ],
)  # fmt: skip
def test_what_an_answer_means(kind: str, code: str, message: str) -> None:
    assert classify(code, message) == kind


def test_a_reservation_that_was_not_asked_for_is_no_capacity() -> None:
    """The answer to spot requests in us-east5-a and -c when there is none left."""
    assert classify("NOT_FOUND", "Reservation not found", reserved=False) == "stock_out"
    assert classify("NOT_FOUND", "Reservation not found") == "reservation"


@pytest.mark.parametrize("plane", PLANES)
def test_each_refusal_names_a_key_or_a_place_to_look(plane: str) -> None:
    for kind in HINTS:
        hint = PLANES[plane].advice.hint(kind)
        assert any(word in hint for word in ("tpu.", "https://", "cloud.", "network."))
        assert "{" not in hint


def test_a_hint_is_that_of_the_plane_that_refused() -> None:
    tpu_api, compute = (PLANES[name].advice for name in ("tpu_api", "compute_engine"))
    assert "roles/tpu.admin" in tpu_api.hint("permission")
    assert "roles/compute.instanceAdmin.v1" in compute.hint("permission")
    assert "gcloud compute tpus" not in compute.hint("type") + compute.hint("runtime") + compute.hint("propagating")
    assert "dead queued resources" in tpu_api.hint("quota")
    assert "dead queued resources" not in compute.hint("quota")


HOUR = 3600.0
NOW = 1767225600.0


@pytest.fixture
def recorded(project: EmulatedProject) -> EmulatedProject:
    project.context.bucket = f"{project.tag}-bucket"
    return project


def on_another_machine(context: Context, folder: Path) -> Context:
    context.state_dir = folder
    return context


def test_answers_and_ends_are_on_record_here_and_in_the_bucket(recorded: EmulatedProject, tmp_path: Path) -> None:
    made = pod(recorded, "tpu.provisioner=node", *TWO_ZONES)
    recorded.inject_fault(kind="stockout", times=1, zone=A, at="request")
    made.up()
    made.down()
    refused, granted = entries = load_entries(recorded.folder)
    assert (refused.zone, refused.tier, refused.answer, refused.ended) == (A, "spot", "stock_out", "")
    assert "no more capacity" in refused.message
    assert (granted.zone, granted.answer, granted.ended) == (B, "granted", "deleted")
    assert granted.lived_seconds is not None
    assert {entry.accelerator_type for entry in entries} == {"v5litepod-8"}

    other = on_another_machine(recorded.context, tmp_path / "other")
    assert load_entries(other.state_dir) == []
    for _ in range(2):
        assert fetch_entries(other, other.bucket, 0.0) == entries
    assert len(capacity_log.capacity_file(other.state_dir).read_text().splitlines()) == 3  # nothing is copied twice
    assert fetch_entries(on_another_machine(other, tmp_path / "third"), other.bucket, granted.time + 1000) == []


def test_a_zone_that_granted_a_slice_comes_first_until_it_preempts_it(recorded: EmulatedProject) -> None:
    made = pod(recorded, "tpu.provisioner=queued", *TWO_ZONES)
    recorded.inject_fault(kind="stockout", times=1, zone=A, at="request")
    made.up()
    made.down()
    second = made.up()
    assert made.asked() == [f"{A} spot", f"{B} spot", f"{B} spot"]
    recorded.inject_fault(kind="preempted", after_seconds=0)
    wait_for(lambda: second.pod_seen(recorded.context).state == "PREEMPTED", "the preemption")
    made.up()
    assert made.asked()[3:] == [f"{A} spot"]
    assert [entry.ended for entry in load_entries(recorded.folder)] == ["", "deleted", "preempted", ""]
    made.down()


@pytest.mark.parametrize(
    "unread", [GoogleError("storage", 503, "UNAVAILABLE", "no bucket today"), PermissionError(13, "Permission denied")]
)
def test_without_its_memory_the_search_goes_on(
    recorded: EmulatedProject, monkeypatch: pytest.MonkeyPatch, unread: Exception
) -> None:
    made = pod(recorded, "tpu.provisioner=node", *TWO_ZONES)

    def refused(*_: object, **__: object) -> None:
        raise GoogleError("storage", 503, "UNAVAILABLE", "no bucket today")

    monkeypatch.setattr(recorded.context.google, "upload", refused)
    monkeypatch.setattr(search, "fetch_entries", Mock(side_effect=unread))
    made.up()
    assert "the answer is on record on this machine only: " in made.notes
    assert f"the record of capacity is not used: {unread}" in made.notes
    assert [entry.answer for entry in load_entries(recorded.folder)] == ["granted"]
    made.down()


def entry(zone: str, hours_ago: float, answer: str = "granted", ended: str = "", kind: str = "v6e-8") -> CapacityEntry:
    return CapacityEntry(
        id=f"{zone}-{hours_ago}",
        time=NOW - hours_ago * HOUR,
        project="acme",
        provisioner="node",
        zone=zone,
        tier="spot",
        accelerator_type=kind,
        pod="p",
        answer=answer,
        ended=ended,
    )


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], "abc"),
        ([entry("b", 3)], "bac"),
        ([entry("b", 3), entry("c", 2)], "cba"),
        ([entry("b", 3), entry("b", 1, "stock_out")], "abc"),
        ([entry("b", 3), entry("b", 1, ended="preempted")], "abc"),
        ([entry("b", 3), entry("b", 1, "withdrawn")], "bac"),  # that says nothing of capacity
        ([entry("b", 3, ended="preempted"), entry("b", 1, ended="deleted")], "bac"),
        ([entry("b", 25)], "abc"),
        ([entry("b", 3, kind="v6e-16")], "abc"),
        ([entry("b", 3), entry("b", 1, answer="", ended="preempted")], "bac"),  # of a slice that nobody asked for here
        ([entry("z", 3)], "abc"),
    ],
)
def test_the_order_of_zones(entries: list[CapacityEntry], expected: str) -> None:
    tiers = ("spot", "on_demand")
    places = [Place(zone, tier, "") for zone in "abc" for tier in tiers]
    found = recent_places_first(places, "v6e-8", entries, NOW)
    assert found == [Place(zone, tier, "") for zone in expected for tier in tiers]


def test_a_damaged_line_is_named_and_skipped(tmp_path: Path) -> None:
    file = capacity_log.capacity_file(tmp_path)
    good = capacity_log._line(entry("b", 3))
    file.write_text(f'{good}\n{{"format": 1, "id"\n{{"format": 1, "id": 3}}\nnull\n')
    damaged: list[int] = []
    assert load_entries(tmp_path, damaged) == [entry("b", 3)]
    assert damaged == [2, 3, 4]


@pytest.mark.parametrize("part", ["project", "zone", "pod"])
def test_a_pending_deletion_of_somebody_else_names_no_file_outside_its_folder(part: str) -> None:
    ours = PendingDeletion("google.com:acme", "us-west4-a", "pod-1", "2026-01-01T00:00:00Z", 1.0, "").to_json()
    assert len(deletions._parse(json.dumps(ours).encode(), "here", [])) == 1
    for text in ("../../../home/me/notes", "/etc/x", "a\0b", "a/b", "..", ".a", "a b", ""):
        notes: list[str] = []
        assert deletions._parse(json.dumps(ours | {part: text}).encode(), "here", notes) == []
        assert notes == ["here is not a pending deletion written by slipway: it was skipped, and you can delete it"]


def test_a_pod_with_a_damaged_record_of_how_google_shows_it_is_taken_as_shown() -> None:
    """Without the record nobody knows whether it is another pod, and it is not deleted for that."""
    spec = SliceSpec(
        workers=1, accelerator_type="v6e-1", runtime_version="r", network="n", external_ip=False, service_account=""
    )
    place, notes = Place(A, "spot", "s", "node"), list[str]()
    status = SliceStatus(spec=spec, place=place, state="READY", uid="1")
    storage = MemoryStorage(mine={})
    context = make_context(storage, notes=notes)
    context.bucket = "mine"
    assert capacity_log.recorded_echo(context, "pod", status) == {}
    for shown in (None, "network", ["network"]):
        storage.buckets["mine"] = {pod_object("echoes", "pod", "1"): dump({"shown": shown}).encode()}
        assert capacity_log.recorded_echo(context, "pod", status) == spec.at(place)
        assert "is damaged: shown is" in notes.pop()


@pytest.mark.parametrize("words", [(), ("tpu=v6e_1", "tpu.zone=us-east5-b")], ids=["one plane", "two planes"])
def test_a_network_that_somebody_deletes_meanwhile_is_looked_at_again(
    project: EmulatedProject, words: tuple[str, ...]
) -> None:
    """As by `down --all` beside an `up`: it rules out no place, and the pod is asked for again."""
    made = pod(project, *words)
    message = "The resource 'projects/slipway-local/regions/r/subnetworks/s' was not found"
    creations = "POST .*/(queuedResources|nodes|instances)[^/]*"
    project.inject_fault(kind="http", status=404, reason="notFound", match=creations, times=2, message=message)
    made.up()
    assert made.notes.count("subnetworks/s' was not found") == made.notes.count("looking at everything again") > 0
    made.down()
