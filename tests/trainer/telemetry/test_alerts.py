"""A run that goes nowhere says so, once, at a given update."""

import json

import pytest

import conf.schema.training.loop
from tests.groups import load_group
from trainer.telemetry.alerts import AlertChange, AlertMonitor

WELL = {"accuracy": 0.5, "zero_variance_groups": 0.2, "learning_rate": 1e-3, "entropy": 1.0}


def alerts(last: int = 10, **changes) -> AlertMonitor:
    wanted = {"zero_accuracy_updates": 3, "zero_variance_updates": 2}
    return AlertMonitor(conf.schema.training.loop.Alerts(**load_group("loop/grpo")["alerts"] | wanted | changes), last)


def said(watch: AlertMonitor, *updates: dict[str, float]) -> list[tuple[int, str]]:
    """(update, words) of every alert that is raised."""
    found = changes(watch, *updates)
    return [(step, change.message) for step, change in found if change.message]


def changes(watch: AlertMonitor, *updates: dict[str, float]) -> list[tuple[int, AlertChange]]:
    return [(step, change) for step, values in enumerate(updates, 1) for change in watch.check(step, WELL | values)]


UNWATCHED = {"zero_learning_rate": False, "entropy_below": None, "zero_accuracy_updates": None}
UNWATCHED |= {"zero_variance_updates": None}
NO_RATE, NO_ANSWER, NO_VARIANCE = {"learning_rate": 0.0}, {"accuracy": 0.0}, {"zero_variance_groups": 1.0}


@pytest.mark.parametrize(
    ("settings", "updates", "at", "words"),
    [
        ({}, [{}] * 10, None, ""),
        # a warm-up may begin at 0; and once is enough
        ({}, [NO_RATE, {}, NO_RATE, NO_RATE], 3, "the learning rate is 0 with 7 updates to go"),
        ({"last": 2}, [{}, NO_RATE], None, ""),
        (
            {"entropy_below": 0.1},
            [{"entropy": 0.2}, {"entropy": 0.09}, {"entropy": 0.08}],
            2,
            "at loop.temperature is 0.09 nats",
        ),
        ({}, [NO_ANSWER] * 2 + [{}] + [NO_ANSWER] * 4, 6, "no answer was right in 3 updates"),
        ({}, [NO_VARIANCE, {}] + [NO_VARIANCE] * 3, 4, ""),
        (UNWATCHED, [{}] + [NO_RATE | NO_ANSWER | NO_VARIANCE | {"entropy": 0.0}] * 5, None, ""),
    ],
)
def test_each_is_said_once_at_its_update(settings, updates, at, words) -> None:
    found = said(alerts(**settings), *updates)
    assert [step for step, _ in found] == ([] if at is None else [at])
    assert all(words in message for _, message in found)


def test_samples_of_old_policies() -> None:
    """Each bound by itself; at the bound nothing is said, and neither where a loss has no such metric."""
    bounds = {"staleness_above": 4.0, "clip_fraction_above": 0.5, "effective_sample_size_below": 0.25}
    at = {"staleness_mean": 4.0, "clip_fraction": 0.5, "rollout_is_eff_sample_size": 0.25}
    beyond = {"staleness_mean": 4.5, "clip_fraction": 0.51, "rollout_is_eff_sample_size": 0.24}
    assert not said(alerts(**bounds), {}, at)
    assert not said(alerts(), beyond)
    for name, words in zip(beyond, ("4.5 updates old", "51% of the ratios", "24% of the tokens"), strict=True):
        [(step, message)] = said(alerts(**bounds), at, at | {name: beyond[name]})
        assert step == 2
        assert words in message


def test_an_alert_is_over_when_its_cause_is_and_is_not_raised_again() -> None:
    low, high = {"entropy": 0.01}, {"entropy": 1.0}
    found = changes(alerts(entropy_below=0.1), high, low, low, high, low, high)
    found += changes(alerts(), *[NO_ANSWER] * 5, {"accuracy": 0.5})
    expected = [(2, "entropy", True), (4, "entropy", False), (3, "accuracy", True), (6, "accuracy", False)]
    assert [(step, change.name, bool(change.message)) for step, change in found] == expected


def test_a_resumed_run_says_the_same() -> None:
    updates = [{"accuracy": 0.0}] * 5
    for cut in range(6):
        first, second = alerts(), alerts()
        before = said(first, *updates[:cut])
        second.state = json.loads(json.dumps(first.state))
        after = [(cut + step, words[:20]) for step, words in said(second, *updates[cut:])]
        assert len(before) + len(after) == 1
        assert [step for step, _ in before + after] == [3]
