"""Definition of a sweep: its runs with their ids, which of them have finished, and the search that draws more.

hydra-optuna-sweeper waits for whole batches and pins optuna below 3; here each pod asks as soon as it is free. The
study is a journal in the state folder, so that a restarted search knows all trials and continues the running ones.
https://optuna.readthedocs.io/en/stable/tutorial/20_recipes/009_ask_and_tell.html
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from conf.schema.cloud import HereCloud
from conf.schema.config import Config, digest
from conf.schema.run_sections import Search, Sweep
from controller.checks.preflight import preflight
from controller.config.compose import compose, compose_variants, sound
from controller.config.this_machine import share_devices
from controller.connect import project_of
from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.events import Event
from controller.core.finding import Finding
from controller.core.text import finite_number, plural
from controller.gcp.prices import hourly_price
from controller.inputs.code import CodeSnapshot, take_snapshot
from controller.inputs.modules import references
from controller.plan.build import Plan, build_plan
from controller.plan.samplers import num_sampler_pods
from controller.records import index
from controller.records.ledger import Ledger, Result
from controller.records.run_weights import with_resolved_weights
from controller.run.estimate import estimate_run, with_interval
from controller.sweep.grid import SearchSpace, Variant, apply_launcher, expand_grid, placed, split_overrides


@dataclass(frozen=True)
class SweepJob:
    """One run of a sweep. `findings` are what the offline checks say of its config, without errors."""

    variant: Variant
    config: Config
    run_id: str
    findings: tuple[Finding, ...] = ()

    @property
    def caution(self) -> str | None:
        """Return why the run is not expected to finish."""
        return None if self.config.code.stand_in else self.config.program.caution


@dataclass(frozen=True)
class SweepDefinition:
    """All runs of a grid, in order, or none for a search, which draws them later. `base` is the shared config."""

    base_config: Config
    jobs: tuple[SweepJob, ...]
    folder: Path
    fixed_overrides: tuple[str, ...] = ()
    space: SearchSpace | None = None
    """Search space of a search."""
    batches: str = ""
    """What all batches of a search by someone else's program have in common; they are one sweep."""
    repeats: tuple[str, ...] = ()
    """Other words for runs that `jobs` has already."""

    @property
    def sweep(self) -> Sweep:
        return self.base_config.sweep

    @property
    def id(self) -> str:
        """Return the sweep id: the same runs are the same sweep, on any number of pods."""
        if self.batches:
            return f"{self.base_config.run.name}-{digest(self.batches)[:8]}"
        if self.space is not None:
            what = [
                self.fixed_overrides,
                self.space.choices,
                self.space.intervals,
                self.sweep.model_dump(exclude={"pods", "hypothesis"}),
            ]
            return f"{self.base_config.run.name}-{digest(what)[:8]}"
        return f"{self.base_config.run.name}-{digest(sorted(job.run_id for job in self.jobs))[:8]}"

    @property
    def misfit(self) -> str:
        """Return which runs are of another experiment than the hypothesis is about; empty if none is."""
        runs = [job.variant.overrides for job in self.jobs] or [self.fixed_overrides]
        return self.sweep.hypothesis.misfit(runs) if self.sweep.hypothesis else ""

    @property
    def fixed_words(self) -> Set[str]:
        """Overrides that all runs share."""
        if self.space is not None:
            return set(self.fixed_overrides)
        return set.intersection(*(set(job.variant.overrides) for job in self.jobs)) - self._own_words

    @property
    def swept_keys(self) -> Set[str]:
        """Keys in which the runs differ."""
        if self.space is not None:
            return {override_key(prefix) for prefix in (*self.space.choices, *self.space.intervals)}
        return {override_key(word) for word in self._own_words}

    @property
    def _own_words(self) -> set[str]:
        return {word for job in self.jobs for word in job.variant.own_overrides}


