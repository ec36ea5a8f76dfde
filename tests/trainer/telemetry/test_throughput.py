"""Model FLOPs, utilization, and where the time goes."""

import time

import jax
import pytest

from conf.schema.training.model import Model
from conf.schema.training.run_yaml import PodFacts
from controller.run.estimate import token_flops
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from trainer.distributed.mesh import named_sharding
from trainer.losses import lm
from trainer.models.weights import abstract_params
from trainer.step.program import Program
from trainer.telemetry import throughput

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
