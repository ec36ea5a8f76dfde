"""Translate overrides that select Hydra launchers and sweepers into the equivalent keys.

There is one engine for `-m`: a pool of pods, emulated ones included. `joblib` with n_jobs means that many pods, `basic`
means one. https://hydra.cc/docs/plugins/joblib_launcher/
"""

from collections.abc import Sequence

from controller.core.errors import ConfigError

LAUNCHER, SWEEPER = "hydra/launcher", "hydra/sweeper"
JOBS = "hydra.launcher.n_jobs"
LAUNCHERS = ("pods", "joblib", "basic")
PODS = "sweep.pods"


def apply_launcher(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides without those for Hydra's launcher, with `sweep.pods` added where they imply it.

    Raises:
        ConfigError: an unknown launcher or sweeper, or two numbers of pods.
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