class JobBuilder:
    """Builds the jobs of variants; reads code that several share once.

    `elsewhere` are files that are shipped beside the code, by their path in the tree.
    """

    def __init__(self, folder: Path, elsewhere: Mapping[str, Path] = MappingProxyType({})) -> None:
        self.folder, self._elsewhere = folder, elsewhere
        self._code: dict[str, CodeSnapshot] = {}

    def build_jobs(self, variants: Sequence[Variant]) -> Iterator[SweepJob]:
        """Compose, check and name each variant.

        Raises ConfigError with the problems of the first invalid variant, under its own overrides.
        """
        overrides = [variant.overrides for variant in variants]
        for variant, (config, problems) in zip(
            variants, compose_variants(overrides, extra_dir=self.folder / "slipway"), strict=True
        ):
            findings = tuple(f for f in preflight(config) if f.check != "sweep_unused") if config else ()
            errors = [f for f in findings if f.severity == "error"]
            if config is None or problems or errors:
                raise ConfigError([f"{variant.prefix}{problem}" for problem in [*problems, *errors]])
            if num_sampler_pods(config):
                raise ConfigError(
                    f"{variant.prefix}loop.sampler.pods: a sweep rents no further pods for its runs; use 0, or "
                    "loop.sampler.workers"
                )
            try:
                config = with_resolved_weights(config)
            except ConfigError as error:
                raise ConfigError([f"{variant.prefix}{problem}" for problem in error.problems]) from None
            yield SweepJob(variant, config, self.build_plan(config).run_id, findings)

    def build_plan(self, config: Config) -> Plan:
        key = digest([config.program.kind, config.code.model_dump(mode="json"), bool(references(config))])
        if key not in self._code:
            snapshot = take_snapshot(config, self.folder)
            beside = (*snapshot.elsewhere, *sorted(self._elsewhere.items()))
            self._code[key] = replace(snapshot, elsewhere=beside)
        return build_plan(config, project_of(config), self.folder, self._code[key])


def compose_base(overrides: Sequence[str], folder: Path) -> Config:
    """Compose the config without the swept overrides, which says how to run the sweep. Raises ConfigError."""
    same, _ = split_overrides(apply_launcher(overrides), folder)
    return sound(compose(same, extra_dir=folder / "slipway"))


def define_sweep(overrides: Sequence[str], folder: Path) -> SweepDefinition:
    """Define the sweep that the overrides describe.

    Raises ConfigError if an override or a run is invalid, or the runs do not fit on the same pods.
    """
    overrides = apply_launcher(overrides)
    base = compose_base(overrides, folder)
    if base.sweep.search is not None:
        same, space = split_overrides(overrides, folder)
        essential = tuple(word for word in same if not word.lstrip("+").startswith("sweep.pods="))
        return SweepDefinition(base, (), folder, essential, space)
    jobs: dict[str, SweepJob] = {}
    again: list[tuple[str, str]] = []
    try:
        for job in JobBuilder(folder).build_jobs(expand_grid(overrides, base.sweep, folder)):
            first = jobs.setdefault(job.run_id, job)  # of equal runs the first names them
            again.append((job.variant.title, first.variant.title))
    except ConfigError as error:
        raise ConfigError([placed(problem, base.sweep, overrides, folder) for problem in error.problems]) from None
    pods = {job.config.pod_name for job in jobs.values()}
    if len(pods) > 1:
        raise ConfigError(
            "-m: cloud, tpu and network must be the same in all runs of a sweep, because they share its pods"
        )
    repeats = tuple(f"{title} is the same run as {first}" for title, first in again if title != first)
    return SweepDefinition(base, tuple(jobs.values()), folder, repeats=repeats)


def with_pod_number(config: Config, pod: int) -> Config:
    """Return the config for the pod with this number, which is kept for the next run."""
    if isinstance(config.cloud, HereCloud):
        cloud = share_devices(config.cloud, pod, config.sweep.pods)
        return config.model_copy(update={"cloud": cloud})
    if config.tpu.adopt:
        return config
    tpu = config.tpu.model_copy(update={"name": f"{config.pod_name}-{pod}"})
    cleanup = config.cleanup.model_copy(update={"on_success": "keep", "on_failure": "keep"})
    return config.model_copy(update={"tpu": tpu, "cleanup": cleanup})


def finished_runs(jobs: Iterable[SweepJob], context: Context, bucket: str) -> set[str]:
    ids = [job.run_id for job in jobs]
    with ThreadPoolExecutor(max_workers=8, thread_name_prefix="results") as pool:
        results = pool.map(lambda run_id: Ledger(context.google, bucket, run_id).result(), ids)
        return {run_id for run_id, result in zip(ids, results, strict=True) if result is not None}


@dataclass(frozen=True)
class Estimate:
    """Estimate for the rest of a sweep, from similar runs or a limit; fields are None if neither exists."""

    runs: int
    seconds_each: float | None
    hours: float | None
    usd: float | None
    why: str
    spread: tuple[float, float] | None = None
    """How many times as long and dear it may be, from least to most; None if the speed was measured, or is unknown."""

    def describe(self, value: float | None, form: Callable[[float], str]) -> str:
        """Return hours or dollars with their interval."""
        low, high = self.spread or (1.0, 1.0)
        return "unknown" if value is None else f"about {with_interval(low * value, value, high * value, form)}"


PACE_KEYS = ("experiment", "scale", "model", "data", "loop", "mesh", "program", "optimizer", "checkpoint")
"""First parts of the overrides that a run's duration may depend on."""


