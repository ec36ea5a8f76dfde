"""Google APIs that must be enabled in the project."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.errors import ForbiddenError, ServiceDisabledError
from controller.gcp.operations import wait_rpc
from controller.reconcile.resource import Diff, ObservedResources, Resource, Scope

MAX_BATCH = 20
"""APIs per request: https://cloud.google.com/service-usage/docs/reference/rest/v1/services/batchEnable"""


@dataclass(frozen=True, kw_only=True)
class Services(Resource):
    """Enabled APIs (https://cloud.google.com/service-usage/docs/reference/rest/v1/services/batchEnable)."""

    kind: ClassVar[str] = "services"
    scope: ClassVar[Scope] = "external"
    apis: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{len(self.apis)} Google APIs enabled"

    @property
    def is_managed(self) -> bool:
        return False

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        parent = f"projects/{context.project}"
        on: set[str] = set()
        for apis in _batches(self.apis):
            names = [f"{parent}/services/{api}" for api in apis]
            try:
                answer = context.google.call("serviceusage", "services.batchGet", parent=parent, names=names)
            except ForbiddenError as error:
                if self.id not in context.permission_denied:  # the first request to a disabled API will show it
                    context.permission_denied.add(self.id)
                    context.events.note(
                        self.id, f"cannot see which APIs are enabled, so all are taken to be: {error.message}"
                    )
                return self
            except ServiceDisabledError as error:
                command = f"gcloud services enable {error.service} --project={context.project}"
                raise CloudError(
                    f"{error.service} is off, and it is what enables the others; run `{command}`"
                ) from None
            on |= {s["name"].rsplit("/", 1)[-1] for s in answer.get("services", []) if s.get("state") == "ENABLED"}
        return replace(self, apis=tuple(api for api in self.apis if api in on))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        missing = [api for api in self.apis if api not in (diff.changes[0].old or ())]
        parent = f"projects/{context.project}"
        for apis in _batches(missing):
            try:
                operation = context.google.call(
                    "serviceusage", "services.batchEnable", parent=parent, body={"serviceIds": list(apis)}
                )
            except ForbiddenError as error:
                raise CloudError(
                    f"you may not enable {', '.join(missing)} ({error.message}); ask a project admin to run: gcloud "
                    f"services enable {' '.join(missing)} --project={context.project}"
                ) from None
            wait_rpc(context, "serviceusage", operation, "operations.get")

    def disable_command(self, context: Context) -> str:
        """Return the command that disables them again."""
        return f"gcloud services disable {' '.join(self.apis)} --project={context.project}"


def _batches(apis: tuple[str, ...] | list[str]) -> list[tuple[str, ...]]:
    return [tuple(apis[i : i + MAX_BATCH]) for i in range(0, len(apis), MAX_BATCH)]
