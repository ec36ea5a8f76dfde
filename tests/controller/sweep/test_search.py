"""A search by optuna's ask and tell: of a toy whose best value is known, with programs that are only told of."""

import math
from pathlib import Path
from typing import cast

import pytest

from conf.schema.run.sweep import Search
from controller.core.errors import ConfigError
from controller.core.events import Event
from controller.records.ledger import Result
from controller.sweep.definition import JobBuilder, SweepJob
from controller.sweep.grid import split_overrides
from controller.sweep.search import SearchSource

pytest.importorskip("optuna")
pytestmark = pytest.mark.usefixtures("home")
WORDS = ["+experiment=quickstart", "optimizer.lr=tag(log,interval(1e-6,1e-1))"]


def search(folder: Path, by: str = "optuna", trials: int = 20, words: list[str] = WORDS, **held: str) -> SearchSource:
    same, space = split_overrides(words, folder)
    pods = {int(pod[-1]): run for pod, run in held.items()}
    plain = {"method": by, "trials": trials, "metric": "loss", "mode": "min", "prune": True, "seed": 0}
    return SearchSource(Search.model_validate(plain), same, space, JobBuilder(folder), folder / "study.journal", pods)


def loss(job: SweepJob, step: int) -> float:
    """Smallest at a learning rate of 1e-3."""
    assert job.config.optimizer is not None
    return abs(math.log10(job.config.optimizer.lr) + 3) + 1 / step


def carry(source: SearchSource, job: SweepJob) -> bool:
    """Run the toy; says whether it was pruned."""
    for step in range(1, 6):
        line = {"step": step, "phase": "train", "loss": loss(job, step)}
        if source.should_prune(job, Event(0.0, "metrics", job.run_id, data={"metrics": line})):
            source.job_ended(job, None)
            return True
    source.job_ended(job, Result(job.run_id, "finished", 1, 0.0, 0.0, {"loss": loss(job, 5)}))
    return False


def test_twenty_trials_find_the_better_rate_and_prune_bad_ones(tmp_path: Path) -> None:
    source, pruned = search(tmp_path), 0
    while job := source.next_job(1):
        pruned += carry(source, job)
    assert len(source.study.trials) == 20
    assert pruned >= 3
    assert abs(math.log10(source.study.best_params["optimizer.lr"]) + 3) < 0.5


def test_a_search_that_is_started_again_goes_on_with_what_was_under_way(tmp_path: Path) -> None:
    first = search(tmp_path, trials=4)
    done, cut_off = (cast(SweepJob, first.next_job(pod)) for pod in (1, 2))
    first.job_ended(done, Result(done.run_id, "finished", 1, 0.0, 0.0, {"loss": 1.0}))
    again = search(tmp_path, trials=4, pod2=cut_off.run_id)
    *taken, none = (again.next_job(pod) for pod in (2, 1, 1, 1))
    ids = [job.run_id for job in taken if job]
    assert (ids[0], none) == (cut_off.run_id, None)
    assert len({*ids, done.run_id}) == 4


def test_random_draws_of_choices_and_a_failed_run(tmp_path: Path) -> None:
    source = search(tmp_path, "random", 3, ["+experiment=quickstart", "run.seed=1,2,3"])
    while job := source.next_job(1):
        source.job_ended(job, None)
    assert {trial.state.name for trial in source.study.trials} == {"FAIL"}
    with pytest.raises(ConfigError, match="no search space"):
        search(tmp_path, "random", 3, ["+experiment=quickstart"])
