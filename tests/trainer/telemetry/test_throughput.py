"""Model FLOPs, utilization, and where the time goes."""

import math
import time
from contextlib import suppress

import jax
import pytest

from conf.formats import LocalRunFileError
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.model import Model
from conf.schema.training.run_yaml import PodFacts
from controller.run.estimate import token_flops
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from trainer.distributed.mesh import named_sharding
from trainer.losses import lm
from trainer.models.weights import abstract_params
from trainer.step.program import Program
from trainer.telemetry import startup_report, throughput
from trainer.telemetry.throughput import PhaseTimes, StragglerWatch, WorkerTimes, find_straggler

POD = {"workers": 1, "devices": 8, "backend": "tpu", "hbm_bytes_per_chip": None}


def test_model_flops_are_those_of_the_traced_update():
    """All products of the forward and the backward pass, but for the logits, which are made twice, in chunks."""
    sizes = {"attention_pattern": "G", "vocab_size": 512, "logit_chunk": 64, "remat": "none"}
    cfg = Model(**load_group("model/tiny") | sizes)
    mesh = make_mesh(1, 1, 1)
    rows = jax.ShapeDtypeStruct((4, 64), "int32", sharding=named_sharding(mesh, "batch"))
    batch = {"tokens": rows, "targets": rows, "weights": jax.ShapeDtypeStruct(rows.shape, "float32")}

    def gradient(params, batch):
        return jax.grad(lambda p: lm.loss(cfg)(p, batch)["loss"][0])(params)

    traced = Program("update", jax.jit(gradient), (abstract_params(cfg), batch)).flops()
    assert throughput.model_flops(cfg, 256, 64) == pytest.approx(traced, rel=1e-6)


@pytest.mark.parametrize("name", ["gemma2_2b", "llama3_3b", "gpt2"])
def test_the_controller_estimates_with_the_same_formula(name: str):
    cfg = Model(**load_group(f"model/{name}"))
    assert 1000 * token_flops(cfg, 512) == pytest.approx(throughput.model_flops(cfg, 1000, 512), rel=1e-3)


def test_utilization_counts_chips_not_devices():
    pod = PodFacts(**POD, accelerator_type="v3-8", bf16_flops_per_chip=100.0)
    assert throughput.model_flops_utilization(600.0, 3.0, pod) == {"mfu": pytest.approx(0.5)}  # 4 chips
    assert throughput.model_flops_utilization(600.0, 3.0, pod.model_copy(update={"backend": "cpu"})) == {}


