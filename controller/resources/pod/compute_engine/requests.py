"""Requests to Compute Engine that the parts of a slice share."""

import re
from collections.abc import Callable
from typing import Any

from controller.context import Context
from controller.gcp.errors import GoogleError, NotFoundError
from controller.gcp.operations import wait_compute
from controller.resources.pod.provisioner import DELETE_SECONDS

API = "compute"
BUSY = re.compile(r"resource_?not_?ready|is not ready|RESOURCE_OPERATION_RATE_EXCEEDED", re.IGNORECASE)
"""In a refusal while another operation on the resource is under way. A canonical status may hide Compute's own code."""
IN_USE = re.compile(r"resource_?in_?use|is already being used by", re.IGNORECASE)
"""In a refusal to delete what something else needs."""


def get(context: Context, method: str, **names: str) -> dict[str, Any] | None:
    """Return a resource, or None if it does not exist."""
    try:
        return context.google.call(API, method, project=context.project, **names)
    except NotFoundError:
        return None


def change(context: Context, method: str, **parameters: Any) -> None:
    """Send a request that changes a pod, and wait for its operation. Raises GoogleError on a refusal."""
    wait_compute(context, context.google.change_pod(API, method, project=context.project, **parameters))


def delete_when_ready(context: Context, delete: Callable[[], None]) -> None:
    """Call `delete`, again while another operation on the resource is under way; no error if it is gone."""
    late = context.clock.deadline(DELETE_SECONDS)
    while True:
        try:
            delete()
        except NotFoundError:
            return
        except GoogleError as error:
            if late() or not BUSY.search(str(error)):
                raise
            context.clock.sleep(context.poll_seconds)
        else:
            return
