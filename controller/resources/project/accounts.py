"""Service account of the workers."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.client import PROPAGATION_SECONDS
from controller.gcp.errors import ConflictError, ForbiddenError, NotFoundError
from controller.gcp.names import MARK, is_marked
from controller.reconcile.resource import Absent, Diff, ObservedResources, Pending, Resource, Scope, Unknown


@dataclass(frozen=True, kw_only=True)
class ServiceAccount(Resource):
    """Service account (https://cloud.google.com/iam/docs/reference/rest/v1/projects.serviceAccounts).

    Its name is an account id of the project, `default` (the project's Compute account) or a full address. Only an
    account named by its id is created, and only one created this way is ours.
    """

    kind: ClassVar[str] = "service account"
    scope: ClassVar[Scope] = "shared"
    marked: bool = field(default=False, compare=False)
    unreadable: bool = field(default=False, compare=False)
    """Whether the caller may not read it, so that it may not exist."""

    @property
    def is_managed(self) -> bool:
        return self.marked

    def email(self, context: Context) -> str:
        return context.account_email(self.name)

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Pending | Unknown | Self:
        email = self.email(context)
        known = context.known_accounts.get(email)
        try:
            answer = self._find(context, email)
        except ForbiddenError:
            if self._named_by_id and known is None:
                return Absent()  # creating it shows whether it exists
            return replace(self, marked=known is True, unreadable=True)
        if answer is not None:
            return replace(self, marked=self._named_by_id and is_marked(answer))
        if known is not None:
            return Pending("a new account is not visible everywhere at once", PROPAGATION_SECONDS)
        if self._named_by_id:
            return Absent()
        message = "enable the Compute Engine API, or set" if self.name == "default" else "set"
        return Unknown(f"{email} does not exist; {message} cloud.service_account to slipway-runner")

    def _find(self, context: Context, email: str) -> dict[str, Any] | None:
        """Return the account, None if it does not exist. Raises ForbiddenError if the caller may not know.

        IAM may answer 403 for an account that does not exist; the list is unambiguous.
        """
        try:
            return context.google.call("iam", "projects.serviceAccounts.get", name=self._path(context))
        except NotFoundError:
            return None
        except ForbiddenError:
            parent = self._path(context).rpartition("/serviceAccounts/")[0]
            found = context.google.list_all("iam", "projects.serviceAccounts.list", "accounts", name=parent)
            return next((account for account in found if account["email"] == email), None)

    def _path(self, context: Context) -> str:
        """Return the full name. `projects/-` would do for every project, but IAM answers it with misleading errors."""
        email = self.email(context)
        project, dot, rest = email.partition("@")[2].partition(".")
        own = not dot or rest != "iam.gserviceaccount.com"
        return f"projects/{context.project if own or self._named_by_id else project}/serviceAccounts/{email}"

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        account = {"displayName": "Slipway TPU workers", "description": MARK}
        body = {"accountId": self.name, "serviceAccount": account}
        email, command = self.email(context), f"gcloud iam service-accounts create {self.name}"
        try:
            context.google.call("iam", "projects.serviceAccounts.create", name=f"projects/{context.project}", body=body)
            context.known_accounts[email] = True
        except ConflictError:
            context.known_accounts[email] = False
        except ForbiddenError as error:
            remedy = f"ask an admin to run `{command} --project={context.project}`"
            if not self._is_readable(context, email):
                context.known_accounts[email] = False
                context.events.note(self.id, f"{self.title}: you may not read it; if it does not exist, {remedy}")
                return
            raise CloudError(
                f"{self.title}: you may not create it ({error.message}); {remedy}, or set cloud.service_account to an "
                "existing one (`default`: the Compute Engine account)"
            ) from None

    def _is_readable(self, context: Context, email: str) -> bool:
        try:
            self._find(context, email)
        except ForbiddenError:
            return False
        return True

    def destroy(self, context: Context) -> None:
        current = self.observe(context, {})
        if not isinstance(current, ServiceAccount) or not current.is_managed:
            return
        try:
            context.google.call("iam", "projects.serviceAccounts.delete", name=self._path(context))
            context.known_accounts.pop(self.email(context), None)
        except NotFoundError:
            return

    @property
    def _named_by_id(self) -> bool:
        return self.name != "default" and "@" not in self.name
