"""The GRPO loop: phases, what it leaves behind, and a resume that is exact in either phase."""

import io
import json
import string
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest

from conf.formats import RunFileError
from conf.schema.training.run_yaml import RunFile
from tests.conftest import wide
from tests.groups import load_group
from tests.trainer.conftest import make_grpo_run, make_mesh
from tests.trainer.lives import SharedPrograms, changed, lines_of, run_until, saved, train
from tests.trainer.processes import results, start_trainer, wait_processes
from trainer.data.prompting import Draw
from trainer.distributed import mesh as meshes
from trainer.distributed.preemption import PreemptedError, PreemptionNotice
from trainer.environments.episodes import NothingFitsError
from trainer.loops import grpo
from trainer.models import weights
from trainer.pretrained import store
from trainer.rl import telemetry
from trainer.rl.remote import server
from trainer.rl.rollouts import RolloutGenerator
from trainer.sampler import LogitsError
from trainer.step.nan_diagnosis import DivergedError
from trainer.telemetry import throughput

MOVING = {"rewards": {"tests.trainer.variety:distinct_characters": 1.0}}
"""Without a right answer there would be nothing to learn, and every resume would be exact."""


FIRST_MINUTES = (
    "bucket: written to and restored from ",
    "memory per device, GiB, without temporaries: reshard ",
    "compiled reshard in ",
    "compiled update in ",
    "baseline: 0.",
    "accuracy before GRPO: ",
    "--- prompt",
    "--- response",
    "--- its answer: ",
    "update 1: KL ",
    "truncated ",
    "time per update: ",
)


def slow_updates(monkeypatch, seconds: float) -> None:
    """Make the loop wait that long for each update."""
    check, read, waited = telemetry.check_finite, time.perf_counter, [0.0]

    def wait(*arguments) -> None:
        waited[0] += seconds
        check(*arguments)

    monkeypatch.setattr(telemetry, "check_finite", wait)
    monkeypatch.setattr(
        throughput, "time", SimpleNamespace(perf_counter=lambda: read() + waited[0], process_time=time.process_time)
    )


@dataclass(frozen=True)
class WholeRun:
    """A run that nothing interrupted, what it left, and what its programs were compiled to."""

    raw: dict[str, Any]
    local: Path
    lines: list[dict[str, Any]]
    printed: list[str]
    programs: SharedPrograms


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


AHEAD = ((2, 2, 2), 1, False)
"""Weights and batch are split, and the next rollout is drawn before the updates of this one."""


