"""Sweeps: many runs of one config with different values."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from conf.schema.base import Strict

CaseName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][-\w]{0,40}$")]


class Search(Strict):
    """Search that draws values one by one, in place of a grid."""

    method: Literal["random", "optuna"] = Field(description="random: independent draws. optuna: TPE, with pruning.")
    trials: int = Field(ge=1, le=100_000, description="Number of runs.")
    metric: str = Field(min_length=1, description="Metric to optimize, from summary.json or metrics.jsonl.")
    mode: Literal["min", "max"] = Field(description="Whether to minimize or maximize the metric.")
    prune: bool = Field(description="With optuna, stop runs worse than the median of the others at the same step.")
    seed: int = Field(ge=0, lt=2**31, description="Random seed of the draws.")


class Sweep(Strict):
    """Runs that `-m` starts. No key here changes what a single run computes."""

    pods: int = Field(ge=1, le=1000, description="Runs at the same time, each on its own pod.")
    on_failure: Literal["retry", "skip", "stop"] = Field(
        description="After a failed run. retry: run it again up to `retries` times, then skip. skip: continue with "
        "the others. stop: start no more runs."
    )
    retries: int = Field(ge=0, le=100, description="Times that one run may be retried.")
    params: dict[str, str] = Field(description="Values by key, as on the command line, e.g. {run.seed: '0,1,2'}.")
    cases: dict[CaseName, tuple[str, ...]] = Field(
        description="Overrides by case name. Each case runs with all of params. {}: one case, no overrides."
    )
    search: Search | None = Field(description="Search for good values. null: run the whole grid.")
