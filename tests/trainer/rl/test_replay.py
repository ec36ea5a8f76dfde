"""Whole runs with experts whose routes are replayed."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.conftest import wide
from tests.trainer.conftest import make_grpo_run
from tests.trainer.lives import SharedPrograms, changed, run_until, saved, train
from tests.trainer.loops.test_grpo import MOVING, with_echo
from tests.trainer.processes import results


@pytest.mark.deep
@pytest.mark.parametrize("echo", [False, *wide(True)])
def test_a_run_that_replays_routes_and_is_killed_equals_an_uninterrupted_one(tmp_path, monkeypatch, echo):
    """Bit for bit, with a rollout ahead, experts and batch split; echo: in turns with an environment."""
    base = with_echo(make_grpo_run(tmp_path)) if echo else make_grpo_run(tmp_path)
    model = {"num_layers": 2, "mlp_dim": 16, "scan_layers": True, "remat": "full"}
    model |= {"experts": {"count": 4, "per_token": 2, "norm_topk_prob": True}}
    loop = MOVING | {"async_depth": 1, "replay_routes": True, "eval_prompts": 8, "test_samples_per_prompt": None}
    parts = {"model": model, "loop": loop, "optimizer": {"lr": 0.01}, "mesh": {"data": 2, "fsdp": 2, "expert": 2}}
    whole = changed(base, **parts, checkpoint={"save_interval": 1})
    cut = whole | {"dir": str(tmp_path / "cut")}
    SharedPrograms().install(monkeypatch)
    lines = train(whole, tmp_path / "whole")
    for life, killed_at in enumerate((4, 5)):  # after each update of a rollout
        run_until(cut, tmp_path / f"life-{life}", killed_at, monkeypatch)
    again = train(cut, tmp_path / "last-life")
    for (state, position), (state_whole, position_whole) in zip(
        saved(cut, 5, 6, 7), saved(whole, 5, 6, 7), strict=True
    ):
        assert position == position_whole
        jax.tree.map(np.testing.assert_array_equal, state, state_whole)
    assert results(again) == results(lines)
    told = [line for line in lines if line["phase"] == "grpo"]
    assert [line["step"] for line in told] == [4, 5, 6, 7]
    shares = [line["routes_changed"] for line in told]
    assert shares[0] == 0 < shares[-1] < 0.5
    assert told[0]["sampler_trainer_logp_diff_max"] < 1e-4
    assert json.loads((Path(tmp_path / "whole") / "summary.json").read_text())["steps"] == 4
