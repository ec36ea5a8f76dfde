"""The GRPO loop: phases, what it leaves behind, and a resume that is exact in either phase."""

import copy
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from conf.runfile import RunFile, RunFileError
from tests.groups import group
from tests.trainer.conftest import mesh_of
from tests.trainer.processes import results
from trainer import main, update
from trainer import mesh as meshes
from trainer.checkpoint import Checkpoints
from trainer.distributed import place_batch
from trainer.grpo import supervised_loss
from trainer.loops.grpo_programs import updater


class KilledError(Exception):
    """Stands for whatever ends a process."""


def train(raw, folder: Path) -> list[dict]:
    main.train(RunFile.model_validate(raw), folder)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def saved(raw, step: int) -> tuple[update.State, dict]:
    """State and position of one of its checkpoints."""
    experiment = RunFile.model_validate(raw)
    checkpoints = Checkpoints(experiment.dir, experiment.checkpoint)
    abstract = update.abstract_state(experiment.model, experiment.optimizer, meshes.build(experiment.mesh))
    found = checkpoints.restore(step, abstract)
    checkpoints.close()
    return found


def run_until(raw, folder: Path, last_save: int, monkeypatch) -> None:
    """Run, and be killed as soon as that checkpoint is complete."""
    save = Checkpoints.save

    def save_and_die(self, step, state, position):
        save(self, step, state, position)
        if step == last_save:
            self.close()
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_and_die)
        with pytest.raises(KilledError):
            train(raw, folder)


def test_both_phases_are_told_and_summed_up(grpo_run, tmp_path) -> None:
    lines = train(grpo_run, tmp_path / "a")
    assert [line["step"] for line in lines if line["phase"] == "grpo"] == [4, 5, 6, 7]
    last = [line for line in lines if line["phase"] == "grpo"][-1]
    told = ("loss", "accuracy", "pass_at_k", "entropy", "learning_rate", "tokens_per_second", "step_time", "kl")
    ratios = ("clip_fraction", "ratio_min", "ratio_mean", "ratio_max", "sampler_trainer_logp_diff")
    rewards = ("reward_mean", "reward_std", "zero_variance_groups", "filtered_equal", "checks_failed", "truncated")
    for name in told + ratios + rewards:
        assert np.isfinite(last[name])
    assert last["ratio_min"] <= last["ratio_mean"] <= last["ratio_max"]
    assert last["response_length"] <= last["response_length_max"] <= grpo_run["loop"]["response_length"]
    assert last["sampler_trainer_logp_diff_max"] < 1e-4
    assert last["steps_total"] == 7
    assert next(line for line in lines if line["phase"] == "grpo")["compile_time"] > 0
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    assert summary.keys() >= {"accuracy_before", "accuracy_after", "eval_prompts", "steps"}
    assert (summary["eval_prompts"], summary["warm_start_steps"], summary["steps"]) == (40, 3, 4)
    remote = Path(grpo_run["dir"])
    assert (remote / "summary.json").exists()
    assert (remote / "reference").is_dir()
    assert list((remote / "tb").glob("events.out.tfevents.*"))


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_a_run_that_is_killed_in_either_phase_equals_an_uninterrupted_one(grpo_run, tmp_path, monkeypatch, sizes):
    """Bit for bit in weights, optimizer and position; the same numbers, each once, in metrics.jsonl."""
    axes = {"mesh": dict(zip(meshes.AXES, sizes, strict=True))}
    whole, cut = (grpo_run | axes | {"dir": str(tmp_path / name)} for name in ("whole", "cut"))
    expected = train(whole, tmp_path / "whole-local")
    for life, killed_at in enumerate([2, 4, 6]):  # in the warm start, after the first step of GRPO, amid the steps
        run_until(cut, tmp_path / f"life-{life}", killed_at, monkeypatch)
    lines = train(cut, tmp_path / "last-life")
    for step in (2, 4, 6, 7):
        (state, position), (state_whole, position_whole) = saved(cut, step), saved(whole, step)
        assert position == position_whole
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(state_whole), strict=True):
            np.testing.assert_array_equal(a, b)
    assert results(lines) == results(expected)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "cut")]
    assert summaries[0] == summaries[1]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"loop": {"prompts": 6}}, r"loop\.prompts: 6 prompts cannot be split evenly over 8 devices"),
        ({"model": {"vocab": 256}}, r"model\.vocab: 256 ids are too few for data\.tokenizer, which has 259"),
        (
            {"data": group("data/text") | {"path": "x"}},
            r"data\.kind: the grpo loop asks questions",
        ),
        ({"loop": {"eval_prompts": 5000}}, r"loop\.eval_prompts: there are 1440 held-out prompts, not 5000"),
        ({"model": {"context": 39}}, r"together 40 tokens, more than model\.context, 39"),
        ({"loop": {"prompt_length": 20}}, r"loop\.prompt_length: a prompt has \d+ tokens, more than 20"),
    ],
)
def test_bad_input_is_refused_before_the_first_step(grpo_run, tmp_path, sections, words) -> None:
    raw = copy.deepcopy(grpo_run)
    for name, values in sections.items():
        raw[name] = values if "kind" in values else raw[name] | values
    with pytest.raises(RunFileError, match=words):
        train(raw, tmp_path / "a")


def test_an_update_in_parts_is_that_of_the_whole_batch(grpo_run):
    """Sixteen responses on two devices, eight or two at a time."""
    states = []
    for device_batch in (None, 2):
        experiment = RunFile.model_validate(grpo_run | {"loop": grpo_run["loop"] | {"device_batch": device_batch}})
        mesh, opt = mesh_of(1, 2, 1), experiment.optimizer
        random = np.random.default_rng(0)
        tokens = random.integers(0, 256, (16, 40), dtype=np.int32)
        mask = (np.arange(39) < random.integers(1, 40, (16, 1))).astype(np.float32)
        with jax.set_mesh(mesh):
            state = update.init_state(experiment.model, opt, mesh, jax.random.key(0))
            train = updater(supervised_loss(experiment.model), experiment, opt, mesh)
            state, metrics = train(state, place_batch({"tokens": tokens, "mask": mask}, mesh))
        states.append(jax.device_get((state, metrics)))
    for a, b in zip(*(jax.tree.leaves(s) for s in states), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
