"""What Google or the bucket has not taken, for a later verb: results of runs, and deletions of requests for pods.

A kept result is written before the pod of a finished run is deleted, and removed once the bucket has it. So neither a
bucket that does not answer nor a killed controller makes the run do its work twice.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from controller.context import Context
from controller.core.errors import CloudError
from controller.core.json_documents import DamagedRecordError, FormatError, dump, load
from controller.gcp.google_errors import GoogleError
from controller.lease_store import BucketLeaseStore, Identity
from controller.records import index
from controller.records.ledger import Ledger, Result
from controller.records.spending import PodLifetime, read_claim, write_ends
from controller.resources.deletions import (
    DeletionPendingError,
    PendingDeletion,
    claim_generation,
    forget_deletion,
    recorded_deletions,
)
from controller.resources.pod.planes import provisioners_of

FILE = "kept_result.json"


class ResultNotRecordedError(CloudError):
    """The run has finished, and the bucket has not taken its result."""


def kept_file(state: Path, run_id: str) -> Path:
    return state / "runs" / run_id / FILE


def keep_result(context: Context, result: Result, lives: Sequence[PodLifetime]) -> None:
    """Keep a result, and the times of the run's pods as this controller knows them, on this machine if it can."""
    text = dump({"result": result.to_json(), "pods": [life.to_json() for life in lives]})
    context.local_notes.write(kept_file(context.state_dir, result.run_id), text)


def forget_result(context: Context, run_id: str) -> None:
    """Delete what `keep_result` wrote; if that cannot be done, the bucket's result counts."""
    file = kept_file(context.state_dir, run_id)
    with context.local_notes.best_effort(file), suppress(FileNotFoundError, NotADirectoryError):
        file.unlink()


def record_result(ledger: Ledger, result: Result) -> Result:
    """Write the result of a run; return it with the seconds since the first launch that is on record."""
    launches = {launch.attempt: launch.time for launch in ledger.launches()}
    for lost in set(range(1, result.attempts + 1)) - set(launches):
        ledger.report(f"{ledger.launch_object(lost)} is missing")
    began = min([result.ended - result.seconds, *launches.values()])
    whole = replace(result, seconds=round(max(0.0, result.ended - began), 1))
    ledger.record_result(whole)
    return whole


def record_kept_result(context: Context, ledger: Ledger) -> None:
    """Write the result that this machine keeps of a run, if it keeps one; a bucket that refuses it again is noted.

    If the bucket has a result, or ends of the pods' times, those count.
    """
    file = kept_file(context.state_dir, ledger.run_id)
    if not file.is_file():
        return
    try:
        body = load(file.read_bytes(), str(file))
        lives, result = [PodLifetime.from_json(one) for one in body["pods"]], Result.from_json(body["result"])
    except (DamagedRecordError, OSError, KeyError, TypeError, ValueError) as error:
        message = f"warning: {file} cannot be used, so the result in it is lost; delete it ({error})"
        context.events.note(ledger.run_id, message)
        return
    try:
        write_ends(context.google, ledger.bucket, ledger.run_id, lives)
        record_result(ledger, result)
    except GoogleError as error:
        context.events.note(ledger.run_id, f"warning: its result is still only in {file}: {error}")
        return
    forget_result(context, ledger.run_id)
    context.events.note(ledger.run_id, f"its result, which was kept in {file}, is on record")


def note_in_table(context: Context, result: Result) -> None:
    """Show the run as finished in this machine's table of runs."""
    row = {"run": result.run_id, "state": result.outcome, "ended": result.ended, "seconds": result.seconds}
    with context.local_notes.best_effort(index.index_file(context.state_dir)):
        index.append_rows(context.state_dir, [{**row, "attempts": result.attempts, "metrics": result.summary}])


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
    if not status.is_labelled:  # whoever can write to a bucket can ask for any deletion
        return "it was not created by Slipway, and stays"
    for bucket in buckets if status.uid else ():
        claim = read_claim(context.google, bucket, pending.pod, status.uid)
        if claim and claim_generation(context, bucket, pending.pod, status.uid) != pending.claim:
            return "a run has taken its pod over"
    for bucket in buckets:  # last, since a run claims its pod only after it has set up the workers
        snapshot = BucketLeaseStore(context.google, bucket, pending.pod).read()
        me = Identity("laptop", "")
        if snapshot is not None and not snapshot.is_free(me.is_known_dead(snapshot.record)):
            raise CloudError(f"{snapshot.record} controls this pod")
    maker.delete(context, pending.pod, pending.zone, is_recorded=True)
    return "deleted, as asked for earlier"
