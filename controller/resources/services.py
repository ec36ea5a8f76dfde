"""The Google APIs that must be enabled in the project."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from controller.operations import wait_rpc
from controller.resource import Diff, Have, Resource, Scope

if TYPE_CHECKING:
    from controller.world import World


@dataclass(frozen=True, kw_only=True)
class Services(Resource):
    """https://cloud.google.com/service-usage/docs/reference/rest/v1/services/batchEnable"""

    kind: ClassVar[str] = "services"
    scope: ClassVar[Scope] = "external"
    apis: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{len(self.apis)} Google APIs enabled"

    def observe(self, world: World, have: Have) -> Self:
        parent = f"projects/{world.project}"
        names = [f"{parent}/services/{api}" for api in self.apis]
        answer = world.google.call("serviceusage", "services.batchGet", parent=parent, names=names)
        on = {s["name"].rsplit("/", 1)[-1] for s in answer.get("services", []) if s.get("state") == "ENABLED"}
        return replace(self, apis=tuple(api for api in self.apis if api in on))

    def apply(self, world: World, have: Have, diff: Diff) -> None:
        missing = [api for api in self.apis if api not in (diff.changes[0].old or ())]
        body = {"serviceIds": missing}
        operation = world.google.call(
            "serviceusage", "services.batchEnable", parent=f"projects/{world.project}", body=body
        )
        wait_rpc(world, "serviceusage", operation, "operations.get")

    def destroy(self, world: World) -> None:
        """APIs stay enabled: others may use them, and an enabled API costs nothing."""
