"""Faults of hardware amid the updates: found soon, and a run that resumes from its last checkpoint forgets them."""

import jax
import numpy as np
import pytest

from tests.trainer.bits import flip_bit
from tests.trainer.conftest import make_lm_run
from tests.trainer.lives import SharedPrograms, changed, final_state, train
from trainer.distributed.checksums import CorruptionError
from trainer.loops.updates import UpdateLoop
from trainer.step.nan_check import DivergedError

WORDS = r"hardware fault: worker 0: its copy of params\.\S+( and 1 more)? differs .* after update 3"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A whole run and its programs. Checks are due after updates 3 and 6, checkpoints after 4 and 6."""
    folder, programs = tmp_path_factory.mktemp("whole"), SharedPrograms()
    raw = changed(make_lm_run(folder), checkpoint={"save_interval": 4})
    with pytest.MonkeyPatch.context() as patch:
        programs.install(patch)
        train(raw, folder / "local")
    return raw, programs


def test_a_planted_fault_is_found_and_leaves_nothing_behind(whole, tmp_path, monkeypatch):
    """It is there from update 3 on. tests/scenarios/chaos/test_hardware.py plants more kinds of faults."""
    raw, programs = whole
    programs.install(monkeypatch)
    hit = changed(raw, dir=str(tmp_path / "hit"))
    after_checkpoint = UpdateLoop._after_checkpoint

    def strike(loop, step, state):
        after_checkpoint(loop, step, state)
        if step == 2:
            largest = max(jax.tree.leaves(state.params), key=lambda leaf: leaf.size)
            flip_bit(largest, bit=9, element=7, shard=5)

    with monkeypatch.context() as patch:
        patch.setattr(UpdateLoop, "_after_checkpoint", strike)
        with pytest.raises(CorruptionError, match=WORDS):
            train(hit, tmp_path / "first-life")
    train(hit, tmp_path / "second-life")
    jax.tree.map(np.testing.assert_array_equal, final_state(hit), final_state(raw))


def test_a_nan_that_does_not_come_again_is_no_fault_of_the_program_unless_it_returns(whole, tmp_path, monkeypatch):
    """The update itself says so once, as a device does whose arithmetic fails for a moment; then in two attempts."""
    raw, programs = whole
    programs.install(monkeypatch)
    hit, flush = changed(raw, dir=str(tmp_path / "hit")), UpdateLoop._flush

    def spoil(loop, state):
        if loop.pending and loop.pending[0] == 2:
            step, metrics, batch = loop.pending
            loop.pending = (step, metrics | {"loss": np.float32(np.nan)}, batch)
        flush(loop, state)

    monkeypatch.setattr(UpdateLoop, "_flush", spoil)
    with pytest.raises(CorruptionError, match="hardware fault: some worker: update 2 was not finite, but is when it"):
        train(hit, tmp_path / "first")
    with pytest.raises(DivergedError, match="update 2"):
        train(hit, tmp_path / "second")
