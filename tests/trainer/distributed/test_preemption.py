"""A notice that a VM goes away: what was computed is saved, and the run goes on to the same numbers."""

import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.trainer.lives import SharedPrograms, train
from tests.trainer.loops.test_lm import changed, final_state
from trainer.distributed.preemption import PreemptedError, PreemptionNotice
from trainer.loops import lm


class Scripted(PreemptionNotice):
    """Told so at the n-th question, as by a signal that came before it."""

    at: int

    def should_stop(self, step: int) -> bool:
        if self._num_polls + 1 == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().should_stop(step)


@pytest.mark.parametrize(
    ("at", "saved"),
    [pytest.param(1, [], marks=pytest.mark.deep), (4, [2, 3]), pytest.param(6, [2, 4], marks=pytest.mark.deep)],
)
def test_a_noticed_run_saves_and_goes_on_to_the_same_numbers(lm_run, tmp_path, monkeypatch, capsys, at, saved):
    """Before the first update; after the third, where no checkpoint is due; amid the evaluation after the fourth."""
    whole, cut = changed(lm_run, dir=str(tmp_path / "whole")), changed(lm_run, dir=str(tmp_path / "cut"))
    SharedPrograms().install(monkeypatch)
    expected = train(whole, tmp_path / "whole-local")
    with monkeypatch.context() as patch:
        patch.setattr(Scripted, "at", at, raising=False)
        patch.setattr(lm, "PreemptionNotice", Scripted)
        with pytest.raises(PreemptedError):
            train(cut, tmp_path / "first-life")
    step = saved[-1] if saved else 0
    assert f"saving a checkpoint after update {step}, then exiting" in capsys.readouterr().out
    assert sorted(int(p.name) for p in Path(tmp_path, "cut/checkpoints").iterdir()) == saved
    assert len((tmp_path / "first-life/metrics.jsonl").read_text().splitlines()) == step
    resumed = train(cut, tmp_path / "second-life")
    same = [(line["step"], line["phase"], line.get("loss"), line.get("eval_loss")) for line in resumed]
    assert same == [(line["step"], line["phase"], line.get("loss"), line.get("eval_loss")) for line in expected]
    for a, b in zip(jax.tree.leaves(final_state(cut)), jax.tree.leaves(final_state(whole)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_first_attempt_waits_at_the_step_of_a_drill_until_it_is_told_to_stop(monkeypatch):
    monkeypatch.setenv("TRAINER_HOLD_AT_STEP", "3")
    monkeypatch.setenv("SLIPWAY_ATTEMPT", "1")
    asked, real, before = [], PreemptionNotice._sync_point_reached, signal.getsignal(signal.SIGTERM)

    def noticed_at_the_fourth_time(notice: PreemptionNotice) -> bool:
        asked.append(notice._num_polls)
        if len(asked) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(notice)

    monkeypatch.setattr(PreemptionNotice, "_sync_point_reached", noticed_at_the_fourth_time)
    monkeypatch.setattr("trainer.distributed.preemption.HOLD_SECONDS", 0.0)
    with PreemptionNotice() as notice:
        assert not notice.should_stop(2)
        assert notice.should_stop(3)
        assert notice.should_stop(4)
    assert signal.getsignal(signal.SIGTERM) is before, "it listens only while it is entered"
    assert asked[:4] == [1, 2, 3, 4]
    monkeypatch.setenv("SLIPWAY_ATTEMPT", "2")
    with PreemptionNotice() as notice:
        assert not notice.should_stop(3)
