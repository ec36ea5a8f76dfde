"""Samplers on workers of their own: processes that are killed while a run trains, and the journal that it leaves."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import jax
import numpy as np
import pytest

from tests.trainer.conftest import make_grpo_run
from tests.trainer.lives import changed, final_state
from tests.trainer.processes import children, start_trainer, wait_processes
from trainer.rl.remote.journal import Journal, decode

pytestmark = pytest.mark.deep

TRAINERS, SAMPLERS, STEPS, DEPTH = 2, 2, 16, 2
ROLLOUTS, ROWS = STEPS // 2, 8 * 2 * 2


def make_run(folder: Path) -> dict[str, Any]:
    base, workers = make_grpo_run(folder), TRAINERS + SAMPLERS
    sampler = base["loop"]["sampler"] | {"workers": SAMPLERS, "chunk": 2}
    loop = {"steps": STEPS, "async_depth": DEPTH, "sampler": sampler, "warm_start_steps": 0, "length_buckets": []}
    loop |= {"rewards": {"tests.trainer.variety:distinct_characters": 1.0}, "test_samples_per_prompt": None}
    loop |= {"eval_prompts": 8, "eval_interval": STEPS}
    return changed(base, pod={"workers": workers, "devices": 2 * workers}, loop=loop, checkpoint={"save_interval": 3})


TOKEN = {"SLIPWAY_SAMPLER_TOKEN": "of this attempt", "SLIPWAY_COORDINATOR": "127.0.0.1:8476"}


def start(run: dict[str, Any], folder: Path, cache: str) -> list[Popen[str]]:
    return start_trainer(run, folder, cache, *[TOKEN] * run["pod"]["workers"])


def journaled(run: dict[str, Any]) -> int:
    return len(list((Path(run["dir"]) / "journal").glob("*.npz")))


def kill_samplers_until(run: dict[str, Any], started: list[Popen[str]], is_over: Callable[[], bool]) -> int:
    """Kill a sampler after every rollout that is complete, each in its turn; return how many."""
    kills, seen = 0, journaled(run)
    late = time.monotonic() + 500
    while not is_over():
        assert time.monotonic() < late
        if journaled(run) > seen:
            seen = journaled(run)
            for pid in children(started[TRAINERS + kills % SAMPLERS].pid)[:1]:
                os.kill(pid, signal.SIGKILL)
                kills += 1
        time.sleep(0.02)
    return kills


def test_samplers_and_the_trainer_are_killed_no_sample_is_lost_or_learnt_twice_and_a_replay_is_equal(
    tmp_path, compile_cache
) -> None:
    run = make_run(tmp_path)
    first = start(run, tmp_path / "first", compile_cache)
    kills = kill_samplers_until(run, first, lambda: journaled(run) >= 4 or first[0].poll() is not None)
    assert [process.poll() for process in first] == [None] * len(first), "an attempt ended by itself"
    for process in first:
        process.kill()
    wait_processes(first)
    second = start(run, tmp_path / "second", compile_cache)
    kills += kill_samplers_until(run, second, lambda: second[0].poll() is not None)
    ended = wait_processes(second)
    assert [one.exit_code for one in ended] == [0] * len(second), [one.stderr[-2000:] for one in ended]
    assert kills >= 4

    journal, lengths = Journal(run["dir"]), []
    for number in range(ROLLOUTS):
        content = journal.read(number)
        assert content is not None
        drawn = decode(content)
        assert len(drawn) == ROWS
        for sample in drawn:
            lengths.append(len(sample.tokens))
            assert 1 <= len(sample.tokens) == len(sample.logprobs) == len(sample.versions) <= 12
            assert (np.diff(sample.versions) >= 0).all()
            assert max(0, 2 * (number - DEPTH)) <= sample.versions[0] <= sample.versions[-1] <= 2 * number
            assert (sample.logprobs < 0).all()
    assert journal.read(ROLLOUTS) is None
    assert journaled(run) == ROLLOUTS
    assert len(lengths) == STEPS * 8 * 2, "samples that the updates learnt from"
    sampler = run["loop"]["sampler"] | {"workers": 0}
    replay = changed(run, dir=str(tmp_path / "replayed"), loop={"sampler": sampler, "replay": run["dir"]})
    replay["pod"] |= {"workers": TRAINERS, "devices": 2 * TRAINERS}
    ended = wait_processes(start(replay, tmp_path / "replay", compile_cache))
    assert [one.exit_code for one in ended] == [0] * TRAINERS, [one.stderr[-2000:] for one in ended]
    state, replayed = final_state(run), final_state(replay)
    assert int(state.step) == STEPS
    jax.tree.map(np.testing.assert_array_equal, replayed, state)
