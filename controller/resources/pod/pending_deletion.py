"""Queued resources that Google does not delete yet: on record in the bucket and on this machine, for the next verb.

Google refuses to delete a request in PROVISIONING. That state can last for hours, and then end with a billed pod.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from controller.context import Context
from controller.core.errors import CloudError
from controller.core.formats import Document
from controller.gcp.client import ForbiddenError, GoogleError, NotFoundError

PREFIX = "deletions/"
"""Objects of the bucket that record these requests."""


class DeletionPendingError(CloudError):
    """Google does not delete a request yet. It is on record, and the next verb tries again."""

    exit_code = 9


@dataclass(frozen=True)
class PendingDeletion(Document):
    """A request to delete. `created` tells it from a later one of the same name; `since`: seconds since the epoch."""

    KEYS: ClassVar = {}

    project: str
    zone: str
    pod: str
    created: str
    since: float

    def __str__(self) -> str:
        return f"queued resource {self.pod} in {self.zone}"

    @property
    def file(self) -> str:
        """Name of its file on this machine, and of its object below the prefix."""
        return f"{self.project.replace(':', '_')}.{self.zone}.{self.pod}.json"


def record_deletion(context: Context, pending: PendingDeletion) -> None:
    """Record a request on this machine, and in the bucket unless that cannot be written."""
    text = json.dumps(pending.to_json(), indent=1)
    folder = context.state_dir / "deletions"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / pending.file).write_text(text)
    if not context.bucket:
        return
    try:
        context.google.upload(context.bucket, PREFIX + pending.file, text.encode())
    except GoogleError as error:  # without a bucket, this machine knows it
        context.events.note(f"node/{pending.pod}", f"its deletion is on record on this machine only: {error}")


def recorded_deletions(context: Context, buckets: Iterable[str]) -> list[PendingDeletion]:
    """Return the requests of this project that are on record here or in one of the buckets."""
    folder = context.state_dir / "deletions"
    texts = [path.read_text() for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    for bucket in buckets:
        texts += _objects(context, bucket)
    found = [PendingDeletion.from_json(json.loads(text), PREFIX) for text in texts]
    return list({one.file: one for one in found if one.project == context.project}.values())


def forget_deletion(context: Context, pending: PendingDeletion, buckets: Iterable[str]) -> None:
    """Delete the record of a request."""
    (context.state_dir / "deletions" / pending.file).unlink(missing_ok=True)
    for bucket in buckets:
        try:
            context.google.call("storage", "objects.delete", bucket=bucket, object=PREFIX + pending.file)
        except (ForbiddenError, NotFoundError):
            continue


def _objects(context: Context, bucket: str) -> Iterator[str]:
    try:
        for item in context.google.list_all("storage", "objects.list", "items", bucket=bucket, prefix=PREFIX):
            yield context.google.download(bucket, item["name"]).decode()
    except (ForbiddenError, NotFoundError):
        return  # no bucket yet, or none that we may read
