"""Delete the queued resources that Google did not delete when an earlier verb asked for it."""

from collections.abc import Sequence

from controller.context import Context
from controller.gcp.client import GoogleError, NotFoundError
from controller.records.spending import read_claim
from controller.resources.pod.pending_deletion import (
    DeletionPendingError,
    PendingDeletion,
    forget_deletion,
    recorded_deletions,
)
from controller.resources.pod.queued_api import QueuedProvisioner, request_path


def retry_deletions(context: Context, buckets: Sequence[str] = ()) -> list[str]:
    """Try each recorded deletion once.

    Args:
        context: its bucket, and this machine, hold the records.
        buckets: other buckets that may hold some.

    Returns:
        One line for the user about each request.
    """
    places = tuple(dict.fromkeys([context.bucket, *buckets]))
    lines: list[str] = []
    for pending in recorded_deletions(context, places):
        try:
            message = _delete(context, pending, places)
        except DeletionPendingError:
            lines.append(f"{pending}: Google still does not delete it; the next verb tries again")
            continue
        except GoogleError as error:
            lines.append(f"{pending} could not be deleted: {error}; the next verb tries again")
            continue
        forget_deletion(context, pending, places)
        lines.append(f"{pending}: {message}")
    return lines


def _delete(context: Context, pending: PendingDeletion, buckets: Sequence[str]) -> str:
    """Delete a request with its node unless it is in use; return what was found. Raises DeletionPendingError."""
    method = "projects.locations.queuedResources.get"
    try:
        queued = context.google.call("tpu", method, name=request_path(context, pending.pod, pending.zone))
    except NotFoundError:
        return "it is gone"
    if queued.get("createTime") != pending.created:
        return "it is gone, another request has its name"
    queue = QueuedProvisioner(create_seconds=0.0)
    status = queue.observe(context, pending.pod, pending.zone)
    if (
        status is not None
        and status.uid
        and any(_is_claimed(context, bucket, status.uid, pending) for bucket in buckets)
    ):
        return "a run has taken its pod over"
    queue.delete(context, pending.pod, pending.zone, patience=0.0)
    return "deleted, as asked for earlier"


def _is_claimed(context: Context, bucket: str, uid: str, pending: PendingDeletion) -> bool:
    try:
        return bool(read_claim(context.google, bucket, pending.pod, uid))
    except GoogleError:
        return False
