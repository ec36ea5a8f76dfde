"""What the LM loop does around its updates: compile once, move nothing unasked, tell where time goes, show samples."""

import json

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.trainer.lives import changed, train
from trainer.loops import updates
from trainer.telemetry.metrics import MetricsLogger

COMPILES = "/jax/core/compile/backend_compile_duration"


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
    assert list((tmp_path / "bucket/tb").rglob("*.xplane.pb")), "the trace lies beside the event files"


def test_an_unasked_transfer_in_the_loop_is_an_error(lm_run, tmp_path, monkeypatch):
    monkeypatch.setattr(updates.UpdateLoop, "_after_checkpoint", lambda self, step, state: state.step + np.int32(1))
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train(lm_run, tmp_path / "a")
