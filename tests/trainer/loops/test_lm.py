"""The LM loop: a resume is exact, errors come early. test_lm_runtime.py shows that it learns."""

from typing import Any

import jax
import numpy as np
import pytest

from conf.schema.training.run_yaml import RunFileError
from tests.groups import load_group
from tests.trainer.lives import SharedPrograms, changed, final_state, run_until, train
from trainer.step.nan_check import DivergedError


@pytest.mark.deep  # test_updates.py has a fast one, with data parallelism
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(lm_run, tmp_path, monkeypatch):
    """Of streams and scales, whose stability is reported. Once it is finished, it is only evaluated again."""
    SharedPrograms().install(monkeypatch)
    model = {"residual": "mhc", "attention_form": "maha", "maha": {"scales": 2}, "num_kv_heads": 4, "head_dim": 8}
    new = changed(lm_run, model=model | {"attention_pattern": "G"}, mesh={"data": 2, "fsdp": 2, "tensor": 2})
    whole, cut = changed(new, dir=str(tmp_path / "whole")), changed(new, dir=str(tmp_path / "cut"))
    expected = train(whole, tmp_path / "whole-local")
    run_until(cut, tmp_path / "first-life", 4, monkeypatch)
    resumed = train(cut, tmp_path / "second-life")
    same = [(a["step"], a["phase"], a.get("loss"), a.get("eval_loss")) for a in resumed]
    assert same == [(b["step"], b["phase"], b.get("loss"), b.get("eval_loss")) for b in expected]
    finished = final_state(whole)
    jax.tree.map(np.testing.assert_array_equal, final_state(cut), finished)
    assert resumed[-1]["eval_residual_column_error"] < 1e-3
    assert resumed[-1]["eval_residual_product_gain"] == pytest.approx(1, abs=0.01)
    lines = train(cut, tmp_path / "third-life")
    assert [line["step"] for line in lines if line["phase"] == "train"] == [1, 2, 3, 4, 5, 6]
    jax.tree.map(np.testing.assert_array_equal, final_state(cut), finished)


LM: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"loop": {"total_batch_tokens": 240}},
        r"loop\.total_batch_tokens: 12 rows of 20 tokens cannot be split evenly over 8 devices; use 160 or 320",
    ),
    ({"model": {"vocab_size": 255}}, r"model\.vocab_size: 255 is too small for data\.tokenizer=bytes, which has 256"),
    ({"loop": {"seq_len": 5000, "total_batch_tokens": 40000}}, r"data\.path: .* loop\.seq_len \+ 1 are required"),
    (
        {"loop": {"seq_len": 10000, "total_batch_tokens": 80000}},
        r"loop\.seq_len: 10000 exceeds model\.",
    ),
    ({"mesh": {"data": 1, "tensor": 8}}, r"mesh\.tensor: 8 devices cannot split the 2 kv_heads"),
    (
        {"loop": {"text_samples": load_group("loop/lm")["text_samples"] | {"interval": 1, "max_new_tokens": 65000}}},
        r"loop\.text_samples\.max_new_tokens: a prompt of \d+ tokens plus 65000 exceeds",
    ),
)
GRPO: tuple[tuple[dict[str, Any], str], ...] = (
    ({"loop": {"prompts_per_step": 6}}, r"loop\.prompts_per_step: 6 prompts cannot be split evenly over 8 devices"),
    ({"model": {"vocab_size": 256}}, r"model\.vocab_size: 256 is too small for data\.tokenizer, which has 259"),
    ({"data": load_group("data/text") | {"path": "x"}}, r"data\.kind: the grpo loop requires questions"),
    ({"loop": {"eval_prompts": 5000}}, r"loop\.eval_prompts: only 840 held-out prompts exist, not 5000"),
    ({"model": {"max_seq_len": 39}}, r"their sum, 40, exceeds model\.max_seq_len, 39"),
    ({"loop": {"max_prompt_length": 20}}, r"loop\.max_prompt_length: a prompt has \d+ tokens, more than 20"),
)
PUZZLE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"loop": {"batch_size": 12}}, r"loop\.batch_size: 12 puzzles cannot be split evenly over 8 devices; use 8 or"),
    ({"model": {"vocab_size": 11}}, r"model\.vocab_size: is 11, but 6 in "),
    ({"model": {"seq_len": 81}}, r"model\.seq_len: is 81, but 16 in "),
    ({"loop": {"puzzles": 1000}}, r"loop\.puzzles: is 1000, but 24 in "),
    (
        {"model": load_group("model/tiny") | {"kind": "decoder"}},
        "loop.kind=puzzle needs model.kind=trm and data",
    ),
    ({"checkpoint": {"best": {"metric": "eval_loss", "mode": "min"}}}, "eval_loss is not evaluated; choices: eval_"),
)


@pytest.mark.parametrize(("run", "bad"), [("lm_run", LM), ("grpo_run", GRPO), ("puzzle_run", PUZZLE)])
def test_bad_input_is_refused_before_the_first_step(request, tmp_path, run, bad):
    raw = request.getfixturevalue(run)
    for sections, words in bad:
        with pytest.raises(RunFileError, match=words):
            train(changed(raw, **sections), tmp_path / "a")


def test_a_loss_that_is_not_finite_ends_the_run_by_name(lm_run, tmp_path):
    """A learning rate that takes the weights to infinity; what is kept is the state before."""
    wild = changed(lm_run, optimizer={"lr": 10.0, "max_grad_norm": None, "b2": 0.0}, model={"init": "fan_in"})
    wild["optimizer"]["param_groups"] = [{"match": "*", "lr_scale": 1e30}]
    with pytest.raises(DivergedError, match=r"update 2: the loss is .*; the batch is in .*step-2\. .*nan_policy=skip"):
        train(wild, tmp_path / "a")
    with np.load(tmp_path / "bucket/diverged/step-2/worker-0.npz") as kept:
        assert kept["tokens"].size == wild["loop"]["total_batch_tokens"]
