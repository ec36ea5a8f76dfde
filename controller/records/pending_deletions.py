"""Delete the requests for pods that Google did not delete when an earlier verb asked for it."""

from collections.abc import Sequence

from controller.context import Context
from controller.core.errors import CloudError
from controller.core.formats import FormatError
from controller.lease.store import BucketLeaseStore, Identity
from controller.records.spending import read_claim
from controller.resources.pod.pending_deletion import (
    DeletionPendingError,
    PendingDeletion,
    forget_deletion,
    recorded_deletions,
)
from controller.resources.pod.planes import provisioners_of


def retry_deletions(context: Context, buckets: Sequence[str] = ()) -> list[str]:
    """Try each recorded deletion once, unless a run may use its pod.

    Verbs call this before they acquire a lease, so every lease that is held is another controller's.

    Args:
        context: its bucket, and this machine, hold the records.
        buckets: other buckets that may hold some.

    Returns:
        Lines for the user about each request, and about what could not be read.
    """
    searched = _names([context.bucket, *buckets])
    lines: list[str] = []
    for pending in recorded_deletions(context, searched, lines):
        places = _names([pending.bucket, *searched])
        try:
            message = _delete(context, pending, places)
        except DeletionPendingError:
            lines.append(f"{pending}: Google still does not delete it; the next verb tries again")
            continue
        except (CloudError, FormatError, ValueError) as error:
            lines.append(f"{pending} was not deleted: {error}; the next verb tries again")
            continue
        lines.append(f"{pending}: {message}")
        forget_deletion(context, pending, places, lines)
    return lines


def _names(buckets: Sequence[str]) -> list[str]:
    return [bucket for bucket in dict.fromkeys(buckets) if bucket]


def _delete(context: Context, pending: PendingDeletion, buckets: Sequence[str]) -> str:
    """Delete a request with its node unless it is in use; return what was found.

    Raises:
        DeletionPendingError: Google still refuses.
        CloudError: a controller is at work on the pod, or it is unknown whether a run uses it.
        FormatError, ValueError: the claim of a run cannot be read.
    """
    maker = provisioners_of([pending.provisioner], 0.0).get(pending.provisioner)
    if maker is None:
        raise CloudError(f"this version of Slipway does not know how {pending.provisioner} pods are deleted")
    status = maker.observe(context, pending.pod, pending.zone)
    if status is None:
        return "it is gone"
    if status.created != pending.created_seconds:
        return "it is gone, another request has its name"
    if status.uid and any(read_claim(context.google, bucket, pending.pod, status.uid) for bucket in buckets):
        return "a run has taken its pod over"
    for bucket in buckets:  # last, since a run claims its pod only after it has set up the workers
        _refuse_if_controlled(context, bucket, pending.pod)
    maker.delete(context, pending.pod, pending.zone, is_recorded=True)
    return "deleted, as asked for earlier"


def _refuse_if_controlled(context: Context, bucket: str, pod: str) -> None:
    """Raise CloudError if a controller holds the pod's lease."""
    snapshot = BucketLeaseStore(context.google, bucket, pod).read()
    me = Identity("laptop", "")
    if snapshot is not None and not snapshot.is_free(me.is_known_dead(snapshot.record)):
        raise CloudError(f"{snapshot.record} controls this pod")
