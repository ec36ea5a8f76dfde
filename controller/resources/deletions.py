"""Deletions of pods: what Google refuses to delete is on record, for the next verb.

Google deletes nothing that is half made or half changed: a queued resource may be in PROVISIONING for hours, and then
end with a billed pod. So the deletion is on record in the bucket and on this machine.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from pydantic import TypeAdapter

from conf.strict_json import dumps, loads
from controller.context import Context
from controller.core.errors import CloudError
from controller.core.json_documents import Document, FormatError
from controller.gcp.answers import OPERATION_SECONDS, parse_timestamp
from controller.gcp.google_errors import GoogleError, NotFoundError
from controller.resources.pod.provisioner import SliceStatus, pod_object, state_text

PROVISIONING_SECONDS = 1800.0
"""Wait for a request that Google does not delete because it is PROVISIONING: minutes as a rule, at times hours."""
HURRIED_SECONDS = 120.0
"""The same where something else is billed meanwhile, or cannot be asked for."""
DELETION_PENDING = (
    "{} is {}, and Google does not delete it yet{}. Its deletion is on record: the next `slipway` up, status, down or "
    "orphans tries again"
)
PREFIX = "deletions/"
"""Objects of the bucket that record these requests."""
FIRST_PROVISIONER = "queued"
"""That of records which name none: the first version knew no other one."""


class DeletionPendingError(CloudError):
    """Google does not delete a request yet. It is on record, and the next verb tries again."""

    exit_code = 9


@dataclass(frozen=True)
class PendingDeletion(Document):
    """A request to delete. `created` tells it from a later one of the same name; `since`: seconds since the epoch.

    `bucket` is that of the config that asked for the deletion: leases and claims of the pod are there. `provisioner`
    made the request. `claim`: generation of the claim of the run that had the pod then, if one had.
    """

    project: str
    zone: str
    pod: str
    created: str
    since: float
    bucket: str
    provisioner: str = FIRST_PROVISIONER
    claim: str = ""

    def __str__(self) -> str:
        what = "queued resource" if self.provisioner == FIRST_PROVISIONER else "pod"
        return f"{what} {self.pod} in {self.zone}"

    @classmethod
    def from_json(cls, body: Any, where: str = "deletion.json") -> Self:
        """Parse what `to_json` wrote. Raises FormatError, KeyError or ValueError if it is no such record."""
        known = {"provisioner": FIRST_PROVISIONER, "claim": "", **body} if isinstance(body, dict) else body
        found = TypeAdapter(cls).validate_python(vars(super().from_json(known, where)))
        parse_timestamp(found.created)
        if not all(re.fullmatch(r"\w[\w.:-]*", part, re.ASCII) for part in (found.project, found.zone, found.pod)):
            raise ValueError("it names a file outside its folder")
        return found

    @property
    def created_seconds(self) -> float:
        return parse_timestamp(self.created)

    @property
    def file(self) -> str:
        """Name of its file on this machine, and of its object below the prefix."""
        return f"{self.project.replace(':', '_')}.{self.zone}.{self.pod}.json"


def delete_slice(
    context: Context,
    name: str,
    zone: str,
    provisioner: str,
    look: Callable[[], SliceStatus | None],
    delete: Callable[[], bool],
    is_recorded: bool,
    is_hurried: bool,
) -> None:
    """Delete a slice, or a request for one, and wait until it is gone. What Google refuses goes on record.

    A request in PROVISIONING does so at once, since this may be interrupted before there is a pod to delete.

    Args:
        context: the run's context.
        name: of the pod.
        zone: where it is.
        provisioner: what made it.
        look: returns what is there.
        delete: sends the request and waits; returns whether it could see that the operation is done.
        is_recorded: the deletion is on record already, so one attempt is enough.
        is_hurried: something else is billed meanwhile, or cannot be asked for.

    Raises:
        DeletionPendingError: Google does not delete it yet.
        GoogleError: Google refuses for a reason that does not pass by itself.
    """
    late = context.clock.deadline(0.0 if is_recorded else OPERATION_SECONDS)
    patience = min(PROVISIONING_SECONDS, HURRIED_SECONDS) if is_hurried else PROVISIONING_SECONDS
    give_up = context.clock.deadline(0.0 if is_recorded else patience)
    early: PendingDeletion | None = None
    while (found := look()) is not None:
        refusal, is_done = None, False
        try:
            is_done = found.state != "DELETING" and delete()
        except GoogleError as error:
            if error.is_gone:
                break
            refusal = error
        may_pass = refusal is None or refusal.is_not_now or (refusal.status == 400 and found.pending)
        gives_up = not may_pass or (give_up() if found.state == "PROVISIONING" else late())
        if (is_done or gives_up) and look() is None:
            break
        if gives_up:
            pending = early or _pending(context, found, provisioner)
            if not is_recorded and early is None:
                record_deletion(context, pending)
            if refusal is not None and not may_pass:
                context.events.note(f"node/{name}", f"{pending}: its deletion is on record")
                raise refusal
            why = "" if refusal is None else f" ({refusal.message})"
            raise DeletionPendingError(DELETION_PENDING.format(pending, state_text(found.state), why)) from refusal
        if refusal is not None and found.state == "PROVISIONING" and early is None:
            early = _pending(context, found, provisioner)
            record_deletion(context, early)
            words = f"{early} is provisioning, and Google deletes it afterwards; waiting, for at most"
            context.events.note(f"node/{name}", f"{words} {patience / 60:g} minutes. Its deletion is on record")
        context.clock.sleep(context.poll_seconds)
    if early is not None:
        notes: list[str] = []
        forget_deletion(context, early, [context.bucket] if context.bucket else [], notes)
        for note in notes:
            context.events.note(f"node/{name}", note)


def _pending(context: Context, found: SliceStatus, provisioner: str) -> PendingDeletion:
    made = datetime.fromtimestamp(found.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    claim = ""
    with suppress(GoogleError):  # then a claim that is read later keeps the pod
        claim = claim_generation(context, context.bucket, found.name, found.uid)
    about = (context.project, found.place.zone, found.name, made, context.clock.now(), context.bucket)
    return PendingDeletion(*about, provisioner, claim)


def claim_generation(context: Context, bucket: str, pod: str, uid: str) -> str:
    """Return the generation of the object that names the run of a slice; '' without one. It changes with each run."""
    if not bucket or not uid:
        return ""
    found = context.google.find("storage", "objects.get", bucket=bucket, object=pod_object("claims", pod, uid)) or {}
    return found.get("generation", "")


def record_deletion(context: Context, pending: PendingDeletion) -> None:
    """Record a request on this machine, and in the bucket unless that cannot be written."""
    text = dumps(pending.to_json(), indent=1)
    context.local_notes.write(context.state_dir / "deletions" / pending.file, text)
    if not context.bucket:
        return
    try:
        context.google.upload(context.bucket, PREFIX + pending.file, text.encode())
    except GoogleError as error:  # without a bucket, this machine knows it
        context.events.note(f"node/{pending.pod}", f"its deletion is on record on this machine only: {error}")


def recorded_deletions(context: Context, buckets: Iterable[str], notes: list[str]) -> list[PendingDeletion]:
    """Return the requests of this project that are on record here or in one of the buckets.

    What cannot be read is named in `notes`: a pod must be deletable without these records.
    """
    found = deletions_here(context, notes)
    for bucket in buckets:
        found += _in_bucket(context, bucket, notes)
    return list({one.file: one for one in found if one.project == context.project}.values())


def deletions_here(context: Context, notes: list[str]) -> list[PendingDeletion]:
    """Return the requests that are on record on this machine; sends no request."""
    found: list[PendingDeletion] = []
    for path in sorted((context.state_dir / "deletions").glob("*.json")):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            continue  # another process has just deleted it
        except OSError as error:
            notes.append(f"{path} cannot be read: {error}")
            continue
        found += _parse(text, str(path), notes)
    return found


def forget_deletion(context: Context, pending: PendingDeletion, buckets: Iterable[str], notes: list[str]) -> None:
    """Delete the record of a request. One that stays is named in `notes`; the next verb finds no request for it."""
    file = context.state_dir / "deletions" / pending.file
    with context.local_notes.best_effort(file), suppress(FileNotFoundError, NotADirectoryError):
        file.unlink()
    for bucket in buckets:
        name = PREFIX + pending.file
        try:
            context.google.call("storage", "objects.delete", bucket=bucket, object=name)
        except NotFoundError:
            continue
        except GoogleError as error:
            notes.append(f"the record gs://{bucket}/{name} was not deleted: {error}")


def _in_bucket(context: Context, bucket: str, notes: list[str]) -> list[PendingDeletion]:
    found: list[PendingDeletion] = []
    try:
        items = context.google.objects(bucket, PREFIX)
    except GoogleError as error:
        notes.append(f"gs://{bucket} was not searched for pending deletions: {error}")
        return found
    for item in items:
        where = f"gs://{bucket}/{item['name']}"
        try:
            text = context.google.read(bucket, item["name"])
        except GoogleError as error:
            notes.append(f"{where}, the record of a pending deletion, was not read: {error}")
            continue
        found += [] if text is None else _parse(text, where, notes)  # another verb has just deleted it
    return found


def _parse(text: bytes, where: str, notes: list[str]) -> list[PendingDeletion]:
    """Return the record in a list; an empty list and a note if it is broken."""
    try:
        return [PendingDeletion.from_json(loads(text), where)]
    except FormatError as error:
        notes.append(str(error))
    except (KeyError, ValueError, RecursionError):
        notes.append(f"{where} is not a pending deletion written by slipway: it was skipped, and you can delete it")
    return []
