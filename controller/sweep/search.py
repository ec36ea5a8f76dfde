"""Search by optuna's ask and tell: random sampling, or TPE with median pruning.

hydra-optuna-sweeper waits for whole batches and pins optuna below 3; here each pod asks as soon as it is free. The
study is a journal in the state folder, so that a restarted search knows all trials and continues the running ones.
https://optuna.readthedocs.io/en/stable/tutorial/20_recipes/009_ask_and_tell.html
"""

from pathlib import Path
from typing import Any

from conf.schema.run.sweep import Search
from controller.core.errors import ConfigError
from controller.core.events import Event
from controller.records.ledger import Result
from controller.sweep.definition import JobBuilder, SweepJob
from controller.sweep.grid import SearchSpace, Variant


class SearchSource:
    """Runs of a search; threads call it one at a time."""

    def __init__(
        self,
        search: Search,
        same: tuple[str, ...],
        space: SearchSpace,
        builder: JobBuilder,
        file: Path,
        held: dict[int, str],
    ) -> None:
        """Open or create the study.

        `same` holds the overrides that all runs share, `file` is the journal, and `held` is the run that each pod had
        when the last controller ended.

        Raises:
            ConfigError: optuna is not installed, or the overrides leave nothing to draw.
        """
        try:
            import optuna
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend
        except ImportError:
            raise ConfigError("sweep.search: needs optuna: pip install 'slipway[search]'") from None
        if not space.choices and not space.intervals:
            raise ConfigError("sweep.search: no search space; give a=interval(0,1), a=tag(log,interval(1,9)) or a=1,2")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._search, self._fixed_overrides, self._space, self._builder = search, same, space, builder
        self._trials: dict[str, Any] = {}
        self._storage_file: Any = optuna.trial.TrialState
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(file))),
            study_name=file.stem,
            direction="minimize" if search.mode == "min" else "maximize",
            pruner=optuna.pruners.MedianPruner() if search.prune else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        samplers = {"random": optuna.samplers.RandomSampler, "optuna": optuna.samplers.TPESampler}
        # draw other values than before a restart
        self.study.sampler = samplers[search.method](seed=search.seed + len(self.study.get_trials(deepcopy=False)))
        under_way = self.study.get_trials(deepcopy=False, states=(self._storage_file.RUNNING,))
        self._assigned = held
        self._resumed_trials = {
            trial.user_attrs.get("run", str(trial.number)): optuna.trial.Trial(self.study, trial._trial_id)
            for trial in under_way
        }

    def next_job(self, pod: int) -> SweepJob | None:
        """Return the next trial; trials of an earlier controller come first, each on the pod that had it.

        A trial that equals a running run is marked as failed: two programs of one run would write to the same place.
        """
        while trial := self._next_trial(pod):
            job = self._build_job(trial)
            if job.run_id in self._trials:
                self.study.tell(trial, state=self._storage_file.FAIL)
                continue
            self._trials[job.run_id] = trial
            trial.set_user_attr("run", job.run_id)
            return job
        return None

    def _next_trial(self, pod: int) -> Any:
        free = [run for run in self._resumed_trials if run not in self._assigned.values()]
        for run in [self._assigned.get(pod, ""), *free]:
            if run in self._resumed_trials:
                return self._resumed_trials.pop(run)
        return self.study.ask() if len(self.study.get_trials(deepcopy=False)) < self._search.trials else None

    def job_ended(self, job: SweepJob, result: Result | None) -> None:
        """Report the result to the study: the metric or a failure; a pruned trial has been reported already."""
        trial = self._trials.pop(job.run_id, None)
        if trial is None:
            return
        value = None if result is None else result.summary.get(self._search.metric)
        if isinstance(value, int | float):
            self.study.tell(trial, float(value))
        else:
            self.study.tell(trial, state=self._storage_file.FAIL)

    def should_prune(self, job: SweepJob, event: Event) -> bool:
        """Report a line of metrics to the study; return whether to prune the run."""
        line, trial = event.data["metrics"], self._trials.get(job.run_id)
        value, step = line.get(self._search.metric), line.get("step")
        if trial is None or not isinstance(value, int | float) or not isinstance(step, int | float):
            return False
        trial.report(float(value), int(step))
        if not self._search.prune or not trial.should_prune():
            return False
        self.study.tell(self._trials.pop(job.run_id), state=self._storage_file.PRUNED)
        return True

    def _build_job(self, trial: Any) -> SweepJob:
        own = tuple(
            f"{prefix}{self._suggest(trial, prefix)}" for prefix in [*self._space.choices, *self._space.intervals]
        )
        [job] = self._builder.build_jobs([Variant((*self._fixed_overrides, *own), own)])
        return job

    def _suggest(self, trial: Any, prefix: str) -> Any:
        name = prefix.lstrip("+").rstrip("=")
        if prefix in self._space.choices:
            return trial.suggest_categorical(name, self._space.choices[prefix])
        low, high, whole, log = self._space.intervals[prefix]
        return trial.suggest_int(name, low, high, log=log) if whole else trial.suggest_float(name, low, high, log=log)
