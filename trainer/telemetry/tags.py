"""Tags of the curves in TensorBoard, which draws one section per prefix: `eval/accuracy`, `time/step_time`."""

ROLLOUT = (
    "accuracy", "checks_", "filtered_", "pass_at_k", "response_length", "reward", "rollout_", "sampler_trainer_",
    "samples_drawn", "truncated", "unused", "zero_variance_groups",
)  # fmt: skip
"""Beginnings of the metrics of what the policy wrote and how it was scored."""
TIME = ("_time", "tokens_per_second", "examples_per_second", "mfu", "_gib")
"""Ends of the metrics of speed and memory."""


def curve_tag(name: str) -> str:
    """Return the tag of a metric; a name that has a prefix already keeps it."""
    if "/" in name:
        return name
    for phase in ("eval", "test"):
        if name.startswith(f"{phase}_") and name != f"{phase}_time":
            return f"{phase}/{name.removeprefix(f'{phase}_')}"
    if name.endswith(TIME):
        return f"time/{name}"
    return f"rollout/{name}" if name.startswith(ROLLOUT) else f"train/{name}"
