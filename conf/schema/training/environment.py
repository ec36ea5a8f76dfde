"""Environments of GRPO: what answers the policy between its turns, and the limits of an episode."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from conf.extension import OrReference
from conf.schema.base import Strict

ENVIRONMENTS: Mapping[str, str] = {
    "calculator": "trainer.environments.calculator:Calculator",
    "word_game": "trainer.environments.word_game:WordGame",
}
"""Environments that are shipped, by the name that a config gives them, and the class of each."""
VERIFIERS = "verifiers:"
"""Before the id of an environment of the library `verifiers`: the module with its `load_environment`."""
VERIFIERS_QUESTIONS = "trainer.environments.verifiers_rows:questions"
"""The questions of such an environment: `data.source` of the group data=verifiers."""


class Environment(Strict):
    """An environment, and the limits of its processes (docs/environments.md)."""

    name: Annotated[str, OrReference(tuple(ENVIRONMENTS))] | None = Field(
        description="calculator, word_game, module:Class of your own, or verifiers:ENVIRONMENT_ID, with underscores, "
        "of the library verifiers. null: each response is a single turn."
    )
    options: dict[str, Any] = Field(description="Keyword arguments of the class, or of load_environment.")
    max_turns: int = Field(ge=1, le=1024, description="Maximum turns of the policy in an episode.")
    max_turn_tokens: int | None = Field(
        ge=1, description="Maximum tokens that the policy writes in a turn. null: loop.max_new_tokens."
    )
    timeout_seconds: float = Field(gt=0, le=3600, description="CPU seconds of one call of the environment.")
    wall_seconds: float = Field(gt=0, le=86400, description="Seconds of one call, for environments that wait.")
    max_memory_gib: float = Field(gt=0, le=1024, description="Memory of an environment's process, in GiB.")
    max_output_mib: float = Field(
        gt=0, le=1024, description="What one call prints, returns, or writes to a file at most, in MiB."
    )
    workers: int = Field(ge=1, le=256, description="Processes with environments, per worker.")

    @property
    def reference(self) -> str | None:
        """The class, as `module:Class`, or the function that loads an environment of verifiers."""
        if self.verifiers_module is not None:
            return f"{self.verifiers_module}:load_environment"
        return ENVIRONMENTS.get(self.name, self.name) if self.name is not None else None

    @property
    def verifiers_module(self) -> str | None:
        """The module of an environment of the library verifiers; None for others."""
        return self.name.removeprefix(VERIFIERS) if self.name is not None and self.name.startswith(VERIFIERS) else None
