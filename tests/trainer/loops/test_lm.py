"""The LM loop: it learns and resumes exactly, compiles once, tells where time goes; errors come early, faults soon."""

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conf.formats import RunFileError
from tests.groups import load_group
from tests.trainer.bits import flip_bit
from tests.trainer.conftest import make_lm_run
from tests.trainer.lives import SharedPrograms, changed, final_state, run_until, train
from trainer.distributed.checksums import CorruptionError
from trainer.loops import lm, updates
from trainer.loops.updates import UpdateLoop
from trainer.sampler import LogitsError
from trainer.step.nan_diagnosis import DivergedError
from trainer.telemetry.metrics import MetricsLogger


@pytest.mark.deep  # a planted fault is the fast one, with data parallelism
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


def test_texts_of_a_model_without_logits_end_the_run_by_the_update_before():
    bare: Any = SimpleNamespace(samples=MagicMock(), log=MagicMock())
    bare.samples.generate.side_effect = LogitsError("the model's logits are not finite")
    state: Any = MagicMock(average=None)
    with pytest.raises(DivergedError, match=r"^after update 7: the model's logits are not finite$"):
        lm.LmUpdates.sample(bare, state, 7)
    bare.log.log_text.assert_not_called()


COMPILES = "/jax/core/compile/backend_compile_duration"


@pytest.mark.deep
def test_what_the_data_leave_out_is_counted_in_the_summary(lm_run, tmp_path):
    lines = [json.dumps({"text": "x" * (100 if i % 3 else 10)}) for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "oops", *lines, "[1]"]))
    data = load_group("data/jsonl") | {"path": str(tmp_path / "a.jsonl"), "packing": "documents", "eval_fraction": 0.2}
    data |= {"long_documents": "skip", "on_bad_line": "skip", "tokenizer": "bytes", "streams": 2}
    train(lm_run | {"data": data, "model": lm_run["model"] | {"vocab_size": 260}}, tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["documents_left_out"] > 50
    assert summary["bad_lines"] >= 1


def test_it_learns_and_everything_is_compiled_before_the_first_update_ends(lm_run, tmp_path, monkeypatch):
    """60 updates with evaluations, samples and checkpoints: one program each, and nothing is compiled on the way."""
    samples = lm_run["loop"]["text_samples"] | {"interval": 24, "prompts": ["1 and ", "7"], "max_new_tokens": 6}
    lengths = {"steps": 60, "total_batch_tokens": 640, "micro_batch_size": 2, "eval_interval": 30}
    logging = {"log_interval": 6, "profile": {"after": 20, "updates": 1}}
    loop = lengths | {"text_samples": samples}
    raw = changed(lm_run, loop=loop, checkpoint={"save_interval": 15}, logging=logging)
    compiled: list[str] = []
    seen: list[int] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **rest: compiled.append(event) if event == COMPILES else None
    )
    log = MetricsLogger.log
    monkeypatch.setattr(MetricsLogger, "log", lambda *a, **values: (seen.append(len(compiled)), log(*a, **values)))
    try:
        lines = train(raw, tmp_path / "a")
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(compiled) > 3
    assert set(seen[:-1]) == {seen[0]}
    assert {line["step"] for line in lines if line["phase"] == "train"} == set(range(6, 61, 6))
    losses = [line["loss"] for line in lines if line["phase"] == "train"]
    held_out = [line["eval_loss"] for line in lines if line["phase"] == "eval"]
    assert losses[-1] < 2.6 < np.log(256) < losses[0] + 2
    assert held_out[1] < held_out[0]
    assert json.loads((tmp_path / "a/summary.json").read_text())["eval_loss"] == pytest.approx(held_out[-1])
    last = [line for line in lines if line["phase"] == "train"][-1]
    assert 0 < last["data_time"] + last["transfer_time"] < last["step_time"]
    assert "compile_time" in lines[0]
    assert "compile_time" not in last
    events = EventAccumulator(str(tmp_path / "bucket/tb"))
    events.Reload()
    shown = events.Tensors("samples")
    assert [point.step for point in shown] == [24, 48]
    assert shown[0].tensor_proto.string_val[0].decode().startswith("1 and **")
    (trace,) = (tmp_path / "bucket/tb").rglob("*.xplane.pb")  # beside the event files
    traced = trace.read_bytes()
    assert b"PjitFunction" in traced
    assert b"$updates.py" not in traced, "calls of Python are not traced: their number would set the time of an update"


def test_an_unasked_transfer_in_the_loop_is_an_error(lm_run, tmp_path, monkeypatch):
    monkeypatch.setattr(updates.UpdateLoop, "_after_checkpoint", lambda self, step, state: state.step + np.int32(1))
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train(lm_run, tmp_path / "a")


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
