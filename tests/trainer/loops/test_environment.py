"""The GRPO loop with an environment: every phase plays episodes, and a resume is exact."""

import json
import string
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from conf.schema.training.run_yaml import RunFile, RunFileError
from tests.groups import load_group
from tests.trainer.lives import SharedPrograms, run_until, train
from tests.trainer.loops.test_grpo import saved
from tests.trainer.processes import results, start_trainer, wait_processes
from trainer.distributed import mesh as meshes
from trainer.rl.programs import programs


class Echo:
    """Says what it hears backwards, three times; many different characters are rewarded."""

    def __init__(self, *, fails: bool = False) -> None:
        self.heard, self.fails = "", fails
        self.turns = 0

    def reset(self, row: Any) -> str:
        return str(row["seed"] % 10)

    def step(self, response: str) -> tuple[str, bool]:
        self.heard, self.turns = self.heard + response, self.turns + 1
        if self.fails:
            raise OSError("no echo")
        return response[::-1], self.turns == 3

    def reward(self) -> float:
        return len({*self.heard}) / 12


def with_echo(raw: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The run in that environment; a turn ends at nearly any character."""
    group = load_group("loop/grpo")
    own = {"name": f"{__name__}:Echo", "options": options, "max_turn_tokens": 3, "timeout_seconds": 60.0}
    stops = [*string.ascii_letters, *string.digits, *string.punctuation, " "]
    loop = {"environment": group["environment"] | own, "sampler": group["sampler"] | {"stop": stops}}
    return raw | {"loop": raw["loop"] | loop}


def test_programs_of_later_turns_are_listed(grpo_run: Any) -> None:
    """A prompt of a later turn may be as long as prompt and response together."""
    raw = with_echo(grpo_run)
    experiment = RunFile.model_validate(raw)
    found = {program.name: program for program in programs(experiment, meshes.build_mesh(experiment.mesh))}
    rows = raw["loop"]["prompts_per_step"] * raw["loop"]["group_size"] * raw["loop"]["updates_per_rollout"]
    first, later = (found[name].arguments[1].shape for name in ("prefill", "prefill_turn"))
    assert (first, later) == ((rows // 2, 40), (rows, 40))
    assert "admit_turn" in found
    assert "decode_turn" not in found


@pytest.mark.deep
def test_a_killed_run_equals_an_uninterrupted_one(grpo_run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Bit for bit, with the next rollout drawn ahead; every phase plays episodes."""
    raw = with_echo(grpo_run) | {"checkpoint": grpo_run["checkpoint"] | {"save_interval": 1}}
    raw["loop"] |= {"async_depth": 1}
    shared = SharedPrograms()
    shared.install(monkeypatch)
    lines = train(raw, tmp_path / "whole")
    cut = raw | {"dir": str(tmp_path / "cut")}
    for life, step in enumerate((4, 5)):
        run_until(cut, tmp_path / f"life-{life}", step, monkeypatch)
    again = train(cut, tmp_path / "last")
    for (state, position), (other, other_position) in zip(saved(raw, 5, 7), saved(cut, 5, 7), strict=True):
        assert position == other_position
        jax.tree.map(np.testing.assert_array_equal, state, other)
    assert results(again) == results(lines)
    trained = [line for line in lines if line["phase"] == "grpo"]
    assert all(1 < line["turns"] <= 3 for line in trained)
    assert all(line["environment_tokens"] > 0 == line["environment_failed"] for line in trained)
    assert any(line["grad_norm"] > 0 for line in trained)
    evaluated = [line for line in lines if line["phase"] == "eval"]
    assert all(1 < line["eval_turns"] <= 3 for line in evaluated)
    rows = [json.loads(line) for line in (Path(raw["dir"]) / "transcripts.jsonl").read_text().splitlines()]
    assert any([turn["role"] for turn in row["turns"]][:3] == ["policy", "environment", "policy"] for row in rows)


@pytest.mark.deep
def test_two_workers_play_the_episodes_of_one(grpo_run: Any, tmp_path: Path, compile_cache: str) -> None:
    """Each worker asks the environment for its share of the episodes."""
    alone = with_echo(grpo_run) | {"dir": str(tmp_path / "alone")}
    alone["loop"] |= {"group_size": 4, "warm_start_steps": 0, "steps": 2}
    pair = alone | {"pod": grpo_run["pod"] | {"workers": 2, "devices": 4}, "dir": str(tmp_path / "bucket")}
    for ended in wait_processes(start_trainer(pair, tmp_path / "run", compile_cache, {}, {})):
        assert ended.exit_code == 0, ended.stderr
    train(alone, tmp_path / "local")
    one, two = (
        results([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()])
        for name in ("alone", "bucket")
    )
    assert len(one) == len(two)
    assert any(line["turns"] > 1 for line in one if line["phase"] == "grpo")
    for a, b in zip(one, two, strict=True):
        phase = a.pop("phase")
        assert b.pop("phase") == phase
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)


@pytest.mark.deep
def test_a_run_whose_environment_always_fails_ends_with_one_error(grpo_run: Any, tmp_path: Path) -> None:
    raw = with_echo(grpo_run, fails=True)
    with pytest.raises(RunFileError, match=r"all 40 episodes failed; the first \(error\): OSError: no echo"):
        train(raw, tmp_path / "run")
