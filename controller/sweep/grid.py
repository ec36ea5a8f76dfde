"""Expand a sweep into runs: Hydra's grammar on the command line and in `sweep.params`, times the named cases.

Hydra's parser splits the overrides, which are multiplied in the order of its basic sweeper: the last varies fastest.
https://hydra.cc/docs/tutorials/basic/running_your_app/multi-run/

There is one engine for `-m`: a pool of pods, emulated ones included. Overrides that select Hydra's launchers become the
equivalent keys: `joblib` with n_jobs means that many pods, `basic` means one.
https://hydra.cc/docs/plugins/joblib_launcher/
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema.run_sections import Sweep
from controller.config.compose import config_groups, normalize_override
from controller.config.own_files import where_set
from controller.config.refusals import range_values, require_lone_functions, unparsable
from controller.config.texts import quote_numbers, unquoted
from controller.core.errors import ConfigError


@dataclass(frozen=True)
class Variant:
    """One run of a sweep: its overrides, the shared ones first, and its case, empty without cases."""

    overrides: tuple[str, ...]
    own_overrides: tuple[str, ...]
    case: str = ""

    @property
    def title(self) -> str:
        return self.prefix.removesuffix(": ") or "(no overrides)"

    @property
    def prefix(self) -> str:
        """Return how a problem of this run begins; empty if it is the only one."""
        words = " ".join(filter(None, [self.case, *self.own_overrides]))
        return words and f"{words}: "


@dataclass(frozen=True)
class SearchSpace:
    """Search space: by override prefix `key=`, the choices or a Hydra interval."""

    choices: dict[str, tuple[str, ...]]
    intervals: dict[str, tuple[float, float, bool, bool]]
    """Start, end, whether integers are drawn, whether drawn on a log scale."""


def split_overrides(overrides: Sequence[str], folder: Path) -> tuple[tuple[str, ...], SearchSpace]:
    """Return the overrides that all runs share, and the search space of the others.

    Raises ConfigError if Hydra refuses an override, or a range or glob has no values.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    same: list[str] = []
    choices: dict[str, tuple[str, ...]] = {}
    intervals: dict[str, tuple[float, float, bool, bool]] = {}
    for word in overrides:
        key, _, value = word.partition("=")
        try:
            override = parser.parse_override(quote_numbers(normalize_override(word)))
        except Exception as error:  # also a ValueError, of a number with thousands of digits
            raise ConfigError(unparsable(key, value, error)) from None
        require_lone_functions(key, override.value())
        prefix = f"{key}="
        if not override.is_sweep_override():
            same.append(word)
        elif override.is_interval_sweep():
            intervals[prefix] = _parse_interval(key, override.value())
        else:
            choices[prefix] = _parse_choices(override, word, folder)
    return tuple(same), SearchSpace(choices, intervals)


def expand_grid(overrides: Sequence[str], sweep: Sweep, folder: Path) -> list[Variant]:
    """Return every run of the sweep; cases vary slowest.

    Raises ConfigError as `split_overrides` does, for an interval, which has no grid points, and for a value that would
    not count.

    Args:
        overrides: overrides as typed.
        sweep: the sweep section of the config.
        folder: current folder of the user, for the user's own config groups that a glob may match.
    """
    same, space = split_overrides(_with_params(overrides, sweep), folder)
    if space.intervals:
        key = next(iter(space.intervals)).rstrip("=")
        raise ConfigError(f"{key}: a grid needs values, not an interval; list values or set sweep.search")
    axes = [[f"{prefix}{value}" for value in values] for prefix, values in space.choices.items()]
    cases = sweep.cases or {"": ()}
    _require_one_place(overrides, sweep, set(space.choices))
    return [
        Variant((*same, *case, *own), own, name) for name, case in cases.items() for own in itertools.product(*axes)
    ]


def _require_one_place(overrides: Sequence[str], sweep: Sweep, swept: set[str]) -> None:
    """Raise ConfigError for what no run would have: a case's value of a swept key, or a run's own key of the sweep."""
    in_cases = [(f"sweep.cases.{name}", word) for name, words in sweep.cases.items() for word in words]
    in_params = [(f"sweep.params.{key}", f"{key}=") for key in sweep.params]
    swept_words = [(prefix[:-1].lstrip("+"), prefix) for prefix in swept]
    for place, word in (*in_cases, *in_params, *swept_words):
        key = word.lstrip("+~").partition("=")[0]
        if (own := key.removeprefix("sweep.params.")) != key:
            raise ConfigError(f"{place}: `params` is of files; on the command line the key itself varies: {own}=…,…")
        if key.startswith("sweep."):
            raise ConfigError(
                f"{place}: {key} is of the whole sweep and has one value; write it beside the others: {key}=…"
            )
    typed = {word.lstrip("+").partition("=")[0] for word in overrides}
    for place, word in in_cases:
        key = word.lstrip("+").partition("=")[0]
        if {f"{key}=", f"+{key}="} & swept:
            other = "the command line" if key in typed else f"sweep.params.{key}"
            raise ConfigError(f"{place}: {word} would count for nothing, since {other} gives all values of {key}")


