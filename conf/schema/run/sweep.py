"""Sweeps: many runs of one config with different values."""

from collections.abc import Iterable
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


class Hypothesis(Strict):
    """What a sweep asks, and what its authors expect of it. Written before its runs; it changes nothing in them."""

    experiment: str = Field(min_length=1, description="Experiment that it is about, as in +experiment=NAME.")
    question: str = Field(min_length=1, description="What the sweep asks.")
    expected: str = Field(min_length=1, description="The answer that is expected.")
    decision: str = Field(min_length=1, description="What the result must show for the expectation to hold.")
    metric: str = Field(min_length=1, description="Metric that decides, from metrics.jsonl or summary.json.")
    baseline: str = Field(min_length=1, description="Setting that the others are compared with: a case, or overrides.")

    def misfit(self, runs: Iterable[Iterable[str]]) -> str:
        """Return how many of the runs, given by their overrides, are of another experiment; empty if none is."""
        found = [_experiment(overrides) for overrides in runs]
        others = [name for name in found if name != self.experiment]
        if not others:
            return ""
        names = " and ".join(f"+experiment={name}" if name else "no experiment" for name in dict.fromkeys(others))
        return f"{len(others)} of {len(found)} runs are of {names}, not of +experiment={self.experiment}"


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
    hypothesis: Hypothesis | None = Field(
        default=None, description="What is asked and expected; `plan` and `report` print it. null: nothing was said."
    )


def _experiment(overrides: Iterable[str]) -> str:
    """Return the experiment that the last such override chooses; empty if none does."""
    pairs = (word.lstrip("+").partition("=") for word in overrides)
    return next(iter([value for key, _, value in pairs if key == "experiment"][::-1]), "")
