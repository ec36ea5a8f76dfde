"""The bucket that holds code, assets and runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

from controller.errors import CloudError
from controller.google import Conflict, GoogleError, NotFound
from controller.resource import Absent, Diff, Have, Resource, Scope

if TYPE_CHECKING:
    from controller.world import World

LABEL = {"managed-by": "slipway"}


@dataclass(frozen=True, kw_only=True)
class Bucket(Resource):
    """https://cloud.google.com/storage/docs/json_api/v1/buckets

    In the TPU's region, access by IAM alone, no public access, and no soft delete: deleted checkpoints would be
    billed for another seven days.
    """

    kind: ClassVar[str] = "bucket"
    scope: ClassVar[Scope] = "shared"
    fixed: ClassVar[frozenset[str]] = frozenset({"location"})
    location: str
    marked: bool = field(default=False, compare=False)

    @property
    def ours(self) -> bool:
        return self.marked

    def observe(self, world: World, have: Have) -> Absent | Self:
        try:
            answer = world.google.call("storage", "buckets.get", bucket=self.name)
        except NotFound:
            return Absent()
        except GoogleError as error:
            if error.status == 403:
                raise CloudError(
                    f"bucket {self.name} belongs to someone else; set cloud.bucket to another name"
                ) from None
            raise
        marked = LABEL.items() <= answer.get("labels", {}).items()
        return replace(self, location=answer["location"].lower(), marked=marked)

    def apply(self, world: World, have: Have, diff: Diff) -> None:
        if diff.action != "create":
            raise CloudError(
                f"bucket {self.name} is in {diff.changes[0].old}, the TPU in {self.location}: traffic between them is "
                "slow and billed; set cloud.bucket to one in the TPU's region, or tpu.zone to the bucket's"
            )
        body = {
            "name": self.name,
            "location": self.location,
            "labels": LABEL,
            "iamConfiguration": {
                "uniformBucketLevelAccess": {"enabled": True},
                "publicAccessPrevention": "enforced",
            },
            "softDeletePolicy": {"retentionDurationSeconds": "0"},
        }
        try:
            world.google.call("storage", "buckets.insert", project=world.project, body=body)
        except Conflict:
            return  # ours from a moment ago, or someone else's: the next look decides

    def destroy(self, world: World) -> None:
        """Delete every object, then the bucket."""
        seen = self.observe(world, {})
        if isinstance(seen, Absent) or not seen.ours:
            return
        for item in list(world.google.pages("storage", "objects.list", "items", bucket=self.name, versions=True)):
            try:
                world.google.call(
                    "storage", "objects.delete", bucket=self.name, object=item["name"], generation=item["generation"]
                )
            except NotFound:
                continue  # someone was faster
        world.google.call("storage", "buckets.delete", bucket=self.name)
