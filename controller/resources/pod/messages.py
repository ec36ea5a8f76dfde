"""Messages about pods of any plane, and what the checks of planes share."""

from collections.abc import Sequence

from conf.schema.config import Config
from controller.core.finding import Issue
from controller.core.text import plural
from controller.gcp.errors import ForbiddenError
from controller.reconcile.resource import Diff
from controller.resources.pod.provisioner import Place, SliceSpec, SliceStatus


def zone_key(config: Config, zone: str) -> str:
    """Return the key that names a zone."""
    return "tpu.zone" if zone == config.tpu.zone else "tpu.fallback_zones"


def no_listing(zone: str, role: str, error: ForbiddenError) -> Issue:
    """Return that the caller, who lacks `role`, may not list TPUs in a zone."""
    return Issue(
        f"no permission to list TPUs in {zone} ({error.message}). Possible causes: your account lacks "
        f"{role} in the project; cloud.project is not the project with the TPUs (for TRC, the one in your "
        "application); the zone is not available to you (for TRC, use the zones in the email)"
    )


def wrong_worker_count(spec: SliceSpec, status: SliceStatus) -> str:
    """Return that a READY slice has another number of workers than its type."""
    return (
        f"conf/tpu_types.yaml lists {plural(spec.workers, 'worker')} for {spec.accelerator_type}, but Google created "
        f"{status.spec.workers}. The pod is incomplete (`slipway down` deletes it) or the table is wrong: report it, "
        "and choose another tpu.accelerator_type in the meantime"
    )


def nothing_to_adopt(name: str, places: Sequence[Place]) -> str:
    """Return that the pod to adopt is in none of the places."""
    zones = dict.fromkeys(place.zone for place in places)
    return (
        f"pod {name} does not exist in {', '.join(zones)}, and tpu.adopt=true requires an existing pod: create "
        "it, change tpu.name or tpu.zone, or set tpu.adopt=false"
    )


def adopted_differs(name: str, diff: Diff) -> str:
    """Return that the pod to adopt has other settings."""
    return (
        f"pod {name} does not match the config ({diff}), and Slipway never changes an adopted pod: change "
        "tpu.accelerator_type or the pod, or set tpu.adopt=false and another tpu.name"
    )
