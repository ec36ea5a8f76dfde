"""Mesh, checkpoints, logging, and evaluations of a run.

Fields have no defaults: values live only in YAML.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic_core import CoreSchema

from conf.reference import JSON_SCHEMA, OrReference
from conf.schema.base import LATER, VOLATILE, Strict


class Mesh(Strict):
    """Devices along each mesh axis. Their product is the number of devices; one axis may be -1, the remainder."""

    data: int = Field(ge=-1, le=65536, description="Devices that hold full copies of the weights and split the batch.")
    fsdp: int = Field(ge=-1, le=65536, description="Devices that split the batch and the weights.")
    tensor: int = Field(ge=-1, le=65536, description="Devices that split heads, feed-forward width and vocabulary.")
    expert: Annotated[int, LATER] = Field(
        default=1, ge=-1, le=65536, description="Devices that split the experts, the batch, and the other weights."
    )

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by axis, in order."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    @staticmethod
    def shape(sizes: Mapping[str, int], each: str = "{1}") -> str:
        """Return sizes as text, without those that came later and split nothing. each: of a name and its size."""
        return " x ".join(each.format(*axis) for axis in sizes.items() if axis != ("expert", 1))

    @model_validator(mode="after")
    def _sizes(self) -> "Mesh":
        sizes = self.sizes
        if zero := [name for name, size in sizes.items() if size == 0]:
            raise ValueError(f"{', '.join(zero)}: must be at least 1, or -1 for the remaining devices")
        if list(sizes.values()).count(-1) > 1:
            raise ValueError("only one axis may be -1")
        return self


class BestCheckpoint(Strict):
    """Criterion of the best checkpoint: the smallest or largest value of an evaluation metric."""

    metric: str = Field(min_length=1, description="Evaluation metric, e.g. eval_loss.")
    mode: Literal["min", "max"] = Field(description="Whether the smallest or the largest value is best.")

    @staticmethod
    def mode_of(metric: str) -> str:
        """Return the mode of a metric that a loop of Slipway's evaluates."""
        return "max" if "accuracy" in metric else "min"


class CheckpointSettings(Strict):
    """Checkpoints in the run's folder. The last step is always saved."""

    save_interval: int = Field(ge=1, description="Updates between checkpoints.")
    max_to_keep: int = Field(ge=1, le=1000, description="Number of newest checkpoints to keep.")
    best: BestCheckpoint | None = Field(
        description="Keep the best checkpoint too, and save one at each evaluation. null: keep only the newest."
    )
    verify_interval: int = Field(
        ge=0,
        description="Updates between checksum comparisons of the state's copies on all devices, and of the data. Every "
        "checkpoint is compared anyway. 0: only checkpoints.",
    )
    verify_data: bool = Field(
        description="Compare checksums of the batches too; in the lm loop a second worker reads each worker's rows."
    )
    max_outage_hours: Annotated[float, VOLATILE] = Field(
        ge=0,
        le=720,
        description="Hours that training goes on while the bucket does not answer. Checkpoints are saved on the "
        "workers' disks and uploaded later. 0: the run ends after a quarter of an hour.",
    )

    @field_validator("best", mode="before")
    @classmethod
    def _is_mapping(cls, value: object) -> object:
        if isinstance(value, str):
            mode = BestCheckpoint.mode_of(value)
            raise ValueError(f"must be null or {{metric: {value}, mode: {mode}}}, where mode is min or max")
        return value


class ProfileSettings(Strict):
    """Trace of a few updates for TensorBoard's profile page."""

    after: int = Field(ge=0, description="Updates of this process before the trace. The first ones are unusual.")
    updates: int = Field(ge=1, le=1000, description="Number of updates to trace.")


def switched(value: object) -> object:
    """Return what a switch means where a section is expected: its defaults, or none; another value as it is."""
    word = str(value).lower()
    return {} if word in ("true", "yes", "on") else None if word in ("false", "no", "off") else value


WANDB_NAME = r"^[^/\\#?%:\s]+$"
"""Valid W&B project and team names."""


class Wandb(Strict):
    """Config and metrics also go to Weights & Biases, with one W&B run per run (https://docs.wandb.ai)."""

    project: str = Field(
        default="slipway", max_length=128, pattern=WANDB_NAME, description="W&B project. Created if missing."
    )
    entity: str | None = Field(
        default=None, max_length=128, pattern=WANDB_NAME, description="Team or user. null: the API key's own."
    )
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: write files next to the results for `wandb sync`; needs no key."
    )


TRACKERS = ("tensorboard", "trackio", "mlflow", "wandb")
"""Trackers that are shipped."""


class Logging(Strict):
    """Metrics in metrics.jsonl, TensorBoard and, optionally, other trackers."""

    log_interval: int = Field(ge=1, description="Updates between metric lines.")
    profile: Annotated[ProfileSettings | None, VOLATILE] = Field(description="Trace of lm updates. null: none.")
    wandb: Annotated[
        Wandb | None,
        VOLATILE,
        BeforeValidator(switched),
    ] = Field(description="W&B settings; true: all by default. null: off. See docs/runs.md.")
    trackers: Annotated[tuple[Annotated[str, OrReference(TRACKERS)], ...], VOLATILE] = Field(
        default=(),
        description="What gets the metrics of metrics.jsonl, of any program: tensorboard, trackio, mlflow, wandb, or "
        "module:name of your own class (docs/runs.md). The bundled trainer always writes TensorBoard's files.",
    )

    @field_validator("trackers")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if twice := next((name for name in value if value.count(name) > 1), None):
            raise ValueError(f"has {twice} twice; name it once")
        return value

    @property
    def all_trackers(self) -> tuple[str, ...]:
        """The trackers, with that of the section `wandb`."""
        return tuple(dict.fromkeys((*self.trackers, *(["wandb"] if self.wandb is not None else []))))


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
