"""Many runs of one config: over which values, on how many pods, and what happens to those that fail."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from conf.schema.base import Strict

CaseName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][-\w]{0,40}$")]


class Search(Strict):
    """Values drawn one after the other, in place of a grid."""

    method: Literal["random", "optuna"] = Field(description="random: each draw by itself; optuna: TPE, with pruning")
    trials: int = Field(ge=1, le=100_000, description="runs in all")
    metric: str = Field(min_length=1, description="the number of summary.json, or of metrics.jsonl, that is sought")
    mode: Literal["min", "max"] = Field(description="is the best value the smallest or the largest?")
    prune: bool = Field(
        description="optuna only: end runs that are worse than the median of the others was at that step"
    )
    seed: int = Field(ge=0, lt=2**31, description="of the draws")


class Sweep(Strict):
    """What `-m` runs. Nothing here changes what one run computes."""

    pods: int = Field(ge=1, le=1000, description="runs at the same time, each on a pod of its own")
    on_failure: Literal["retry", "skip", "stop"] = Field(
        description="of a run that has failed: again, at most `retries` times, then as skip; go on with the others; or "
        "start no further one"
    )
    retries: int = Field(ge=0, le=100, description="how often one run is started again")
    params: dict[str, str] = Field(description="values by key as on the command line, e.g. {run.seed: '0,1,2'}")
    cases: dict[CaseName, tuple[str, ...]] = Field(
        description="settings by name, each a list of words; every one is run with all of params; {}: one without words"
    )
    search: Search | None = Field(description="null: the whole grid")
