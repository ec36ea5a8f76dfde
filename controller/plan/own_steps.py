"""Steps of the user's own in the plan (`code.resources`)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from conf.extension import OWN_STEP_METHODS, ExtensionError, load
from conf.schema.config import Config
from controller.core.errors import ConfigError
from controller.inputs.modules import on_search_path
from controller.reconcile.resource import Resource
from controller.resources.project.own import OwnResource
from controller.resources.project.services import Services

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
