"""A step of the plan that the user plugs in (`code.resources`): an object of their class, as a resource."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from conf.extension import OwnStep
from controller.context import Context
from controller.core.errors import CloudError, SlipwayError
from controller.gcp.errors import NotFoundError
from controller.reconcile.resource import Absent, Change, Diff, ObservedResources, Resource, Scope, difference


@dataclass(frozen=True, kw_only=True)
class OwnResource(Resource):
    """What the user's object reads, creates and deletes. One that differs is replaced if Slipway created it."""

    kind: ClassVar[str] = "own step"
    scope: ClassVar[Scope] = "shared"
    reference: str = field(compare=False)
    """`module:name` of the class, for messages."""
    step: OwnStep = field(compare=False)
    values: Mapping[str, Any] = field(default_factory=dict)
    managed: bool = field(default=False, compare=False)

    @property
    def apis(self) -> tuple[str, ...]:
        """Return the Google APIs that it needs."""
        return tuple(getattr(self.step, "apis", ()))

    @property
    def is_managed(self) -> bool:
        return self.managed

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        try:
            answer = self._call("read", self.step.read, context)
        except NotFoundError:
            return Absent()
        found = dict(answer) if isinstance(answer, Mapping) else {}
        managed = found.pop("managed", None)
        missing = sorted({*self.values} - found.keys())
        if not isinstance(managed, bool) or missing:
            lacks = "managed (true or false)" if not isinstance(managed, bool) else ", ".join(missing)
            raise CloudError(f"code.resources: {self.reference}.read must return a mapping with {lacks}")
        return replace(self, values=found, managed=managed)

    def diff(self, current: Absent | Resource) -> Diff:
        if not isinstance(current, OwnResource):
            return Diff("create", tuple(Change(key, None, value) for key, value in self.values.items()))
        return difference(self.values, current.values, frozenset(self.values))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        if diff.action == "replace":
            self._delete_ours(context, f"differs ({diff}) and was not created by Slipway; delete or change it by hand")
        self._call("create", self.step.create, context)

    def destroy(self, context: Context) -> None:
        self._delete_ours(context)

    def _delete_ours(self, context: Context, otherwise: str = "") -> None:
        current = self.observe(context, {})
        if isinstance(current, Absent):
            return
        if current.is_managed:
            self._call("delete", self.step.delete, context)
        elif otherwise:
            raise CloudError(f"{self.title} {otherwise}")

    def _call(self, name: str, method: Callable[[Any, str], Any], context: Context) -> Any:
        try:
            return method(context.google, context.project)
        except SlipwayError:
            raise
        except Exception as error:
            raise CloudError(f"code.resources: {self.reference}.{name} raised {error!r}") from error
