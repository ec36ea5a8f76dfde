"""Refusals of Compute Engine about TPUs, in words that users of the real one have seen."""

from functools import partial

from controller.localcloud.faults.faults import Words
from controller.localcloud.http.call import PROJECT
from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Document

INTERNAL_ERROR = "Internal error. Please try again or contact Google Support. (Code: '-5708443290156853209')"


def no_capacity(zone: str, machine: str) -> ApiError:
    """Return the error of a zone without room. `zonesAvailable` is empty: Google names no other zone."""
    message = (
        f"The zone 'projects/{PROJECT}/zones/{zone}' does not have enough resources available to fulfill the "
        f"request.  '(resource type:compute)'. A {machine} VM instance is currently unavailable in the {zone} zone. "
        "zonesAvailable: ''"
    )
    return ApiError(503, message, status="UNAVAILABLE", reason="ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS")


def quota_exceeded(name: str, limit: int, region: str) -> ApiError:
    return ApiError(
        403, f"Quota '{name}' exceeded.  Limit: {float(limit)} in region {region}.", reason="QUOTA_EXCEEDED"
    )


def wrong_size(size: int, wanted: int) -> ApiError:
    """Return the refusal of a part of a slice: https://github.com/GoogleCloudPlatform/magic-modules/pull/17153."""
    message = f"Target size should be {wanted} for given accelerator topology but was {size}."
    return ApiError(400, f"Invalid value for field 'operation': ''. {message}")


def words_before_staging(machine: str) -> Words:
    """Return what faults say of a creation of VMs of this type before anything is staged."""
    return partial(_creation_error, machine)


def _creation_error(machine: str, spec: Document, zone: str, capacity: str, kind: str) -> ApiError | None:
    region = zone.rpartition("-")[0]
    match spec["kind"]:
        case "stockout":
            return no_capacity(zone, machine)
        case "quota":
            preemptible = capacity in ("spot", "flex_start")
            return quota_exceeded("PREEMPTIBLE_TPUS" if preemptible else "TPUS_PER_TPU_FAMILY", 0, region)
        case "permission":
            message = f"Required 'compute.instances.create' permission for 'projects/{PROJECT}'"
            return ApiError(403, message, reason="forbidden")
        case "type_denied":
            return ApiError(400, f"This user agent is not allowed to use the machine type {machine}.")
        case "no_reservation":
            message = f"Specified reservations [] do not exist in zone {zone}."
            return ApiError(400, message)
    return words_after_staging(spec, zone, capacity, kind) if spec["at"] == "request" else None


def words_after_staging(spec: Document, *_: str) -> ApiError | None:
    """Return what a fault says of a creation once its VMs have been staged, or None."""
    match spec["kind"]:
        case "internal":
            return ApiError(500, INTERNAL_ERROR, reason="INTERNAL_ERROR")
        case "failure":
            return ApiError(spec["code"], spec["message"])
    return None
