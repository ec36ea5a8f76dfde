"""Runs that differ only in the seed, grouped into settings; and the statistics by which a report compares settings.

What their sweep asked and expected is read here too, because it names the baseline.

`compare`: Student's t for pairs with the same seed, else Welch's t. Welch, B. L. (1947), Biometrika 34, 28-35. On tests
for few seeds: Colas, Sigaud, Oudeyer (2019), A Hitchhiker's Guide to Statistical Comparisons of Reinforcement Learning
Algorithms, https://arxiv.org/abs/1904.06979.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import ValidationError

from conf.schema.base import without_volatile
from conf.schema.config import digest
from conf.schema.run_sections import Hypothesis
from conf.schema.validation import validate
from controller.core.errors import ConfigError
from controller.records.table import flat
from controller.report.gather import RecordedRun


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in the seed: `runs` has one per seed, `superseded_runs` those replaced by a later run."""

    label: str
    runs: tuple[RecordedRun, ...]
    superseded_runs: tuple[RecordedRun, ...] = ()

    @cached_property
    def counted_runs(self) -> tuple[RecordedRun, ...]:
        """Runs whose numbers count: the finished ones, or all while none has finished."""
        return tuple(run for run in self.runs if run.state == "finished") or self.runs


@dataclass(frozen=True)
class Asked:
    """The hypothesis of the runs of a report. `misfits` say which of them it is not about, and what it lacks."""

    hypothesis: Hypothesis
    misfits: tuple[str, ...] = ()


def group_by_hypothesis(
    name: str, runs: Sequence[RecordedRun], baseline: str = ""
) -> tuple[list[Setting], Asked | None]:
    """Return the settings, the baseline first, and the hypothesis of the runs if they have one in common.

    The record of a run has the hypothesis of the sweep that made it, so only runs that the sweep `name` has made are
    asked, unless it has made none. The hypothesis chooses the baseline where `baseline` is empty. Raises ConfigError as
    `group_settings` does.
    """
    own = [run for run in runs if run.row.get("sweep") == name] or runs
    hypothesis = _recorded_hypothesis(own[0]) if own else None
    if hypothesis is None or any(_recorded_hypothesis(run) != hypothesis for run in own):
        return group_settings(runs, baseline), None
    misfits = [hypothesis.misfit(run.overrides for run in runs)]
    try:
        settings = group_settings(runs, baseline or hypothesis.baseline)
    except ConfigError:
        if baseline:
            raise
        settings = group_settings(runs)
        misfits.append(f"no run of its baseline is here: {hypothesis.baseline}")
    return settings, Asked(hypothesis, tuple(filter(None, misfits)))


def _recorded_hypothesis(run: RecordedRun) -> Hypothesis | None:
    """Return what the record says; None for a run without one, or of another version."""
    config = (run.record or {}).get("config")
    sweep = config.get("sweep") if isinstance(config, dict) else None
    try:
        return Hypothesis.model_validate(sweep.get("hypothesis")) if isinstance(sweep, dict) else None
    except ValidationError:
        return None


def group_settings(runs: Sequence[RecordedRun], baseline: str = "") -> list[Setting]:
    """Return the settings, the baseline first.

    `baseline` is a label, or holds overrides (or the name of a case) that only one setting has. If empty, the setting
    with the fewest overrides of its own is the baseline, the oldest of them if several. Raises ConfigError if no
    setting, or more than one, has the overrides of `baseline`.
    """
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(_setting_key(run), []).append(run)
    found = list(groups.values())
    own = _distinct_overrides([group[0] for group in found])
    cases = [_case(group[0]) for group in found]
    short = _short_keys([[w for w in words if w not in case.words] for words, case in zip(own, cases, strict=True)])
    labels = _labels(
        found, [[case.name, *words] if case.name else words for case, words in zip(cases, short, strict=True)]
    )
    if baseline:
        wanted = set(baseline.split())
        chosen = [i for i, label in enumerate(labels) if label == baseline]
        chosen = chosen or [i for i, overrides in enumerate(own) if wanted <= {*overrides, cases[i].name}]
        if len(chosen) != 1:
            said = "no setting has" if not chosen else f"{len(chosen)} settings have"
            raise ConfigError(f"--baseline {baseline}: {said} these overrides; settings: {'; '.join(labels)}")
    else:
        chosen = [min(range(len(found)), key=lambda i: (len(own[i]), i))] if found else []
    order = [*chosen, *(i for i in range(len(found)) if i not in chosen)]
    return [Setting(labels[i], *_latest_per_seed(found[i])) for i in order]


class _Case(NamedTuple):
    name: str = ""
    words: tuple[str, ...] = ()


def _case(run: RecordedRun) -> _Case:
    """Return the case of the run's sweep with the most overrides among those whose overrides the run has."""
    config = (run.record or {}).get("config")
    sweep = config.get("sweep") if isinstance(config, dict) else None
    cases = sweep.get("cases") if isinstance(sweep, dict) else None
    found = [_Case()]
    for name, words in cases.items() if isinstance(cases, dict) else ():
        if isinstance(words, list) and set(map(str, words)) <= set(run.overrides):
            found.append(_Case(str(name), tuple(map(str, words))))
    return max(found, key=lambda case: (len(case.words), bool(case.name)))


def _setting_key(run: RecordedRun) -> str:
    """Hash the computation without the seed; for a run with an unreadable record, hash its overrides."""
    config = validate(run.record["config"])[0] if run.record and isinstance(run.record.get("config"), dict) else None
    if run.record is None or config is None:
        return digest([word for word in run.overrides if not _is_ignored_override(word)])
    plain = without_volatile(config)
    del plain["run"]["seed"]
    data = [asset.get("identity") for asset in run.record.get("assets", ()) if isinstance(asset, dict)]
    return digest([plain, run.record.get("code_sha256"), data])


