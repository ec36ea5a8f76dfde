"""Code archive in the bucket, named after its content."""

from dataclasses import dataclass, field
from typing import ClassVar, Self

from controller.context import Context
from controller.core.text import is_folder
from controller.gcp.errors import ConflictError, NotFoundError
from controller.inputs.code import CodeSnapshot
from controller.reconcile.resource import Absent, Diff, ObservedResources, Resource, Scope


@dataclass(frozen=True, kw_only=True)
class CodeArchive(Resource):
    """Archive of the code. The object never changes: its name is the hash of the tree inside."""

    kind: ClassVar[str] = "code"
    scope: ClassVar[Scope] = "run"
    bucket: str = field(compare=False)
    snapshot: CodeSnapshot = field(compare=False)

    @property
    def title(self) -> str:
        where = "folder" if is_folder(self.bucket) else "bucket"
        return f"code {self.name[:12]} in the {where} ({self.snapshot.size})"

    @property
    def object(self) -> str:
        return f"code/{self.name}.tar.gz"

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        try:
            context.google.call("storage", "objects.get", bucket=self.bucket, object=self.object)
        except NotFoundError:
            return Absent()
        return self

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        try:
            context.google.upload(self.bucket, self.object, self.snapshot.archive, generation=0)
        except ConflictError:
            return  # someone uploaded the same bytes meanwhile
