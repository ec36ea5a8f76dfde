"""Service account of the workers."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.client import ConflictError, ForbiddenError, NotFoundError
from controller.gcp.names import MARK, is_marked
from controller.reconcile.resource import Absent, Diff, ObservedResources, Resource, Scope, Unknown


@dataclass(frozen=True, kw_only=True)
class ServiceAccount(Resource):
    """Service account (https://cloud.google.com/iam/docs/reference/rest/v1/projects.serviceAccounts).

    Its name is an account id of the project, `default` (the project's Compute account) or a full address. Only an
    account named by its id is created, and only one created this way is ours.
    """

    kind: ClassVar[str] = "service account"
    scope: ClassVar[Scope] = "shared"
    marked: bool = field(default=False, compare=False)

    @property
    def is_managed(self) -> bool:
        return self.marked

    def email(self, context: Context) -> str:
        return context.account_email(self.name)

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Unknown | Self:
        email = self.email(context)
        try:
            answer = context.google.call(
                "iam", "projects.serviceAccounts.get", name=f"projects/-/serviceAccounts/{email}"
            )
        except NotFoundError:
            if self._named_by_id:
                return Absent()
            message = "enable the Compute Engine API, or set" if self.name == "default" else "set"
            return Unknown(f"{email} does not exist; {message} cloud.service_account to slipway-runner")
        except ForbiddenError:
            return self  # we may not read it; creating the node will show whether it can be used
        marked = self._named_by_id and is_marked(answer)
        return replace(self, marked=marked)

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        account = {"displayName": "Slipway TPU workers", "description": MARK}
        body = {"accountId": self.name, "serviceAccount": account}
        try:
            context.google.call("iam", "projects.serviceAccounts.create", name=f"projects/{context.project}", body=body)
        except ConflictError:
            context.clock.sleep(context.poll_seconds)  # a new account is not visible everywhere at once
        except ForbiddenError as error:
            raise CloudError(
                f"{self.title}: you may not create it ({error.message}); ask an admin to run `gcloud iam "
                f"service-accounts create {self.name} --project={context.project}`, or set cloud.service_account to an "
                "existing one (`default`: the Compute Engine account)"
            ) from None

    def destroy(self, context: Context) -> None:
        current = self.observe(context, {})
        if not isinstance(current, ServiceAccount) or not current.is_managed:
            return
        name = f"projects/{context.project}/serviceAccounts/{self.email(context)}"
        try:
            context.google.call("iam", "projects.serviceAccounts.delete", name=name)
        except NotFoundError:
            return

    @property
    def _named_by_id(self) -> bool:
        return self.name != "default" and "@" not in self.name
