"""Images of VMs by family, and the autoscalers that no group here has: what gcloud asks for before it makes VMs."""

import re

from controller.localcloud.apis.networks import invalid_field
from controller.localcloud.http.call import ApiCall, Handler
from controller.localcloud.http.errors import not_found
from controller.localcloud.store import Document

_FAMILIES = {
    "ubuntu-os-accelerator-images": r"ubuntu-accel-\d{4}-amd64-tpu-[-a-z0-9]+",
    "debian-cloud": r"debian-\d+",
    "ubuntu-os-cloud": r"ubuntu-(minimal-)?\d{4}-lts(-[a-z0-9]+)?",
}
"""Pattern of the known families of a project. Their names change too often for a list."""
IMAGE_GB = 10
_IMAGE = re.compile(
    r"(?:.*/)?projects/([^/]+)/(?:global|zones/[^/]+)/(?:images/family|imageFamilyViews|images)/([^/]+)"
)


def check_image(reference: str, field: str) -> None:
    """Raise ApiError 400 or 404 unless the URL names an image or a family that exists."""
    found = _IMAGE.fullmatch(reference)
    if found is None:
        raise invalid_field(field, reference, "The URL is malformed.")
    project, name = found.groups()
    if not re.fullmatch(f"{_FAMILIES.get(project, '.+')}(-v\\d+)?", name):
        raise not_found(reference[reference.find("projects/") :])


class Images:
    """Handlers; `root` is the URL of the API."""

    def __init__(self, root: str) -> None:
        self._root = root

    def handlers(self) -> dict[str, Handler]:
        return {
            "compute.v1:images.getFromFamily": self._family,
            "compute.v1:autoscalers.list": lambda _: {"kind": "compute#autoscalerList"},
            "compute.v1:autoscalers.aggregatedList": lambda _: {"kind": "compute#autoscalerAggregatedList"},
        }

    def _family(self, call: ApiCall) -> Document:
        project, family = call.path["project"], call.path["family"]
        if not re.fullmatch(_FAMILIES.get(project, "(?!)"), family):
            raise not_found(f"projects/{project}/global/images/family/{family}")
        name = f"{family}-v20261101"
        return {
            "kind": "compute#image",
            "name": name,
            "family": family,
            "status": "READY",
            "diskSizeGb": str(IMAGE_GB),
            "selfLink": f"{self._root}projects/{project}/global/images/{name}",
        }
