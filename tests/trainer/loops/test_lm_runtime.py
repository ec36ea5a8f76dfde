"""What the LM loop does around its updates: compile once, move nothing unasked, tell where time goes, show samples."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conf.schema.training.run_yaml import RunFile, RunFileError
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from tests.trainer.lives import train
from tests.trainer.loops.test_lm import changed
from trainer.loops import lm, updates
from trainer.telemetry.metrics import MetricsLogger

COMPILES = "/jax/core/compile/backend_compile_duration"


def test_it_learns_and_everything_is_compiled_before_the_first_update_ends(lm_run, tmp_path, monkeypatch):
    """60 updates with evaluations, samples and checkpoints: one program each, and nothing is compiled on the way."""
    samples = lm_run["loop"]["text_samples"] | {"interval": 24, "prompts": ["1 and ", "7"], "max_new_tokens": 6}
    lengths = {"steps": 60, "total_batch_tokens": 640, "micro_batch_size": 2, "eval_interval": 30}
    raw = changed(
        lm_run, loop=lengths | {"text_samples": samples}, checkpoint={"save_interval": 15}, logging={"log_interval": 6}
    )
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


def test_an_unasked_transfer_in_the_loop_is_an_error(lm_run, tmp_path, monkeypatch):
    monkeypatch.setattr(updates.UpdateLoop, "_after_checkpoint", lambda self, step, state: state.step + np.int32(1))
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train(lm_run, tmp_path / "a")


def losses(raw, folder: Path, devices: int) -> list[float]:
    """The curve of a run on the first so many devices."""
    mesh = make_mesh(devices, 1, 1)
    log = MetricsLogger(folder, raw["dir"], writes=True)
    with jax.set_mesh(mesh):
        lm.run(RunFile.model_validate(raw | {"dir": str(folder / "run")}), mesh, log)
    log.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["phase"] == "train"]


def nanochat(lm_run, **loop):
    """A run of nanochat at 4 layers, Muon + AdamW, in float32."""
    sizes = {
        "num_layers": 4,
        "dim": 64,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 32,
        "mlp_dim": 256,
        "vocab_size": 300,
    }
    cpu = {"activation_dtype": "float32", "scan_layers": False, "remat": "none", "sliding_window": 11}
    raw = changed(lm_run, loop=loop | {"eval_interval": 100}, checkpoint={"save_interval": 100, "verify_interval": 0})
    raw |= {"model": load_group("model/family/nanochat") | sizes | cpu}
    return raw | {"optimizer": load_group("optimizer/nanochat") | {"orthogonalization_dtype": "float32"}}


@pytest.mark.deep
def test_nanochats_curve_is_the_same_on_8_and_on_4_devices(lm_run, tmp_path):
    """Two rows per device at a time: 2 accumulation steps on 8, 4 on 4."""
    raw = nanochat(lm_run, steps=12, total_batch_tokens=640, micro_batch_size=2)
    eight, four = (losses(raw, tmp_path / str(devices), devices) for devices in (8, 4))
    assert four == pytest.approx(eight, rel=1e-4)
    assert eight[-1] < eight[0] - 0.3


def test_a_trace_lies_beside_the_event_files(lm_run, tmp_path):
    train(changed(lm_run, logging={"profile": {"after": 2, "updates": 1}}), tmp_path / "a")
    assert list((tmp_path / "bucket/tb").rglob("*.xplane.pb"))


def test_prompts_and_continuations_that_do_not_fit_are_refused(lm_run, tmp_path):
    samples = lm_run["loop"]["text_samples"] | {"interval": 1, "max_new_tokens": 65000}
    with pytest.raises(
        RunFileError, match=r"loop\.text_samples\.max_new_tokens: a prompt of \d+ tokens plus 65000 exceeds"
    ):
        train(changed(lm_run, loop={"text_samples": samples}), tmp_path / "a")
    with pytest.raises(RunFileError, match=r"loop\.seq_len: 10000 exceeds model\.max_seq_len, 8192"):
        train(changed(lm_run, loop={"seq_len": 10000, "total_batch_tokens": 80000}), tmp_path / "a")
