"""Base class of Compute Engine resources: insert, get, delete and wait.

Networks, subnets, routers and firewall rules carry no labels; the mark in their description says who made them.
"""

import re
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.errors import ConflictError, ForbiddenError, GoogleError, NotFoundError
from controller.gcp.names import MARK
from controller.gcp.operations import wait_compute
from controller.reconcile.resource import Absent, Diff, ObservedResources, Resource, Scope

IN_USE_SECONDS = 300.0
"""How long Google may count a resource as in use after its last user was deleted."""
IN_USE = re.compile("resource_?in_?use|is already being used by", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ComputeResource(Resource):
    """A global or regional Compute Engine resource (https://cloud.google.com/compute/docs/reference/rest/v1)."""

    scope: ClassVar[Scope] = "shared"
    collection: ClassVar[str]
    argument: ClassVar[str]
    key: ClassVar[str] = "network.name"
    """Config key to change when an existing resource of that name conflicts."""
    region: str | None = field(default=None, compare=False)
    marked: bool = field(default=False, compare=False)

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.region}/{self.name}" if self.region else super().id

    @property
    def title(self) -> str:
        return f"{super().title} in {self.region}" if self.region else super().title

    @property
    def is_managed(self) -> bool:
        return self.marked

    @abstractmethod
    def body(self, context: Context) -> dict[str, Any]:
        """Return the body of the insert request, without name and description."""

    @abstractmethod
    def command(self, context: Context) -> str:
        """Return the gcloud command that creates the resource."""

    @abstractmethod
    def read(self, answer: dict[str, Any]) -> Self:
        """Return the resource as observed."""

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        try:
            answer = self.request(context, "get", **{self.argument: self.name})
        except NotFoundError:
            return Absent()
        return self.read(answer)

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        """Create the resource, or patch it if it is ours.

        Raises:
            CloudError: it is not ours and differs, or differs in a field that cannot be changed in place.
        """
        if diff.action == "create":
            body = {"name": self.name, "description": MARK, **self.body(context)}
            try:
                wait_compute(context, self.request(context, "insert", body=body))
            except ConflictError:
                return  # created by someone else meanwhile; the next observation decides
            except ForbiddenError as error:
                self.raise_not_permitted(context, error)
            return
        current = self.observe(context, observed)
        if not isinstance(current, Absent) and not current.is_managed:
            raise CloudError(
                f"{self.title} was not created by Slipway and differs ({diff}). Slipway does not change it: change it "
                f"yourself, or set {self.key} to another name"
            )
        if diff.action == "replace":
            raise CloudError(f"{self.title} exists with other settings ({diff}); change them, or change {self.key}")
        self.update(context, diff)

    def raise_not_permitted(self, context: Context, error: GoogleError) -> None:
        """Raise an error that says who may create the resource, and how."""
        raise CloudError(
            f"{self.title}: you may not create it ({error.message}); ask a project admin to run "
            f"`{self.command(context)}`, or set {self.key} to an existing one"
        ) from None

    def update(self, context: Context, diff: Diff) -> None:
        wanted = self.body(context)
        wait_compute(context, self.request(context, "patch", body=wanted, **{self.argument: self.name}))

    def destroy(self, context: Context) -> None:
        current = self.observe(context, {})
        if isinstance(current, Absent) or not current.is_managed:
            return
        late = context.clock.deadline(IN_USE_SECONDS)
        while True:
            try:
                wait_compute(context, self.request(context, "delete", **{self.argument: self.name}))
                return
            except NotFoundError:
                return  # already deleted
            except GoogleError as error:
                if late() or not IN_USE.search(str(error)):
                    raise
            context.clock.sleep(context.poll_seconds)

    def request(self, context: Context, verb: str, **parameters: Any) -> dict[str, Any]:
        where = {"project": context.project} | ({"region": self.region} if self.region else {})
        return context.google.call("compute", f"{self.collection}.{verb}", **where, **parameters)
