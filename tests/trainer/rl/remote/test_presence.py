"""How long the trainer waits for samplers, and what it says meanwhile."""

import pytest

from trainer.rl.remote.presence import LIMIT_SECONDS, REPORT_SECONDS, Presence, SamplersLostError


def test_a_silence_of_all_samplers_is_reported_and_ends() -> None:
    presence = Presence(["worker 2", "sampler pod 1"])
    presence.begin(100.0)
    presence.hear("sampler pod 1", 110.0)
    assert presence.report(110.0 + REPORT_SECONDS - 1) == ""
    line = presence.report(110.0 + REPORT_SECONDS)
    assert line.startswith("waiting for a sampler (loop.sampler), for at most 30 minutes: ")
    assert line.endswith("worker 2 has never connected, sampler pod 1 was last heard 60 s ago")
    assert presence.report(110.0 + REPORT_SECONDS + 1) == ""
    assert presence.report(110.0 + 2 * REPORT_SECONDS) != ""
    with pytest.raises(SamplersLostError, match=r"^loop\.sampler: .* 30 minutes: worker 2 has never connected"):
        presence.report(110.0 + LIMIT_SECONDS)


def test_one_sampler_that_works_is_enough() -> None:
    presence = Presence(["worker 1", "worker 2"])
    presence.begin(0.0)
    for now in range(0, int(3 * LIMIT_SECONDS), 30):
        presence.hear("worker 1", float(now))
        assert presence.report(float(now)) == ""


def test_the_time_before_the_wait_does_not_count() -> None:
    presence = Presence(["worker 1"])
    presence.hear("worker 1", 0.0)
    presence.begin(2 * LIMIT_SECONDS)
    assert presence.report(2 * LIMIT_SECONDS + 1) == ""
