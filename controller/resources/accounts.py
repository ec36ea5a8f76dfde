"""Service accounts, and their roles in the IAM policies of the project, the bucket, another account and the bastion.

A policy is read, modified and written, guarded by its etag.

https://cloud.google.com/iam/docs/reference/rest/v1/Policy. Only this member's unconditional bindings are read or
changed; all others are sent back unchanged.
"""

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.answers import MARK, is_marked
from controller.gcp.client import PROPAGATION_SECONDS
from controller.gcp.google_errors import ConflictError, ExistsError, ForbiddenError, GoogleError, NotFoundError
from controller.reconcile import Absent, Diff, ObservedResources, Pending, Resource, Scope, Unknown, VanishedError


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

    def is_deleted(self, context: Context, *, is_old: bool) -> bool:
        """Return whether the account was seen and is gone. is_old: one that we made must be visible by now."""
        email = self.email(context)
        try:
            return (is_old or email not in context.known_accounts) and self._find(context, email) is None
        except ForbiddenError:
            return False

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
        except ExistsError:
            context.known_accounts[email] = False
        except ForbiddenError as error:
            remedy = f"ask an admin to run `{command} --project={context.project}`"
            try:
                self._find(context, email)
            except ForbiddenError:
                context.known_accounts[email] = False
                context.events.note(self.id, f"{self.title}: you may not read it; if it does not exist, {remedy}")
                return
            raise CloudError(
                f"{self.title}: you may not create it ({error.message}); {remedy}, or set cloud.service_account to an "
                "existing one (`default`: the Compute Engine account)"
            ) from None

    def destroy(self, context: Context) -> None:
        current = self.observe(context, {})
        if not isinstance(current, ServiceAccount) or not current.is_managed:
            return
        with suppress(NotFoundError):
            context.google.call("iam", "projects.serviceAccounts.delete", name=self._path(context))
            context.known_accounts.pop(self.email(context), None)

    @property
    def _named_by_id(self) -> bool:
        return self.name != "default" and "@" not in self.name


POLICY_VERSION = 3
MAX_CONFLICTS = 8


@dataclass(frozen=True, kw_only=True)
class Roles(Resource):
    """Roles of a service account that Slipway made; any other account gets no roles.

    Without permission to read or change the policy, a note shows the command for an admin. This is no error: the roles
    may be bound already, or not be needed.
    """

    scope: ClassVar[Scope] = "shared"
    methods: ClassVar[str]
    """The API and its collection, with a space in between, whose methods read and replace the policy."""
    version: ClassVar[Mapping[str, Any]] = {"optionsRequestedPolicyVersion": POLICY_VERSION}
    """How `getIamPolicy` is asked for a policy with its conditions."""
    account: ServiceAccount = field(compare=False)
    on: str = field(default="", compare=False)
    """Name of the bucket, machine or account that has the policy; empty for the project."""
    roles: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{super().title} on {self.on}" if self.on else super().title

    @abstractmethod
    def where(self, context: Context) -> dict[str, str]:
        """Return the parameters that name what has the policy."""

    @abstractmethod
    def gcloud_binding(self, context: Context) -> str:
        """Return the gcloud command that adds a binding, without the member and the role."""

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        account = observed.get(self.account.id) or self.account.observe(context, {})
        if isinstance(account, ServiceAccount) and not account.is_managed:
            if account.unreadable:
                self._admin_hint(context, "check")
            return replace(self, marked=False)
        try:
            policy = self._call(context, "getIamPolicy", **self.version)
        except NotFoundError:
            return Absent()
        except ForbiddenError:
            self._admin_hint(context, "read")
            return self
        if self.id in context.permission_denied:
            return self
        member, bindings = self._member(context), policy.get("bindings", [])
        bound = {b["role"] for b in bindings if member in b.get("members", []) and not b.get("condition")}
        current = tuple(role for role in self.roles if role in bound)
        return replace(self, roles=current) if current else Absent()

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        try:
            self._rewrite(context, add=set(self.roles))
        except ForbiddenError:
            context.permission_denied.add(self.id)
            self._admin_hint(context, "change")

    def destroy(self, context: Context) -> None:
        current = self.observe(context, {})
        if not isinstance(current, Absent) and current.is_managed and self.id not in context.permission_denied:
            self._rewrite(context, add=set())

    def _rewrite(self, context: Context, add: set[str]) -> None:
        """Bind the roles in `add` and unbind our other roles, starting over if someone else changed the policy."""
        member, conflicts = self._member(context), 0
        late = context.clock.deadline(PROPAGATION_SECONDS)
        while True:
            policy = self._call(context, "getIamPolicy", **self.version)
            bindings = rebind(policy.get("bindings", []), member, of=set(self.roles), to=add)
            if bindings == policy.get("bindings", []):
                return
            policy = {**policy, "bindings": bindings, "version": POLICY_VERSION}
            bare = self.methods.startswith("storage")  # Cloud Storage alone takes the policy as the whole body
            try:
                self._call(context, "setIamPolicy", body=policy if bare else {"policy": policy})
                return
            except GoogleError as error:
                # A new account is not visible everywhere at once.
                unknown = error.status == 400 and "does not exist" in error.message
                conflicts += isinstance(error, ConflictError)
                if unknown and self.account.is_deleted(context, is_old=late()):
                    raise VanishedError(f"{self.title}: {error.message}") from error
                if late() or conflicts == MAX_CONFLICTS or not (isinstance(error, ConflictError) or unknown):
                    raise
                if unknown:
                    context.clock.sleep(context.poll_seconds)

    def _call(self, context: Context, verb: str, **parameters: Any) -> dict[str, Any]:
        api, collection = self.methods.split()
        return context.google.call(api, f"{collection}.{verb}", **self.where(context), **parameters)

    def _admin_hint(self, context: Context, verb: str) -> None:
        command = f"  gcloud {self.gcloud_binding(context)} --member={self._member(context)} --role="
        commands = "\n".join(f"{command}{role}" for role in self.roles)
        message = f"you may not {verb} the policy; if roles are missing, ask a project admin to run:\n{commands}"
        context.events.note(self.id, f"{self.title}: {message}")

    def _member(self, context: Context) -> str:
        return f"serviceAccount:{self.account.email(context)}"