def test_a_lap_holds_what_was_waited_for_and_leaves_out_what_is_apart(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch = throughput.Stopwatch("data_time", "transfer_time")
    with watch.measure("data_time"):
        pass
    with watch.excluded():
        pass
    assert watch.lap(2) == {"step_time": 8.0, "data_time": 1.0, "transfer_time": 0.0}


@pytest.fixture
def clock(monkeypatch):
    """Seconds of the wall and of the CPU, which the test sets."""
    now = {"wall": 0.0, "cpu": 3.0}
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(throughput.time, "process_time", lambda: now["cpu"])
    assert throughput.time is time
    return now


def test_time_counts_for_the_innermost_phase(clock, monkeypatch):
    monkeypatch.setattr(throughput, "gather_texts", lambda text: [text, text])  # another worker with the same times
    times = PhaseTimes()
    times.listen()
    times.enter("updates")
    clock |= {"wall": 10.0, "cpu": 5.0}
    with suppress(KeyError), times.measure("evaluations"):  # an error ends the phase it leaves
        jax.monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_trace_duration", 1.5)
        clock |= {"wall": 14.0, "cpu": 5.5}
        raise KeyError
    clock |= {"wall": 15.0, "cpu": 6.0}
    assert times.close() == [
        "seconds of worker 0 (CPU seconds of all workers): start 0.0 (6.0), updates 11.0 (5.0), evaluations 4.0 (1.0)",
        "seconds of compilation, by worker: trace 1.5 1.5, lower 0.0 0.0, compile or load 0.0 0.0",
    ]


USUAL = WorkerTimes(host=0.02, wait=0.98, probe=0.001)


SLOW_HOST, SLOW_CHIPS = WorkerTimes(0.9, 0.1, 0.001), WorkerTimes(0.02, 0.98, 0.002)


@pytest.mark.parametrize(
    ("times", "worker", "host", "device"),
    [
        ([USUAL, USUAL, SLOW_HOST, USUAL], 2, 0.88, 0.0),  # it reads slowly, and the others wait
        ([USUAL, USUAL, SLOW_CHIPS, USUAL], 2, 0.0, 0.49),  # they take twice as long
        ([USUAL, WorkerTimes(0.5, 0.98, 0.001), USUAL], None, 0.0, 0.0),  # busy, but it works while its chips do
        ([USUAL, WorkerTimes(0.02, 0.98, 0.0012), USUAL], None, 0.0, 0.0),  # noise of the probe
        ([WorkerTimes(0.01, 1.04, 0.003), WorkerTimes(1.0, 0.05, 0.001)], 1, 0.99, 0.0),  # who waits has no slow chips
        ([WorkerTimes(0.9, 0.05, 0.001), WorkerTimes(0.02, 0.93, 0.001)], 0, 0.88, 0.0),  # of two, the slower one
    ],
)
def test_the_odd_one_is_found(times, worker, host, device):
    found = find_straggler(times)
    assert (found.host_seconds, found.device_seconds) == (pytest.approx(host), pytest.approx(device))
    assert found.worker == worker or not found.seconds


def test_the_share_of_the_delay_is_a_metric(monkeypatch):
    assert StragglerWatch(make_mesh(8, 1, 1)).compare(1.0, 0.9) == {}  # with nobody
    rows = [[0.1, 0.9, 0.001], [0.9, 0.1, 0.001]]
    monkeypatch.setattr(throughput.jax, "process_count", lambda: 2)
    monkeypatch.setattr(throughput, "gather_numbers", lambda mesh, row: throughput.np.array(rows))
    found = StragglerWatch(make_mesh(8, 1, 1)).compare(1.0, 0.9)
    assert found == pytest.approx(
        {"slow_worker": 1, "slow_worker_share": 0.8, "slow_worker_host_time": 0.8, "slow_worker_device_time": 0.0}
    )


WELL = {"kl": 1e-9, "ratio_min": 1.0, "ratio_max": 1.0, "truncated": 0.25, "zero_variance_groups": 0.5}
WELL |= {"sampler_trainer_logp_diff": 1e-6, "sampler_trainer_logp_diff_max": 1e-5}


def lines(loss: str = "trainer", **changes: float) -> list[str]:
    loop = GrpoLoop(**load_group("loop/grpo") | {"old_logprobs": loss})
    return startup_report.check_first_update(WELL | changes, loop)


def test_a_first_update_as_it_must_be_is_told_without_a_warning_and_a_kl_only_of_a_scored_reference() -> None:
    sampler = "ratio 1 to 1; sampler and trainer differ by 1e-06 nats per token, at most 1e-05"
    assert lines() == [f"update 1: KL 1e-09, {sampler}", "truncated 25.0%, groups of equal rewards 50.0%"]
    loop = GrpoLoop(**load_group("loop/grpo") | {"kl_coef": 0.0})
    known = {name: value for name, value in WELL.items() if name != "kl"}
    assert startup_report.check_first_update(known, loop)[0] == f"update 1: {sampler}"


@pytest.mark.parametrize(
    ("loss", "changes", "words"),
    [
        ("trainer", {"kl": 0.2}, "WARNING: the KL to the reference is 0.2, not 0"),
        ("trainer", {"ratio_min": 0.9}, "WARNING: ratios deviate from 1 by up to 0.1 before the first update: the"),
        ("sampler", {"ratio_max": 1.5}, "WARNING: ratios deviate from 1 by up to 0.5 before the first update: sam"),
        ("trainer", {"kl": math.nan}, "WARNING: the KL to the reference is nan, not 0"),
        ("sampler", {"ratio_max": math.nan, "ratio_min": math.nan}, "WARNING: ratios deviate from 1 by up to nan"),
        ("trainer", {"truncated": 0.75}, "WARNING: most responses were cut off"),
    ],
)
def test_what_is_wrong_is_said(loss, changes, words) -> None:
    (warning,) = lines(loss, **changes)[2:]
    assert warning.startswith(words)


def test_the_bucket_is_written_read_and_left_as_it_was(tmp_path, capfd) -> None:
    startup_report.probe_bucket(str(tmp_path / "run"), make_mesh(4, 1, 1))
    assert capfd.readouterr().out.startswith(f"bucket: written to and restored from {tmp_path / 'run'} in ")
    assert not (tmp_path / "run/probe").exists()
    (tmp_path / "file").write_text("a file")
    with pytest.raises(LocalRunFileError, match=r"^dir: cannot write and read .*/file: NotADirectoryError"):
        startup_report.probe_bucket(str(tmp_path / "file"), make_mesh(1, 1, 1))


def test_the_pace_says_where_the_time_goes_and_how_long_it_takes() -> None:
    times = {"rollout_time": 5.0, "reward_time": 0.0, "score_time": 1.0, "update_time": 3.0, "other_time": 1.0}
    rates = {"rollout_tokens_per_second": 1234.5, "train_tokens_per_second": 99.0}
    assert startup_report.time_report(times | rates | {"step_time": 10.0}, 366) == (
        "time per update: 10 s (rollout 50%, reward 0%, score 10%, update 30%, other 10%); 1,234 tokens/s sampled, "
        "99 tokens/s trained on; 366 updates to go: 1:01:00"
    )