@pytest.fixture(scope="module", params=[AHEAD], ids=["ahead"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """params: mesh, `loop.async_depth`, and whether every phase plays episodes."""
    sizes, depth, echo = request.param
    folder, programs, printed = tmp_path_factory.mktemp("whole"), SharedPrograms(), io.StringIO()
    base = with_echo(make_grpo_run(folder)) if echo else make_grpo_run(folder)
    loop = MOVING | {"async_depth": depth, "eval_prompts": 16} | ({} if echo else {"length_buckets": [32]})
    raw = changed(base, loop=loop, checkpoint={"save_interval": 1}, logging={"log_interval": 2})
    raw |= {"mesh": dict(zip(meshes.MESH_AXES, (*sizes, 1), strict=True))}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        slow_updates(patch, 1e6)
        patch.setattr(server, "Listener", None)  # without samplers nothing listens
        programs.install(patch)
        lines = train(raw, folder / "local")
    return WholeRun(raw, folder / "local", lines, printed.getvalue().splitlines(), programs)


def test_both_phases_are_told_and_summed_up(whole: WholeRun) -> None:
    lines, told = whole.lines, whole.printed
    places = [next(i for i, line in enumerate(told) if line.startswith(words)) for words in FIRST_MINUTES]
    assert places == sorted(places)
    assert sum(line.startswith("--- its answer: ") for line in told) == 2
    assert any(line.endswith("; 0 to go") for line in told)
    update_1 = told[places[-3]].split()
    assert float(update_1[3].rstrip(",")) == pytest.approx(0, abs=1e-6)
    # Two programs score and update: their log-probabilities of some 10 nats may differ by an ulp, 1e-6.
    assert [float(ratio.rstrip(";")) for ratio in (update_1[5], update_1[7])] == pytest.approx([1, 1], abs=2e-6)
    assert [line["step"] for line in lines if line["phase"] == "grpo"] == [4, 6, 7]
    last = [line for line in lines if line["phase"] == "grpo"][-1]
    names = ("loss", "accuracy", "pass_at_k", "entropy", "learning_rate", "tokens_per_second", "step_time", "kl")
    ratios = ("clip_fraction", "ratio_min", "ratio_mean", "ratio_max", "sampler_trainer_logp_diff")
    rewards = ("reward_mean", "reward_std", "zero_variance_groups", "filtered_equal", "checks_failed", "truncated")
    for name in names + ratios + rewards:
        assert np.isfinite(last[name])
    split = ("rollout_time", "reward_time", "score_time", "update_time", "other_time")
    first = next(line for line in lines if line["phase"] == "grpo")
    assert sum(first[name] for name in split) == pytest.approx(first["step_time"])
    assert {"rollout_tokens_per_second", "train_tokens_per_second"} <= first.keys()
    for line in lines:
        if "update_time" in line:
            assert round(line["update_time"] / 1e6) == 1
            assert line["other_time"] < 1e5
    assert last["ratio_min"] <= last["ratio_mean"] <= last["ratio_max"]
    assert last["response_length"] <= last["response_length_max"] <= whole.raw["loop"]["max_new_tokens"]
    assert last["sampler_trainer_logp_diff_max"] < 1e-4
    assert last["steps_total"] == 7
    assert next(line for line in lines if "step_time" in line)["compile_time"] > 0
    summary = json.loads((whole.local / "summary.json").read_text())
    assert summary.keys() >= {"accuracy_before", "accuracy_after", "eval_prompts", "steps"}
    assert (summary["eval_prompts"], summary["warm_start_steps"], summary["steps"]) == (16, 3, 4)
    left_out = summary["solutions_left_out"]
    assert {line["solutions_left_out"] for line in lines if "loss" in line} == {left_out}
    assert f"{left_out} worked responses are not trained on: longer than loop.max_new_tokens" in told
    tests = [line for line in lines if line["phase"] == "test"]
    assert [line["step"] for line in tests] == [3, 7]
    for line, when in zip(tests, ("before", "after"), strict=True):
        for name in ("test_accuracy", "test_accuracy_low", "test_pass_at_1", "test_pass_at_2", "test_majority_at_2"):
            assert 0 <= line[name] == summary[f"{name}_{when}"] <= 1
    assert any(line.startswith("test before GRPO: 0.") for line in told)
    rows = lines_of(whole.raw["dir"], "transcripts.jsonl")
    assert [(row["step"], row["phase"]) for row in rows] == [
        *((step, phase) for step, phase in ((3, "test"), (6, "eval"), (7, "eval"), (7, "test")) for _ in range(3))
    ]
    assert rows[0].keys() == {"step", "phase", "prompt", "answer", "response", "extracted", "reward"}
    remote = Path(whole.raw["dir"])
    assert (remote / "summary.json").exists()
    assert (remote / "reference").is_dir()
    assert list((remote / "tb").glob("events.out.tfevents.*"))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("whole", "kills"),
    [
        (AHEAD, (3, 4, 5)),
        pytest.param(((8, 1, 1), 3, False), (4,), marks=pytest.mark.wide),
        pytest.param(((8, 1, 1), 1, True), (4, 5), marks=pytest.mark.wide),
    ],
    indirect=["whole"],
)
def test_a_run_that_is_killed_after_any_update_equals_an_uninterrupted_one(whole, tmp_path, monkeypatch, kills):
    """Bit for bit in weights, optimizer and position; the same numbers, each once. The fast one is the next test."""
    whole.programs.install(monkeypatch)
    cut = whole.raw | {"dir": str(tmp_path / "cut")}
    for life, killed_at in enumerate(kills):  # at the end of the warm start; after each update of a rollout
        run_until(cut, tmp_path / f"life-{life}", killed_at, monkeypatch)
    lines = train(cut, tmp_path / "last-life")
    since = range(kills[0], 8)
    saved_whole = saved(whole.raw, *since)
    for (state, position), (state_whole, position_whole) in zip(saved(cut, *since), saved_whole, strict=True):
        assert position == position_whole
        jax.tree.map(np.testing.assert_array_equal, state, state_whole)
    moved = np.abs(saved_whole[0][0].params["embedding"] - saved_whole[-1][0].params["embedding"]).max()
    assert moved > 1e-4
    assert results(lines) == results(whole.lines)
    summaries = [json.loads((Path(run["dir"]) / "summary.json").read_text()) for run in (whole.raw, cut)]
    assert summaries[0] == summaries[1]
    if whole.raw["loop"]["environment"]["name"]:
        trained, evaluated = ([line for line in lines if line["phase"] == phase] for phase in ("grpo", "eval"))
        assert all(line["environment_tokens"] > 0 == line["environment_failed"] for line in trained)
        assert all(1 < line["turns"] <= 3 for line in trained)
        assert all(1 < line["eval_turns"] <= 3 for line in evaluated)
        roles = [[turn["role"] for turn in row["turns"]] for row in lines_of(cut["dir"], "transcripts.jsonl")]
        assert any(turns[:3] == ["policy", "environment", "policy"] for turns in roles)


def test_a_notice_amid_a_draw_costs_no_update(whole, tmp_path, monkeypatch):
    """Saved is what was there before the draw, with the rollout that is ready; the next life draws anew."""
    whole.programs.install(monkeypatch)
    cut = whole.raw | {"dir": str(tmp_path / "cut"), "checkpoint": whole.raw["checkpoint"] | {"save_interval": 100}}
    draws, generate = [], RolloutGenerator.generate

    def counted(self, *arguments):
        draws.append(None)
        return generate(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RolloutGenerator, "generate", counted)
        patch.setattr(PreemptionNotice, "should_stop", lambda self, step: len(draws) == 2)
        with pytest.raises(PreemptedError):
            train(cut, tmp_path / "life")
    [(_, position)] = saved(cut, 3)
    assert len(position["rollouts"]) == 1
    [(_, after_one_update)] = saved(whole.raw, 4)
    assert len(after_one_update["rollouts"]) == 2  # the second was drawn before the updates of the first
    lines = train(cut, tmp_path / "last-life")
    assert results(lines) == results(whole.lines)
    [(state, _)], [(state_whole, _)] = saved(cut, 7), saved(whole.raw, 7)
    jax.tree.map(np.testing.assert_array_equal, state, state_whole)


def questions_file(folder: Path) -> dict[str, Any]:
    """Sums with a right answer and a rejected one, as `data=gsm8k` reads them."""
    path, sums = folder / "rows.jsonl", [(a, b) for a in range(9) for b in range(9)]
    rows = ({"question": f"{a}+{b}=", "answer": f"#### {a + b}", "rejected": f"What is {a}?"} for a, b in sums)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {"path": str(path), "eval_path": str(path), "validation_path": None, "tokenizer": "bytes"}
    return load_group("data/gsm8k") | paths


OTHER_LOSSES = {
    "sft": {"kl_coef": 0.0},
    "dpo": {"kl_coef": 0.5, "temperature": 0.5},
    "cispo": {"clip_ratio_low": None, "clip_ratio_high": 4.0, "kl_coef": 0.0},
    "distillation": {"kl_coef": 0.0},
}


@pytest.mark.deep
@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_a_run_with_each_of_the_other_losses(grpo_run, tmp_path, name) -> None:
    own = {"warm_start_steps": 0, "eval_prompts": 16, "steps": 24, "updates_per_rollout": 1, "eval_interval": 24}
    own |= {"loss_type": name, "test_samples_per_prompt": None} | OTHER_LOSSES[name] | MOVING
    own["rollout_correction"] = grpo_run["loop"]["rollout_correction"] | {"rollout_is": "token"}
    if name == "distillation":
        folder = tmp_path / "teacher"
        model = RunFile.model_validate(grpo_run).decoder.model_copy(update={"num_layers": 2})
        with jax.set_mesh(make_mesh(1, 1, 1)):
            store.write_params(folder, jax.device_get(weights.init_params(model, jax.random.key(9))), model)
        own["teacher"] = grpo_run["model"] | {"num_layers": 2, "weights": str(folder)}
    data = questions_file(tmp_path) | {"chat_template": "none", "bos": None}
    raw = changed(grpo_run, data=data, optimizer={"lr": 0.01}, loop=own)
    told = [line for line in train(raw, tmp_path / "run") if line["phase"] == "grpo"]
    assert [line["step"] for line in told] == list(range(1, 25))
    assert all(np.isfinite(line["loss"]) for line in told)
    first, last = told[0], told[-1]
    if name in ("sft", "dpo"):
        assert last["loss"] < 0.8 * first["loss"]
        assert "rollout_is_mean" not in first
    else:
        assert 0.99 < first["rollout_is_eff_sample_size"] <= 1.00001
    if name == "dpo":
        np.testing.assert_allclose(first["loss"], np.log(2), atol=1e-5)  # policy and reference are the same
        assert last["reward_accuracy"] > 0.9
    if name == "distillation":
        assert np.mean([line["teacher_kl"] for line in told[-4:]]) < first["teacher_kl"]


@pytest.mark.deep
@pytest.mark.parametrize("echo", [True, *wide(False)])
def test_two_workers_have_the_numbers_of_one(grpo_run: Any, tmp_path: Path, compile_cache: str, echo: bool) -> None:
    """Each worker checks its share of the responses, or plays its share of the episodes; both train on all."""
    loop = {"prompts_per_step": 8, "group_size": 4, "updates_per_rollout": 2, "warm_start_steps": 0, "steps": 2}
    alone = changed(with_echo(grpo_run) if echo else grpo_run, loop=loop, dir=str(tmp_path / "alone"))
    pair = changed(alone, pod={"workers": 2, "devices": 4}, dir=str(tmp_path / "bucket"))
    for ended in wait_processes(start_trainer(pair, tmp_path / "run", compile_cache, {}, {})):
        assert ended.exit_code == 0, ended.stderr
    train(alone, tmp_path / "local")
    one, two = (results(lines_of(tmp_path / name)) for name in ("alone", "bucket"))
    phases = ["warm_start", "test", "grpo", "grpo", "eval", "test"]
    assert [line["phase"] for line in one] == [line["phase"] for line in two] == phases
    assert 0 < one[2]["accuracy"] < 1 or echo
    assert not echo or any(line["turns"] > 1 for line in one if line["phase"] == "grpo")
    for a, b in zip(one, two, strict=True):
        assert a.pop("phase") == b.pop("phase")
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)


