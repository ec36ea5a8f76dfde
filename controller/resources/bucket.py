"""Bucket for code, assets and runs."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from conf.schema.topology import is_near
from controller.context import Context
from controller.core.errors import CloudError
from controller.core.finding import Finding, Rule
from controller.gcp.answers import LABEL, is_labelled
from controller.gcp.google_errors import ConflictError, ExistsError, ForbiddenError, GoogleError, NotFoundError
from controller.reconcile import Absent, Diff, ObservedResources, Resource, Scope

DAY_SECONDS = 24 * 3600
WRITTEN_SECONDS = 60.0
"""How long the bucket is emptied again while others still write there."""
REQUIRED_PERMISSIONS = tuple(f"storage.objects.{verb}" for verb in ("create", "delete", "get", "list"))
USD_PER_GB_MONTH = 0.02
"""List price of standard storage in most regions, 2026: https://cloud.google.com/storage/pricing"""


SOFT_DELETE = Rule(
    "soft_delete", ("warning",), ("cloud.bucket",),
    "Soft delete keeps and bills deleted objects; the message has the price of 100 checkpoints.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bucket(Resource):
    """Cloud Storage bucket (https://cloud.google.com/storage/docs/json_api/v1/buckets).

    A new bucket is in the TPU's region, with access by IAM alone, no public access, and no soft delete: deleted
    checkpoints would be billed for another seven days. An existing bucket is used as it is, if it is near the TPU.
    """

    kind: ClassVar[str] = "bucket"
    scope: ClassVar[Scope] = "shared"
    immutable: ClassVar[frozenset[str]] = frozenset({"location"})
    location: str
    regions: tuple[str, ...] = field(compare=False)
    soft_delete_days: int
    uniform_access: bool = True
    public_access_prevention: str = "enforced"
    noncurrent_days: int
    unfinished_upload_days: int
    marked: bool = field(default=False, compare=False)
    kept_days: float = field(default=0.0, compare=False)
    """When observed: how many days it keeps deleted objects."""

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        try:
            answer = context.google.call("storage", "buckets.get", bucket=self.name, projection="noAcl")
        except NotFoundError:
            return Absent()
        except ForbiddenError as error:
            return self._observe_without_read_access(context, error)
        return self._read(answer)

    def findings(self, current: Any) -> Iterator[Finding]:
        if isinstance(current, Bucket) and not current.is_managed and current.kept_days:
            terabytes, days = 3.1, current.kept_days
            cost = terabytes * 1000 * USD_PER_GB_MONTH * days / 30
            message = (
                f"{self.name} keeps and bills deleted objects for {days:g} days (soft delete): 100 deleted checkpoints "
                f"of 31 GB are {terabytes} TB, about ${cost:.0f}; to turn it off: gcloud storage buckets update "
                f"gs://{self.name} --clear-soft-delete"
            )
            yield SOFT_DELETE.finding(message)

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        if diff.action == "update":
            body = {key: value for key, value in self.body().items() if key not in ("name", "location", "labels")}
            context.google.call("storage", "buckets.patch", bucket=self.name, body=body)
            return
        if diff.action == "replace":
            regions = ", ".join(self.regions)
            raise CloudError(
                f"bucket {self.name} is in {diff.changes[0].old}, the TPU in {regions}: traffic between them is slow "
                "and billed; set cloud.bucket to one near the TPU (null creates it), or tpu.zone near the bucket"
            )
        try:
            context.google.call("storage", "buckets.insert", project=context.project, body=self.body())
        except ExistsError:
            return  # created by us or someone else meanwhile; the next observation decides

    def body(self) -> dict[str, Any]:
        rules = [
            {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": self.unfinished_upload_days}},
            {"action": {"type": "Delete"}, "condition": {"daysSinceNoncurrentTime": self.noncurrent_days}},
        ]
        return {
            "name": self.name,
            "location": self.location,
            "labels": LABEL,
            "iamConfiguration": {
                "uniformBucketLevelAccess": {"enabled": self.uniform_access},
                "publicAccessPrevention": self.public_access_prevention,
            },
            "softDeletePolicy": {"retentionDurationSeconds": str(self.soft_delete_days * DAY_SECONDS)},
            "lifecycle": {"rule": rules},
        }

    def destroy(self, context: Context) -> None:
        """Delete every object, then the bucket; again if somebody else has written there or deletes it as well."""
        late = context.clock.deadline(WRITTEN_SECONDS)
        while not isinstance(current := self.observe(context, {}), Absent) and current.is_managed:
            try:
                self._delete_all(context)
            except NotFoundError:
                return
            except ConflictError:  # it is not empty
                if late():
                    raise
                context.clock.sleep(context.poll_seconds)

    def _delete_all(self, context: Context) -> None:
        listed = context.google.list_all("storage", "objects.list", "items", bucket=self.name, versions=True)
        with ThreadPoolExecutor(max_workers=16) as pool:
            list(pool.map(lambda item: self._delete(context, item), listed))
        context.google.call("storage", "buckets.delete", bucket=self.name)

    def _delete(self, context: Context, item: dict[str, Any]) -> None:
        where = {"bucket": self.name, "object": item["name"], "generation": item["generation"]}
        with suppress(NotFoundError):
            context.google.call("storage", "objects.delete", **where)

    def _read(self, answer: dict[str, Any]) -> Self:
        location = answer["location"].lower()
        near = all(is_near(location, region) for region in self.regions)
        marked = is_labelled(answer)
        kept = int(answer.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0)) / DAY_SECONDS
        current = replace(self, location=self.location if near else location, marked=marked, kept_days=kept)
        if not marked:
            return current  # its other settings are its owner's
        access = answer.get("iamConfiguration", {})
        conditions = {
            rule["action"]["type"]: rule.get("condition", {}) for rule in answer.get("lifecycle", {}).get("rule", [])
        }
        return replace(
            current,
            soft_delete_days=round(kept),
            uniform_access=access.get("uniformBucketLevelAccess", {}).get("enabled", False),
            public_access_prevention=access.get("publicAccessPrevention", "inherited"),
            noncurrent_days=conditions.get("Delete", {}).get("daysSinceNoncurrentTime", 0),
            unfinished_upload_days=conditions.get("AbortIncompleteMultipartUpload", {}).get("age", 0),
        )

    def _observe_without_read_access(self, context: Context, error: GoogleError) -> Self:
        """Handle a bucket that we may not read: it is someone else's, or we may only use its objects."""
        with suppress(ForbiddenError, NotFoundError):
            needed = list(REQUIRED_PERMISSIONS)
            answer = context.google.call("storage", "buckets.testIamPermissions", bucket=self.name, permissions=needed)
            if set(needed) <= set(answer.get("permissions", [])):
                return self
        raise CloudError(
            f"you cannot use bucket {self.name} ({error.message}); all of Google Cloud shares bucket names: set "
            "cloud.bucket to another name, or ask its owner for roles/storage.objectAdmin"
        ) from None
