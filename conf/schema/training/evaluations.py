"""Evaluations that a run carries out beside its loop's own: the key `loop.evaluations`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from conf.extension import JSON_SCHEMA, OrReference
from conf.schema.base import Strict

BUILT_IN: Mapping[str, str] = {
    "core": "trainer.evaluation.core:core",
    "lm_eval": "trainer.evaluation.harness:lm_eval",
    "code": "trainer.evaluation.programs:code",
}
"""Evaluations that are shipped, by the name that a config gives them, and the function of each."""


class EvaluationSettings(Strict):
    """One evaluation. A text in place of the section is its `run`."""

    run: Annotated[str, OrReference(tuple(BUILT_IN))] = Field(
        description="core, lm_eval, code, or module:name of your own function (docs/evaluations.md)."
    )
    options: dict[str, Any] = Field(default={}, description="Keyword arguments of the function.")
    interval: Annotated[int, Field(ge=1)] | Literal["end"] | None = Field(
        default=None,
        description="Updates between two runs, a multiple of eval_interval; another one follows the last update. end: "
        "only that one. null: with every evaluation of the loop.",
    )
    timeout_seconds: float = Field(
        default=3600, gt=0, le=604800, description="Seconds after which it is given up; the run goes on without it."
    )

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, raw: Any) -> Any:
        return {"run": raw} if isinstance(raw, str) else raw

    @property
    def reference(self) -> str:
        """The function, as `module:name`."""
        return BUILT_IN.get(self.run, self.run)

    def is_due(self, done: int, steps: int) -> bool:
        """Return whether it runs with the loop's evaluation after `done` of `steps` updates."""
        return done == steps or self.interval is None or (self.interval != "end" and done % self.interval == 0)


class _OrName:
    """Lets editors accept the short form too."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string", "enum": list(BUILT_IN)}, JSON_SCHEMA, handler(schema)]}


_ByName = dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,27}$")], Annotated[EvaluationSettings, _OrName()]]
Evaluations = Annotated[_ByName, BeforeValidator(lambda value: value or {}, json_schema_input_type=_ByName | None)]
"""The section, by name; null is none. A name fits into that of an alert, `evaluation NAME`."""
EVALUATIONS_HELP = "More evaluations, by name: core, lm_eval, code or module:name, or a section (docs/evaluations.md)."


def check_intervals(loop: Any) -> Any:
    """Return the loop, whose evaluations run together with its own. Raises ValueError."""
    for name, wanted in loop.evaluations.items():
        if isinstance(wanted.interval, int) and wanted.interval % loop.eval_interval:
            raise ValueError(
                f"evaluations.{name}.interval ({wanted.interval}) must be a multiple of eval_interval "
                f"({loop.eval_interval})"
            )
    return loop
