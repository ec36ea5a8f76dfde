"""Steps of the user's own in the plan (`code.resources`): each is an object of their class, as a resource."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from conf.extension import OWN_STEP_METHODS, ExtensionError, OwnStep, load
from conf.schema.config import Config
from controller.context import Context
from controller.core.errors import CloudError, ConfigError, SlipwayError
from controller.gcp.errors import NotFoundError
from controller.inputs.modules import on_search_path
from controller.reconcile.resource import Absent, Change, Diff, ObservedResources, Resource, Scope, difference
from controller.resources.services import Services


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


KEY = "code.resources"


def with_own_steps(config: Config, folders: tuple[Path, ...], shared: tuple[Resource, ...]) -> tuple[Resource, ...]:
    """Return the resources with the user's own steps behind them; the APIs that these need are enabled too."""
    services = next((r for r in shared if isinstance(r, Services)), None)
    if services is None or not config.code.resources:
        return shared
    steps = tuple(own_steps(config, folders, (services.id,)))
    apis = dict.fromkeys([*services.apis, *(api for step in steps for api in step.apis)])
    return (*(replace(r, apis=tuple(apis)) if r is services else r for r in shared), *steps)


def own_steps(config: Config, folders: tuple[Path, ...], depends_on: tuple[str, ...]) -> Iterator[OwnResource]:
    """Yield a resource for each class that the config names.

    Args:
        config: its `code.resources` are imported here.
        folders: where `code.modules` and shipped modules are.
        depends_on: ids of the resources that must exist first.

    Raises:
        ConfigError: a class is missing, raises, or makes objects that cannot be a step.
    """
    taken: dict[str, str] = {}
    for reference in config.code.resources:
        try:
            with on_search_path(config, *folders):
                step = load("resource kind", reference, KEY)(config)
        except ExtensionError as error:
            raise ConfigError(str(error)) from None
        except Exception as error:
            raise ConfigError(f"{KEY}: {reference} raised {error!r}") from error
        if problem := _problem(step):
            raise ConfigError(f"{KEY}: {reference} {problem}")
        if step.name in taken:
            raise ConfigError(f"{KEY}: {reference} and {taken[step.name]} have the same name, {step.name}")
        taken[step.name] = reference
        yield OwnResource(
            name=step.name, reference=reference, step=step, values=dict(step.wanted), depends_on=depends_on
        )


def _problem(step: object) -> str:
    """Return why an object cannot be a step of the plan; empty if it can."""
    if missing := [name for name in OWN_STEP_METHODS if not callable(getattr(step, name, None))]:
        return f"has no method {', '.join(missing)}"
    name = getattr(step, "name", None)
    if not isinstance(name, str) or not name:
        return "must have a name, a text"
    return "" if isinstance(getattr(step, "wanted", None), Mapping) else "must have `wanted`, a mapping"
