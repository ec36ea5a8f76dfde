"""Requests that Google does not delete yet: on record in the bucket and on this machine, for the next verb.

Google refuses to delete a queued resource of the TPU API in PROVISIONING. That state can last for hours, and then end
with a billed pod.
"""

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import TypeAdapter

from controller.context import Context
from controller.core.errors import CloudError
from controller.core.formats import Document, FormatError
from controller.gcp.errors import GoogleError, NotFoundError
from controller.gcp.timestamps import parse_timestamp

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
    made the request.
    """

    KEYS: ClassVar = {}

    project: str
    zone: str
    pod: str
    created: str
    since: float
    bucket: str
    provisioner: str = FIRST_PROVISIONER

    def __str__(self) -> str:
        what = "queued resource" if self.provisioner == FIRST_PROVISIONER else "pod"
        return f"{what} {self.pod} in {self.zone}"

    @classmethod
    def from_json(cls, body: Any, where: str = "deletion.json") -> Self:
        """Parse what `to_json` wrote. Raises FormatError, KeyError or ValueError if it is no such record."""
        known = {"provisioner": FIRST_PROVISIONER, **body} if isinstance(body, dict) else body
        found = TypeAdapter(cls).validate_python(vars(super().from_json(known, where)))
        parse_timestamp(found.created)
        return found

    @property
    def created_seconds(self) -> float:
        return parse_timestamp(self.created)

    @property
    def file(self) -> str:
        """Name of its file on this machine, and of its object below the prefix."""
        return f"{self.project.replace(':', '_')}.{self.zone}.{self.pod}.json"


def record_deletion(context: Context, pending: PendingDeletion) -> None:
    """Record a request on this machine, and in the bucket unless that cannot be written."""
    text = json.dumps(pending.to_json(), indent=1)
    folder = context.state_dir / "deletions"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f".draft-{uuid.uuid4().hex}"
    draft.write_text(text)
    draft.replace(folder / pending.file)
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
    (context.state_dir / "deletions" / pending.file).unlink(missing_ok=True)
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
        items = list(context.google.list_all("storage", "objects.list", "items", bucket=bucket, prefix=PREFIX))
    except NotFoundError:
        return found  # no bucket yet
    except GoogleError as error:
        notes.append(f"gs://{bucket} was not searched for pending deletions: {error}")
        return found
    for item in items:
        where = f"gs://{bucket}/{item['name']}"
        try:
            text = context.google.download(bucket, item["name"])
        except NotFoundError:
            continue  # another verb has just deleted it
        except GoogleError as error:
            notes.append(f"{where}, the record of a pending deletion, was not read: {error}")
            continue
        found += _parse(text, where, notes)
    return found


def _parse(text: bytes, where: str, notes: list[str]) -> list[PendingDeletion]:
    """Return the record in a list; an empty list and a note if it is broken."""
    try:
        return [PendingDeletion.from_json(json.loads(text), where)]
    except FormatError as error:
        notes.append(str(error))
    except (KeyError, ValueError, RecursionError):
        notes.append(f"{where} is not a pending deletion written by slipway: it was skipped, and you can delete it")
    return []
