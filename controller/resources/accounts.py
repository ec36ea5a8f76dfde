"""The service account the workers run as, and the project roles bound to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from controller.google import Conflict, NotFound
from controller.resource import Absent, Diff, Have, Resource, Scope

if TYPE_CHECKING:
    from controller.world import World

POLICY_VERSION = 3
ATTEMPTS = 5


@dataclass(frozen=True, kw_only=True)
class ServiceAccount(Resource):
    """https://cloud.google.com/iam/docs/reference/rest/v1/projects.serviceAccounts"""

    kind: ClassVar[str] = "service account"
    scope: ClassVar[Scope] = "shared"

    def observe(self, world: World, have: Have) -> Absent | Self:
        try:
            world.google.call("iam", "projects.serviceAccounts.get", name=self._path(world))
        except NotFound:
            return Absent()
        return self

    def apply(self, world: World, have: Have, diff: Diff) -> None:
        body = {"accountId": self.name, "serviceAccount": {"displayName": "Slipway TPU workers"}}
        try:
            world.google.call("iam", "projects.serviceAccounts.create", name=f"projects/{world.project}", body=body)
        except Conflict:
            return  # made a moment ago by someone else; the next look decides

    def destroy(self, world: World) -> None:
        try:
            world.google.call("iam", "projects.serviceAccounts.delete", name=self._path(world))
        except NotFound:
            return

    def _path(self, world: World) -> str:
        return f"projects/{world.project}/serviceAccounts/{world.account_email(self.name)}"


@dataclass(frozen=True, kw_only=True)
class ProjectRoles(Resource):
    """Roles of one member: read-modify-write of the project's policy, guarded by its etag.

    https://cloud.google.com/iam/docs/reference/rest/v1/Policy. Only this member's bindings without a condition are
    looked at or touched; all others are sent back as they came.
    """

    kind: ClassVar[str] = "roles of"
    scope: ClassVar[Scope] = "shared"
    roles: tuple[str, ...]

    def observe(self, world: World, have: Have) -> Self:
        member = self._member(world)
        bound = {
            b["role"]
            for b in self._policy(world).get("bindings", [])
            if member in b.get("members", []) and not b.get("condition")
        }
        return replace(self, roles=tuple(r for r in self.roles if r in bound))

    def apply(self, world: World, have: Have, diff: Diff) -> None:
        self._rewrite(world, add=set(self.roles))

    def destroy(self, world: World) -> None:
        self._rewrite(world, add=set())

    def _rewrite(self, world: World, add: set[str]) -> None:
        """Bind the roles in `add` and unbind the rest of ours; another writer in between means: read again."""
        member = self._member(world)
        for attempt in range(ATTEMPTS):
            policy = self._policy(world)
            bindings = []
            left = set(add)
            for binding in policy.get("bindings", []):
                members = list(binding.get("members", []))
                if binding["role"] in self.roles and not binding.get("condition"):
                    members = [m for m in members if m != member]
                    if binding["role"] in left:
                        left.remove(binding["role"])
                        members.append(member)
                if members:
                    bindings.append({**binding, "members": members})
            bindings += [{"role": role, "members": [member]} for role in sorted(left)]
            if bindings == policy.get("bindings", []):
                return
            body = {"policy": {**policy, "bindings": bindings, "version": POLICY_VERSION}}
            try:
                world.google.call("cloudresourcemanager", "projects.setIamPolicy", resource=world.project, body=body)
                return
            except Conflict:
                if attempt == ATTEMPTS - 1:
                    raise

    def _policy(self, world: World) -> dict:
        body = {"options": {"requestedPolicyVersion": POLICY_VERSION}}
        return world.google.call("cloudresourcemanager", "projects.getIamPolicy", resource=world.project, body=body)

    def _member(self, world: World) -> str:
        return f"serviceAccount:{world.account_email(self.name)}"