@dataclass(frozen=True, kw_only=True)
class ProjectRoles(Roles):
    """Roles on the project (https://cloud.google.com/resource-manager/reference/rest/v1/projects/setIamPolicy)."""

    kind: ClassVar[str] = "roles of"
    methods: ClassVar[str] = "cloudresourcemanager projects"
    version: ClassVar[Mapping[str, Any]] = {"body": {"options": {"requestedPolicyVersion": POLICY_VERSION}}}

    def where(self, context: Context) -> dict[str, str]:
        return {"resource": context.project}

    def gcloud_binding(self, context: Context) -> str:
        return f"projects add-iam-policy-binding {context.project} --condition=None"


@dataclass(frozen=True, kw_only=True)
class BucketRoles(Roles):
    """Roles on the bucket (https://cloud.google.com/storage/docs/json_api/v1/buckets/setIamPolicy)."""

    kind: ClassVar[str] = "bucket roles of"
    methods: ClassVar[str] = "storage buckets"

    def where(self, context: Context) -> dict[str, str]:
        return {"bucket": self.on}

    def gcloud_binding(self, context: Context) -> str:
        return f"storage buckets add-iam-policy-binding gs://{self.on}"


@dataclass(frozen=True, kw_only=True)
class AccountRoles(Roles):
    """Roles on another service account: whoever creates a pod must be allowed to run it as the workers' account.

    https://cloud.google.com/iam/docs/reference/rest/v1/projects.serviceAccounts/setIamPolicy
    """

    kind: ClassVar[str] = "account roles of"
    methods: ClassVar[str] = "iam projects.serviceAccounts"
    version: ClassVar[Mapping[str, Any]] = {"options_requestedPolicyVersion": POLICY_VERSION}

    def where(self, context: Context) -> dict[str, str]:
        return {"resource": f"projects/{context.project}/serviceAccounts/{context.account_email(self.on)}"}

    def gcloud_binding(self, context: Context) -> str:
        return f"iam service-accounts add-iam-policy-binding {context.account_email(self.on)}"


@dataclass(frozen=True, kw_only=True)
class BastionRoles(Roles):
    """Roles on the bastion only, whose policy is deleted with it (https://cloud.google.com/compute/docs/access)."""

    kind: ClassVar[str] = "bastion roles of"
    scope: ClassVar[Scope] = "pod"
    methods: ClassVar[str] = "compute instances"
    zone: str = field(compare=False)

    def where(self, context: Context) -> dict[str, str]:
        return {"project": context.project, "zone": self.zone, "resource": self.on}

    def gcloud_binding(self, context: Context) -> str:
        return f"compute instances add-iam-policy-binding {self.on} --zone={self.zone}"

    def destroy(self, context: Context) -> None:
        """Do nothing: the policy is deleted with the bastion."""


def rebind(bindings: list[dict[str, Any]], member: str, *, of: set[str], to: set[str]) -> list[dict[str, Any]]:
    """Return the bindings with the member in the roles `to` and in no other of the roles `of`. Pure.

    Of an account that was deleted while bound, policies keep its name and number, which no account will have again:
    https://cloud.google.com/iam/docs/service-accounts-delete-undelete. What it has of these roles goes too.
    """
    result, left = [], set(to)
    for binding in bindings:
        members = list(binding.get("members", []))
        if binding["role"] in of and not binding.get("condition"):
            members = [m for m in members if not m.startswith(f"deleted:{member}?uid=")]
            if binding["role"] in left:
                left.remove(binding["role"])
                members = members if member in members else [*members, member]
            else:
                members = [m for m in members if m != member]
        if members:
            result.append({**binding, "members": members})
    return result + [{"role": role, "members": [member]} for role in sorted(left)]
