"""Alerts for runs that make no progress, each raised once; `loop.alerts` sets the thresholds."""

from dataclasses import dataclass
from typing import Any

import conf.schema.training.loop


@dataclass(frozen=True)
class AlertChange:
    """An alert that is raised or, if `message` is empty, over. The controller shows it under its name."""

    name: str
    message: str = ""


class AlertMonitor:
    """Checks every update. Checkpoints store its state, so that a resumed run raises the same alerts."""

    def __init__(self, settings: conf.schema.training.loop.Alerts, last: int) -> None:
        """Create a monitor. last: number of the phase's last update."""
        self._settings, self._last_step = settings, last
        self.state: dict[str, Any] = {"told": [], "lasting": [], "without_answer": 0, "equal": 0, "had_a_rate": False}

    def check(self, step: int, values: dict[str, float]) -> list[AlertChange]:
        """Return what changes after update `step` of the phase with these metrics; usually nothing."""
        wanted, seen = self._settings, self.state
        seen["without_answer"] = seen["without_answer"] + 1 if values["accuracy"] == 0 else 0
        seen["equal"] = seen["equal"] + 1 if values["zero_variance_groups"] == 1 else 0
        seen["had_a_rate"] = seen["had_a_rate"] or values["learning_rate"] > 0
        found: dict[str, str] = {}
        if wanted.zero_learning_rate and seen["had_a_rate"] and values["learning_rate"] == 0 and step < self._last_step:
            found["learning_rate"] = (
                f"the learning rate is 0 with {self._last_step - step} updates to go: check optimizer.schedule"
            )
        if wanted.entropy_below is not None and values["entropy"] < wanted.entropy_below:
            found["entropy"] = (
                f"the policy's entropy at loop.temperature is {values['entropy']:.2g} nats, so it hardly explores; "
                "raise loop.temperature, loop.kl_coef or loop.entropy_coef, or lower optimizer.lr"
            )
        if wanted.zero_accuracy_updates is not None and seen["without_answer"] >= wanted.zero_accuracy_updates:
            found["accuracy"] = (
                f"no answer was right in {seen['without_answer']} updates: check the transcripts; the questions are "
                "too hard, responses are cut off, or loop.rewards does not recognize the form of the answers"
            )
        if wanted.zero_variance_updates is not None and seen["equal"] >= wanted.zero_variance_updates:
            found["groups"] = (
                f"in {seen['equal']} updates every group had equal rewards, so the policy learns nothing; use harder "
                "or easier questions, or raise loop.group_size or loop.temperature"
            )
        if wanted.staleness_above is not None and values.get("staleness_mean", 0) > wanted.staleness_above:
            found["staleness"] = (
                f"tokens are {values['staleness_mean']:.1f} updates old on average; lower loop.async_depth or "
                "loop.updates_per_rollout"
            )
        if wanted.clip_fraction_above is not None and values.get("clip_fraction", 0) > wanted.clip_fraction_above:
            found["clip_fraction"] = (
                f"{values['clip_fraction']:.0%} of the ratios are clipped, so their samples teach nothing; lower "
                "optimizer.lr, loop.async_depth or loop.updates_per_rollout"
            )
        size, least = values.get("rollout_is_eff_sample_size", 1.0), wanted.effective_sample_size_below
        if least is not None and size < least:
            found["effective_sample_size"] = (
                f"the effective sample size is {size:.0%} of the tokens: the policy that learns is far from the one "
                "that samples; lower loop.async_depth or optimizer.lr, or set loop.rollout_correction"
            )
        new = [name for name in found if name not in seen["told"]]
        over = [name for name in seen.get("lasting", ()) if name not in found]
        seen["told"] = [*seen["told"], *new]
        seen["lasting"] = [name for name in [*seen.get("lasting", ()), *new] if name not in over]
        return [*(AlertChange(name, found[name]) for name in new), *(AlertChange(name) for name in over)]