def _is_ignored_override(word: str) -> bool:
    """Return whether an override only sets the seed or how the sweep is run."""
    return word.lstrip("+").startswith(("run.seed=", "sweep.", "sweep="))


def _distinct_overrides(runs: Sequence[RecordedRun]) -> list[tuple[str, ...]]:
    shared = set.intersection(*(set(run.overrides) for run in runs)) if runs else set()
    return [
        tuple(word for word in run.overrides if word not in shared and not _is_ignored_override(word)) for run in runs
    ]


def _short_keys(own: Sequence[Sequence[str]]) -> list[list[str]]:
    """Shorten `optimizer.lr=0.1` to `lr=0.1`, where no other key ends the same way."""
    keys = {word.partition("=")[0].lstrip("+") for overrides in own for word in overrides}
    ends = [key.rpartition(".")[2] for key in keys]

    def short(word: str) -> str:
        key, sign, value = word.partition("=")
        end = key.lstrip("+").rpartition(".")[2]
        return f"{end}{sign}{value}" if ends.count(end) == 1 else word

    return [[short(word) for word in overrides] for overrides in own]


def _labels(groups: Sequence[Sequence[RecordedRun]], own: Sequence[Sequence[str]]) -> list[str]:
    """Label groups by their overrides or else their name, plus other differences where that is ambiguous."""
    labels = [" ".join(w) or str(g[0].row.get("name") or g[0].id) for g, w in zip(groups, own, strict=True)]
    for label in {label for label in labels if labels.count(label) > 1}:
        alike = [i for i, other in enumerate(labels) if other == label]
        for i, more in zip(alike, _differences([groups[i][0] for i in alike]), strict=True):
            labels[i] = f"{label} ({more})"
    return labels


def _differences(runs: Sequence[RecordedRun]) -> list[str]:
    """Distinguish runs with equal overrides by config keys, or else the code, or else the id."""
    configs = [flat((run.record or {}).get("config") or {}) for run in runs]
    away = ("run.seed", "tpu.name", "run.state_dir")
    keys = [k for k in configs[0] if k not in away and any(c.get(k) != configs[0][k] for c in configs)]
    if keys:
        return [", ".join(f"{key}={config.get(key)}" for key in keys[:3]) for config in configs]
    codes = [str(run.row.get("code", ""))[:12] for run in runs]
    return [f"code {code}" for code in codes] if len(set(codes)) == len(codes) else [run.id for run in runs]


def _latest_per_seed(runs: Sequence[RecordedRun]) -> tuple[tuple[RecordedRun, ...], tuple[RecordedRun, ...]]:
    """Return for each seed the last run, preferring a finished one; and the other runs."""
    best: dict[Any, RecordedRun] = {}
    for run in runs:
        key = run.id if run.seed is None else digest([run.seed])
        if key not in best or run.state == "finished" or best[key].state != "finished":
            best[key] = run
    kept = {run.id for run in best.values()}
    return tuple(run for run in runs if run.id in kept), tuple(run for run in runs if run.id not in kept)


CONFIDENCE = 0.95


@dataclass(frozen=True)
class Comparison:
    """One setting compared with the baseline. `n`: runs with a number; `pairs`: seeds that both have.

    Undefined values are None: the spread of one run, the interval of one pair or of identical differences.
    """

    n: int
    mean: float | None
    deviation: float | None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    how: str = ""
    pairs: int = 0

    @property
    def is_significant(self) -> bool:
        """Whether 0 lies outside the interval."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def summarize(values: Mapping[Any, float]) -> Comparison:
    """Summarize a setting by itself; values are by seed."""
    found = list(values.values())
    deviation = statistics.stdev(found) if len(found) > 1 else None
    return Comparison(len(found), statistics.fmean(found) if found else None, deviation)


def compare(values: Mapping[Any, float], baseline: Mapping[Any, float], comparisons: int = 1) -> Comparison:
    """Compare a setting with the baseline: paired by seed where at least two seeds are in both, else unpaired.

    Args:
        values: by seed.
        baseline: by seed.
        comparisons: how many intervals shall hold together; each is widened for it (Bonferroni).
    """
    from scipy import stats  # this import takes half a second

    one, confidence = summarize(values), 1 - (1 - CONFIDENCE) / comparisons
    seeds = [seed for seed in values if seed in baseline]
    if not values or not baseline:
        return one
    if len(seeds) > 1:
        differences = [values[seed] - baseline[seed] for seed in seeds]
        mean, how, bounds = statistics.fmean(differences), "paired", ()
        if len(set(differences)) > 1:
            bounds = stats.t.interval(confidence, len(seeds) - 1, mean, stats.sem(differences))
    else:
        a, b = list(values.values()), list(baseline.values())
        mean, how, bounds = statistics.fmean(a) - statistics.fmean(b), "too few seeds", ()
        if min(len(a), len(b)) > 1:
            how, parts = "Welch", [statistics.variance(sample) / len(sample) for sample in (a, b)]
            if any(parts):
                freedom = sum(parts) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(parts, (a, b), strict=True))
                bounds = stats.t.interval(confidence, freedom, mean, sum(parts) ** 0.5)
    low, high = (float(bound) for bound in bounds) if bounds else (None, None)
    return Comparison(one.n, one.mean, one.deviation, mean, low, high, how, len(seeds))
