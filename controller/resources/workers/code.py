"""The code on every worker."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.agent.protocol import INSTALL_CODE, InstallCodeRequest
from controller.context import Context
from controller.core.text import plural
from controller.reconcile.resource import Diff, ObservedResources
from controller.resources.uploads.code import CodeArchive
from controller.resources.workers.base import WorkerResource


@dataclass(frozen=True, kw_only=True)
class WorkerCode(WorkerResource):
    """Unpacked code, hashed at every observation, so that a single altered byte shows."""

    kind: ClassVar[str] = "worker code"
    bucket: str = field(compare=False)
    archive: CodeArchive = field(compare=False)
    tree: tuple[str, ...]

    @classmethod
    def for_workers(cls, archive: CodeArchive, workers: int, **placing: Any) -> Self:
        name = archive.name
        return cls(name=name, bucket=archive.bucket, archive=archive, tree=(name,) * workers, **placing)

    @property
    def title(self) -> str:
        return f"code on {plural(len(self.tree), 'worker')}"

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        return replace(self, tree=self.observe_workers(context, observed, lambda a: a["code"], code=self.name))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        payload: InstallCodeRequest = {
            "bucket": self.bucket,
            "object": self.archive.object,
            "sha256": self.archive.snapshot.archive_sha256,
            "tree": self.name,
        }
        self.apply_to_workers(context, observed, INSTALL_CODE, payload, diff, "tree")