def sweep_notes(overrides: Sequence[str], sweep: Sweep) -> list[str]:
    """Return a note for each key with other values than it looks like.

    They are a range of floats whose last value is its end, which rounding has left a little short; a range of one
    value; and values that stand there twice.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep, RangeSweep

    notes = list[str]()
    for word in _with_params(overrides, sweep):
        key = word.partition("=")[0]
        override = OverridesParser.create().parse_override(quote_numbers(normalize_override(word)))
        value: Any = override.value()
        texts = [*override.sweep_string_iterator()] if isinstance(value, ChoiceSweep | RangeSweep) else []
        if repeated := [text for text, count in Counter(texts).items() if count > 1]:
            are = "stand there twice and are one run each" if repeated[1:] else "stands there twice and is one run"
            notes.append(f"{key}: {', '.join(repeated)} {are}")
        if not isinstance(value, RangeSweep) or value.stop is None:
            continue
        *_, last = value.range()
        step = float(value.step)
        if len(texts) == 1:
            notes.append(f"{word.replace('=', ': ', 1)} is one value, {texts[0]}, as its step is {value.step}")
        elif abs(float(value.stop) - last) < 1e-6 * abs(step):
            before = f"range({value.start},{float(value.stop) - step / 2:.6g},{value.step})"
            notes.append(
                f"{key}: the last value of the range, {last!r}, is its end {value.stop} but for rounding; without it: "
                f"{before}"
            )
    return notes


def placed(problem: object, sweep: Sweep, overrides: Sequence[str], folder: Path) -> str:
    """Return a problem with the place in the user's file of what the sweep sets there.

    That is the first key of `sweep.params` that it is about, or the case.
    """
    said = str(problem)
    for key in (key for key in sweep.params if re.search(rf"(^|: ){re.escape(key)}\b", said)):
        if place := where_set(f"sweep.params.{key}", folder / "slipway", overrides):
            if f"{key}: unknown group" in said:
                said = f"sweep.params.{re.sub(r'=[^ ?]*', '', said)}"
            return f"{said} ({place})"
    for name, words in sweep.cases.items():
        about = any(f": {word.lstrip('+~').partition('=')[0]}: " in said for word in words)
        place = where_set(f"sweep.cases.{name}", folder / "slipway", overrides) if about else ""
        if place and re.match(rf"{re.escape(name)}[: ]", said):
            return f"{said} ({place})"
    return said


def _with_params(overrides: Sequence[str], sweep: Sweep) -> list[str]:
    """Return the overrides, and those of `sweep.params` whose keys they do not give."""
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    return [*overrides, *(f"{key}={value}" for key, value in sweep.params.items() if key not in given)]


def _parse_choices(override: Any, word: str, folder: Path) -> tuple[str, ...]:
    from hydra.core.override_parser.types import Glob, RangeSweep

    value = override.value()
    prefix = f"{word.partition('=')[0]}="
    if isinstance(value, RangeSweep):
        range_values(prefix[:-1], value)
    if not isinstance(value, Glob):
        return tuple(unquoted(prefix, text) for text in override.sweep_string_iterator())
    key = word.lstrip("+").partition("=")[0]
    known = config_groups(folder / "slipway").get(key, [])
    if not (found := tuple(value.filter(known))):
        raise ConfigError(f"{word}: matches no {key}; choices: {', '.join(known) or 'none (no such group)'}")
    return found


def _parse_interval(key: str, sweep: Any) -> tuple[float, float, bool, bool]:
    """Return an interval. Raises ConfigError if nothing can be drawn from it."""
    low, high, log = sweep.start, sweep.end, "log" in sweep.tags
    if low > high:
        raise ConfigError(f"{key}: the lower end comes first: interval({high},{low})")
    if log and low <= 0:
        raise ConfigError(f"{key}: a log scale has no 0; the lower end of interval({low},{high}) must be above")
    return low, high, isinstance(low, int) and isinstance(high, int), log


LAUNCHER, SWEEPER = "hydra/launcher", "hydra/sweeper"
JOBS = "hydra.launcher.n_jobs"
LAUNCHERS = ("pods", "joblib", "basic")
PODS = "sweep.pods"


def apply_launcher(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides without those for Hydra's launcher, with `sweep.pods` added where they imply it.

    Raises ConfigError for an unknown launcher or sweeper, or two numbers of pods.
    """
    values = {word.lstrip("+").partition("=")[0]: word.partition("=")[2] for word in overrides}
    meant = {
        key for key in values if key in (LAUNCHER, SWEEPER) or key.startswith(("hydra.launcher.", "hydra.sweeper."))
    }
    if not meant:
        return tuple(overrides)
    launcher = values.get(LAUNCHER, "pods")
    if values.get(SWEEPER, "basic") != "basic" or any(key.startswith("hydra.sweeper.") for key in meant):
        raise ConfigError(
            f"{SWEEPER}: not supported; set sweep.search={{method: optuna, trials: 20, …}}; see docs/sweeps.md"
        )
    if launcher not in LAUNCHERS or meant - {LAUNCHER, SWEEPER, JOBS}:
        raise ConfigError(
            f"{LAUNCHER}: not supported, slipway runs sweeps itself; set {PODS}=4 for four runs at a time, {PODS}=1 "
            f"for one; {', '.join(LAUNCHERS)} with {JOBS} are equivalent"
        )
    jobs = "1" if launcher == "basic" else values.get(JOBS)
    if jobs is not None and not (jobs.isdigit() and int(jobs)):
        raise ConfigError(f"{JOBS}: {jobs} is not a number of pods; set a positive integer, or set {PODS}")
    if jobs is not None and values.get(PODS, jobs) != jobs:
        raise ConfigError(f"{PODS}: {values[PODS]}, but {LAUNCHER}={launcher} means {jobs}; remove one of them")
    kept = tuple(word for word in overrides if word.lstrip("+").partition("=")[0] not in meant)
    return kept if jobs is None or PODS in values else (*kept, f"{PODS}={jobs}")
