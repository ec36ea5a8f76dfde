"""What real answers of Google mean, and what the user is told to do."""

from __future__ import annotations

import pytest

from controller.resources.pod.planes import PLANES
from controller.resources.pod.refusals import HINTS, classify


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
        ("permission", "PERMISSION_DENIED", "Permission denied on 'locations/us-central2-b' (or it may not exist)."),
        ("permission", "PERMISSION_DENIED", "Permission 'tpu.nodes.create' denied on 'projects/p'"),
        ("runtime", "INVALID_ARGUMENT", "Cloud TPU received a bad request. Runtime version \"v2-alpha\" unknown"),
        ("type", "INVALID_ARGUMENT", 'Accelerator type "v4-8" was not found in us-central1-a'),
        ("reservation", "NOT_FOUND", "Reservation projects/p/locations/z/reservations/r does not exist"),
        ("name_taken", "ALREADY_EXISTS", "Resource 'projects/p/locations/z/nodes/n' already exists"),
        ("propagating", "INVALID_ARGUMENT", "Service account x@y.iam.gserviceaccount.com does not exist."),
        ("bad_request", "NOT_FOUND", "The resource 'projects/p/global/networks/n' was not found"),
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
        assert "tpu." in hint or "https://" in hint or "cloud." in hint
        assert "{" not in hint


def test_a_hint_is_that_of_the_plane_that_refused() -> None:
    tpu_api, compute = (PLANES[name].advice for name in ("tpu_api", "compute_engine"))
    assert "roles/tpu.admin" in tpu_api.hint("permission")
    assert "roles/compute.instanceAdmin.v1" in compute.hint("permission")
    assert "gcloud compute tpus" not in compute.hint("type") + compute.hint("runtime") + compute.hint("propagating")
    assert "dead queued resources" in tpu_api.hint("quota")
    assert "dead queued resources" not in compute.hint("quota")
