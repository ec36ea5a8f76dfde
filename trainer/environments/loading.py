"""Find the class of an environment."""

from collections.abc import Callable

from conf.environment import ENVIRONMENT_METHODS
from conf.environment import Environment as Episode
from conf.schema.training.run_yaml import RunFileError
from conf.schema.training.sampling import Environment
from trainer.environments import verifiers_env
from trainer.extension import load_extension


def check_class(settings: Environment) -> None:
    """Raise RunFileError if the class is missing or does not fit. An environment of verifiers is not imported."""
    if settings.verifiers_module is not None:
        verifiers_env.check_installed(settings.verifiers_module)
    else:
        load_class(settings)


def load_class(settings: Environment) -> Callable[[], Episode]:
    """Return a function that makes one episode. Raises RunFileError if the class is missing or does not fit."""
    assert settings.reference is not None
    if settings.verifiers_module is not None:
        return verifiers_env.load_episodes(settings)
    made = load_extension("environment", settings.reference, "loop.environment.name", settings.options)
    found = getattr(made, "func", made)
    for name in ENVIRONMENT_METHODS:
        if not callable(getattr(found, name, None)):
            raise RunFileError(f"loop.environment.name: environment {settings.name} has no method {name}")
    return made
