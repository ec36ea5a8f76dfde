"""Curves share a section of TensorBoard with their like."""

import pytest

from trainer.telemetry.tags import curve_tag


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("eval_accuracy", "eval/accuracy"),
        ("test_pass_at_4", "test/pass_at_4"),
        ("eval_time", "time/eval_time"),
        ("reward_time", "time/reward_time"),
        ("rollout_tokens_per_second", "time/rollout_tokens_per_second"),
        ("reward_mean", "rollout/reward_mean"),
        ("response_length_max", "rollout/response_length_max"),
        ("loss", "train/loss"),
        ("kl", "train/kl"),
        ("reward/brief", "reward/brief"),
    ],
)
def test_every_curve_has_a_section(name: str, tag: str) -> None:
    assert curve_tag(name) == tag
