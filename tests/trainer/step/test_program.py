"""What a loop compiles, as shapes: the same programs as the run's, their operations and what lies beside them."""

import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

from conf.schema.training.model import Model
from conf.schema.training.run_yaml import RunFile
from tests.conftest import wide
from tests.trainer.conftest import make_mesh
from trainer.distributed.mesh import num_shards
from trainer.fit import remat
from trainer.models import weights
from trainer.step import train_step
from trainer.step.program import Program

LEFT, RIGHT = jnp.ones((3, 4)), jnp.ones((4, 5))
ONCE = 2 * 3 * 4 * 5


def scanned(x, y):
    return lax.scan(lambda total, _: (total + x @ y, None), jnp.zeros((3, 5)), None, length=7)[0]


def looped(x, y):
    return lax.fori_loop(0, x.shape[0] + jnp.int32(0), lambda _, total: total + x @ y, jnp.zeros((3, 5)))


@pytest.mark.parametrize(
    ("function", "turns", "flops"),
    [
        (lambda x, y: x @ y, 1, ONCE),
        (scanned, 1, 7 * ONCE),
        (looped, 11, 11 * ONCE),
        (lambda x, y: lax.cond(x[0, 0] > 0, lambda: x @ y, lambda: jnp.zeros((3, 5))), 1, ONCE),
        (jax.grad(lambda x, y: jnp.sum(x @ y)), 1, 2 * ONCE),  # the product itself, and its derivative
        (jax.grad(jax.checkpoint(lambda x, y: jnp.sum(jnp.sin(x @ y)))), 1, 3 * ONCE),  # and once more
    ],
)
def test_flops_of_matrix_products(function, turns, flops):
    assert Program("test", jax.jit(function), (LEFT, RIGHT), max_iterations=turns).flops() == flops


def test_what_devices_do_on_their_own_counts_once_for_each():
    mesh = make_mesh(4, 2, 1)
    whole, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(("data", "fsdp"))
    each = jax.shard_map(lambda x, y: x @ y, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    assert Program("test", jax.jit(each), (jnp.ones((24, 4)), RIGHT)).flops() == 8 * ONCE


@pytest.fixture(params=["lm", "grpo"])
def experiment(request: pytest.FixtureRequest) -> RunFile:
    return RunFile.model_validate(request.getfixturevalue(f"{request.param}_run"))


def bytes_per_device(cfg: Model, mesh: Mesh) -> int:
    """Bytes of the weights that each device holds, by the weight table."""
    total = 0
    for weight in jax.tree.leaves(weights.weight_table(cfg)):
        parts = math.prod(1 if axis is None else num_shards(mesh, axis) for axis in weight.axes)
        total += math.prod(weight.shape) * np.dtype(weight.dtype).itemsize // parts
    return total


def test_every_program_of_a_loop_is_known_by_its_shapes(experiment):
    """The next test compiles them."""
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        found = {p.name: p for p in remat.programs(experiment, mesh)}
        assert found.pop("resident").flops() == 0
        for name, program in found.items():
            assert (program.flops() > 0) == (name not in ("reshard", "admit"))  # which move and copy
    held = bytes_per_device(experiment.model, mesh)
    if experiment.loop.kind == "lm":
        assert found.keys() == {"update", "eval"}
        assert found["eval"].resident_bytes == 2 * held + 8  # both moments and two counters
    else:
        assert found.keys() == {"update", "warm_start", "logprob", "reshard", "prefill", "admit", "decode"}
        assert found["update"].resident_bytes == held  # the reference
        assert found["reshard"].resident_bytes == 3 * held + 8  # that and the optimizer
        assert found["decode"].resident_bytes > 4 * held + 8  # those, the weights, and what waits for a slot


def test_auto_keeps_as_much_as_fits(lm_run, monkeypatch):
    experiment = remat.with_model_overrides(RunFile.model_validate(lm_run), remat="auto")
    mesh = make_mesh(8, 1, 1)
    assert remat.resolve_remat(experiment, mesh).model.remat == "none"  # there is room enough here
    tried = []

    def build(loss, cfg, opt, mesh, accumulation=1):
        tried.append(cfg.remat)
        return no_room if cfg.remat in ("none", "products", "outputs") else jax.jit(lambda state, batch: state.step)

    def full() -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM")

    lowered = SimpleNamespace(compile=full)
    no_room = SimpleNamespace(lower=lambda *arguments: lowered)
    monkeypatch.setattr(train_step, "build_update", build)
    assert remat.resolve_remat(experiment, mesh).model.remat == "attention"
    assert [*dict.fromkeys(tried)] == ["none", "products", "outputs", "attention"]


ROWS, LENGTH, CHUNK = 16, 96, 8
VOCAB = 8 * 127
"""What has 127 as a factor of its size is an array over the vocabulary, or over a device's part of it, however it is
laid out or flattened: no other axis has it."""


@pytest.fixture(params=["lm", *wide("grpo")])
def wide_experiment(request: pytest.FixtureRequest) -> RunFile:
    raw, half = request.getfixturevalue(f"{request.param}_run"), LENGTH // 2
    sizes = {"total_batch_tokens": ROWS * LENGTH, "seq_len": LENGTH}
    if request.param == "grpo":
        sizes = {"prompts_per_step": ROWS // 2, "group_size": 2, "max_prompt_length": half, "max_new_tokens": half}
    model = raw["model"] | {"vocab_size": VOCAB, "logit_chunk": CHUNK, "scan_layers": True}
    return RunFile.model_validate(raw | {"model": model, "loop": raw["loop"] | sizes})


@pytest.mark.parametrize("sizes", [(2, 2, 2), *wide((8, 1, 1))])
def test_logits_exist_for_a_chunk_of_positions(wide_experiment, sizes):
    """And every program compiles from its shapes."""
    devices = math.prod(sizes)
    mesh = make_mesh(*sizes)
    chunk = ROWS * CHUNK * VOCAB // devices
    table = VOCAB * wide_experiment.model.dim  # and its gradient: with pure data parallelism whole on every device
    compiled = set()
    with jax.set_mesh(mesh):
        for program in remat.programs(wide_experiment, mesh):
            if program.function is None or program.function in compiled:
                continue
            compiled.add(program.function)
            found = of_vocabulary(program.function.lower(*program.arguments).compile().as_text())
            if program.name in ("update", "warm_start", "logprob", "eval"):
                assert chunk in found, program.name  # the search sees what it should
            assert max(found, default=0) <= max(chunk, table) < ROWS * LENGTH * VOCAB // devices, program.name


def of_vocabulary(hlo: str) -> set[int]:
    """Sizes of all arrays over the vocabulary in an optimized program."""
    sizes = {math.prod(int(n) for n in shape.split(",")) for shape in re.findall(r"\b\w*\d+\[([\d,]+)\]", hlo)}
    return {size for size in sizes if size % (VOCAB // 8) == 0}