def _is_alike(row: index.RunRow, config: Config, fixed: Set[str], swept: Set[str]) -> bool:
    """Return whether a run of the table took about as long as one of this sweep will."""
    same = (config.run.name, config.topology.accelerator_type, config.cloud.kind)
    if (row.get("name"), row.get("type"), row.get("cloud", config.cloud.kind)) != same:
        return False
    before, wanted = _pace_words(map(str, row.get("overrides") or ())), _pace_words(fixed)
    return {word for word in before ^ wanted if override_key(word) not in swept} == set()


def _pace_words(words: Iterable[str]) -> set[str]:
    return {word for word in words if override_key(word).partition(".")[0] in PACE_KEYS}


def override_key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def estimate(
    config: Config,
    left: int,
    pods: int,
    state: Path,
    now: float,
    configs: Sequence[Config] = (),
    words: tuple[Set[str], Set[str]] = (frozenset(), frozenset()),
) -> Estimate:
    """Estimate total duration and cost before anything starts.

    Finished runs like these say most; else the arithmetic of each of the `configs` left does, or a limit. A run is like
    these if it has the same name, machine and cloud, and differs in the swept keys only: a run with `scale=tiny` says
    nothing about full ones. `words` are the sweep's `fixed_words` and `swept_keys`.
    """
    rows = [row for row in index.load_rows(state) if row.get("state") == "finished" and _is_alike(row, config, *words)]
    known = [row["seconds"] for row in rows]
    if known:
        each, why = statistics.median(known), f"from {plural(len(known), 'finished run')} like these"
    elif guesses := [found for c in configs or (config,) if (found := estimate_run(c, hourly_price(c, now)))]:
        each = 3600 * statistics.mean(found.hours for found in guesses)
        usd = None if any(found.usd is None for found in guesses) else statistics.mean(f.usd or 0.0 for f in guesses)
        hours = math.ceil(left / pods) * each / 3600
        basis = f"{guesses[0].source}: {'the first run has ' if len(guesses) > 1 else ''}{guesses[0].basis}"
        ends = [found.spread or (1.0, 1.0) for found in guesses]
        total = sum(found.hours for found in guesses)
        low, high = (sum(end[i] * f.hours for end, f in zip(ends, guesses, strict=True)) / total for i in (0, 1))
        spread = (low, high) if low < high else None
        return Estimate(left, each, hours, None if usd is None else left * usd, basis, spread)
    elif config.budget.max_hours is not None:
        each, why = 3600 * config.budget.max_hours, "at most, from budget.max_hours"
    else:
        return Estimate(left, None, None, None, "no run like these has finished yet; budget.max_hours sets a limit")
    hours = math.ceil(left / pods) * each / 3600
    price = hourly_price(config, now).total
    return Estimate(left, each, hours, None if price is None else left * each / 3600 * price, why)


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
        when the last controller ended. Raises ConfigError if optuna is not installed, or the overrides leave nothing to
        draw.
        """
        try:
            import optuna
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend
        except ImportError:
            raise ConfigError("sweep.search: needs optuna: pip install 'slipway-tpu[search]'") from None
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
            own = tuple(
                f"{prefix}{self._suggest(trial, prefix)}" for prefix in [*self._space.choices, *self._space.intervals]
            )
            [job] = self._builder.build_jobs([Variant((*self._fixed_overrides, *own), own)])
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
        """Report the result to the study: the metric, or a failure, as NaN is; a pruned trial is reported already."""
        trial = self._trials.pop(job.run_id, None)
        if trial is None:
            return
        value = None if result is None else finite_number(result.summary.get(self._search.metric))
        if value is not None:
            self.study.tell(trial, value)
        else:
            self.study.tell(trial, state=self._storage_file.FAIL)

    def should_prune(self, job: SweepJob, event: Event) -> bool:
        """Report a line of metrics to the study; return whether to prune the run."""
        line, trial = event.data["metrics"], self._trials.get(job.run_id)
        value, step = finite_number(line.get(self._search.metric)), finite_number(line.get("step"))
        if trial is None or value is None or step is None:
            return False
        trial.report(value, int(step))
        if not self._search.prune or not trial.should_prune():
            return False
        self.study.tell(self._trials.pop(job.run_id), state=self._storage_file.PRUNED)
        return True

    def _suggest(self, trial: Any, prefix: str) -> Any:
        name = prefix.lstrip("+").rstrip("=")
        if prefix in self._space.choices:
            return trial.suggest_categorical(name, self._space.choices[prefix])
        low, high, whole, log = self._space.intervals[prefix]
        return trial.suggest_int(name, low, high, log=log) if whole else trial.suggest_float(name, low, high, log=log)
