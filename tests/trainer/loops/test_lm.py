"""The LM loop: a resume is exact, errors come early. test_lm_runtime.py shows that it learns."""

import copy

import jax
import numpy as np
import pytest

from conf.schema.training.run_yaml import RunFile, RunFileError
from tests.trainer.lives import SharedPrograms, run_until, train
from trainer.checkpoint.manager import CheckpointManager
from trainer.distributed import mesh as meshes
from trainer.step import train_step
from trainer.step.nan_check import DivergedError


def final_state(raw) -> train_step.State:
    experiment = RunFile.model_validate(raw)
    checkpoints = CheckpointManager(experiment.dir, experiment.checkpoint)
    abstract = train_step.abstract_state(experiment.model, experiment.optimizer, meshes.build_mesh(experiment.mesh))
    state, _ = checkpoints.restore(checkpoints.latest_step(), abstract)
    checkpoints.close()
    return state


def changed(raw, **sections):
    new = copy.deepcopy(raw)
    for name, values in sections.items():
        new[name] = new[name] | values if isinstance(values, dict) else values
    return new


@pytest.mark.deep
def test_streams_and_scales_resume_bit_for_bit_and_report_their_stability(lm_run, tmp_path, monkeypatch):
    SharedPrograms().install(monkeypatch)
    model = {"residual": "mhc", "attention_form": "maha", "maha": {"scales": 2}, "num_kv_heads": 4, "head_dim": 8}
    new = changed(lm_run, model=model | {"attention_pattern": "G"}, mesh={"data": 2, "fsdp": 2, "tensor": 2})
    whole, cut = changed(new, dir=str(tmp_path / "whole")), changed(new, dir=str(tmp_path / "cut"))
    expected = train(whole, tmp_path / "a")
    run_until(cut, tmp_path / "b", 4, monkeypatch)
    resumed = train(cut, tmp_path / "c")
    assert resumed[-1]["eval_loss"] == expected[-1]["eval_loss"]
    jax.tree.map(np.testing.assert_array_equal, final_state(cut), final_state(whole))
    assert resumed[-1]["eval_residual_column_error"] < 1e-3
    assert resumed[-1]["eval_residual_product_gain"] == pytest.approx(1, abs=0.01)


@pytest.mark.deep  # test_updates.py has a fast one, with data parallelism
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(lm_run, tmp_path, monkeypatch):
    """Once it is finished, it is only evaluated again."""
    SharedPrograms().install(monkeypatch)
    axes = dict(zip(meshes.MESH_AXES, (2, 2, 2), strict=True))
    whole = changed(lm_run, dir=str(tmp_path / "whole"), mesh=axes)
    cut = changed(lm_run, dir=str(tmp_path / "cut"), mesh=axes)
    expected = train(whole, tmp_path / "whole-local")
    run_until(cut, tmp_path / "first-life", 4, monkeypatch)
    resumed = train(cut, tmp_path / "second-life")
    same = [(a["step"], a["phase"], a.get("loss")) for a in resumed if a["phase"] == "train"]
    assert same == [(b["step"], b["phase"], b.get("loss")) for b in expected if b["phase"] == "train"]
    finished = final_state(whole)
    jax.tree.map(np.testing.assert_array_equal, final_state(cut), finished)
    lines = train(cut, tmp_path / "third-life")
    assert [line["step"] for line in lines if line["phase"] == "train"] == [1, 2, 3, 4, 5, 6]
    jax.tree.map(np.testing.assert_array_equal, final_state(cut), finished)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"loop": {"total_batch_tokens": 240}},
            r"loop\.total_batch_tokens: 12 rows of 20 tokens cannot be split evenly over 8 devices; use 160 or 320",
        ),
        (
            {"model": {"vocab_size": 255}},
            r"model\.vocab_size: 255 is too small for data\.tokenizer=bytes, which has 256",
        ),
        ({"loop": {"seq_len": 5000, "total_batch_tokens": 40000}}, r"data\.path: .* loop\.seq_len \+ 1 are required"),
        ({"mesh": {"data": 1, "tensor": 8}}, r"mesh\.tensor: 8 devices cannot split the 2 kv_heads"),
    ],
)
def test_bad_input_is_refused_before_the_first_step(lm_run, tmp_path, sections, words):
    with pytest.raises(RunFileError, match=words):
        train(changed(lm_run, **sections), tmp_path / "a")


def test_a_loss_that_is_not_finite_ends_the_run_by_name(lm_run, tmp_path):
    """A learning rate that takes the weights to infinity; what is kept is the state before."""
    wild = changed(lm_run, optimizer={"lr": 10.0, "max_grad_norm": None, "b2": 0.0}, model={"init": "fan_in"})
    wild["optimizer"]["param_groups"] = [{"match": "*", "lr_scale": 1e30}]
    with pytest.raises(DivergedError, match=r"update 2: the loss is .*; the batch is in .*step-2\. .*nan_policy=skip"):
        train(wild, tmp_path / "a")
    with np.load(tmp_path / "bucket/diverged/step-2/worker-0.npz") as kept:
        assert kept["tokens"].size == wild["loop"]["total_batch_tokens"]