@pytest.mark.deep
def test_a_run_whose_environment_always_fails_ends_with_one_error(grpo_run: Any, tmp_path: Path) -> None:
    raw = with_echo(grpo_run, fails=True)
    with pytest.raises(RunFileError, match=r"all 40 episodes failed; the first \(error\): OSError: no echo"):
        train(raw, tmp_path / "run")


def test_a_sampler_without_logits_ends_the_run_by_the_update_before(monkeypatch):
    for name in ("validated_loop", "PreemptionNotice", "RewardPool", "CheckpointManager", "GrpoParts"):
        monkeypatch.setattr(grpo, name, MagicMock())
    grpo.GrpoParts.return_value.train_state.progress.total_steps = 7
    grpo.GrpoParts.return_value.remote = grpo.validated_loop.return_value.environment.name = None
    monkeypatch.setattr(grpo, "_train", MagicMock(side_effect=LogitsError("the model's logits are not finite")))
    with pytest.raises(DivergedError, match=r"^after update 7: the model's logits are not finite$"):
        grpo.run(MagicMock(), MagicMock(), MagicMock())


@pytest.mark.parametrize("fitting_attempt", [0, 3, grpo.MAX_REDRAWS, None])
def test_questions_of_which_no_worked_episode_fits_are_drawn_again(fitting_attempt: int | None) -> None:
    """Each draw has two questions; of the one that fits, one is left out."""
    fits, cut = SimpleNamespace(tokens=[1]), SimpleNamespace(tokens=[])

    def worked(questions: list[Draw]) -> list[Any]:
        if questions[0].attempt != fitting_attempt:
            raise NothingFitsError("loop.max_new_tokens: 2 of 2")
        return [fits, cut]

    progress = telemetry.Progress(warm_steps=7)
    parts: Any = SimpleNamespace(
        train_state=SimpleNamespace(progress=progress),
        loop=SimpleNamespace(rows=2),
        questions=SimpleNamespace(train=lambda draw, count: [draw] * count),
        episodes=SimpleNamespace(worked=worked),
    )
    if fitting_attempt is None:
        with pytest.raises(RunFileError, match="2 of 2"):
            grpo._worked_questions(parts)
        return
    assert grpo._worked_questions(parts) == ([Draw("warm_start", 7, fitting_attempt)] * 2, [fits, cut])
    assert progress.solutions_left_out == 2 * fitting_attempt + 1
    parts.episodes = None
    assert grpo._worked_questions(parts) == ([Draw("warm_start", 7)] * 2, None)
