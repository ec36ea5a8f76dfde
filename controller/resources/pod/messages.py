"""Messages that planes have in common, and what their checks share."""

from conf.schema.config import Config
from controller.core.finding import Issue
from controller.gcp.errors import ForbiddenError


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
