"""`mesh.expert`: each device computes its own experts for the rows of others, and nothing differs from one device."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pydantic import TypeAdapter

from conf.formats import RunFileError
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.model import Lora, Model
from conf.schema.training.optimizer import Adamw, Optimizer
from conf.schema.training.refusals import refusals
from conf.schema.training.run_yaml import RunFile
from conf.schema.training.settings import CheckpointSettings, Mesh
from tests.conftest import wide
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from tests.trainer.models.reference_models import described, expected_of, params_of
from tests.trainer.models.test_experts import BATCH, FAMILY, SHARED, batch_of
from trainer.checkpoint.manager import CheckpointManager
from trainer.fit import memory
from trainer.losses import lm
from trainer.models import experts, weights
from trainer.optimizer.rules import matrix_views
from trainer.pretrained import store
from trainer.sampler import Sampler, SamplerSettings, StopCriteria
from trainer.sampler.copies import sampler_mesh
from trainer.step import train_step
from trainer.telemetry.throughput import model_flops

CFG = described(FAMILY, router_aux_loss_coef=0.1, logit_chunk=7, scan_layers=True)
MESHES = [(1, 1, 1, 2), (1, 2, 1, 2), *wide((2, 1, 1, 2), (1, 1, 2, 2), (1, 1, 1, 4))]
KEPT = CheckpointSettings(
    save_interval=1, max_to_keep=1, best=None, verify_interval=0, verify_data=True, max_outage_hours=24
)


LORA = Lora(r=2, lora_alpha=3, target_modules=("layers.query", "layers.expert_*"), base_dtype="float32")
ADAPTED = CFG.model_copy(update={"lora": LORA})
PARTS = [f"{name}_lora_{part}" for name in ("gate", "up", "down") for part in "ab"]


def optimizer() -> Adamw:
    raw = load_group("optimizer/adamw") | {"lr": 0.01, "schedule": {"kind": "constant", "warmup_steps": 0}}
    found = TypeAdapter(Optimizer).validate_python(raw)
    assert isinstance(found, Adamw)
    return found


def trained(sizes: tuple[int, ...], state: Any, updates: int, cfg: Model = CFG) -> tuple[Any, list[float]]:
    """Return the state after some updates on a mesh, and their losses. state: None is the fixture's weights."""
    mesh, losses = make_mesh(*sizes), []
    # made outside the mesh, since all tests share it
    here = weights.overlay(weights.init_params(cfg, jax.random.key(0)), params_of(FAMILY))
    with jax.set_mesh(mesh):
        if state is None:
            shardings = train_step.state_shardings(cfg, optimizer(), mesh)
            start = jax.jit(lambda p: train_step.new_state(p, cfg, optimizer()), out_shardings=shardings)
            state = start(jax.device_put(here, weights.param_shardings(cfg, mesh)))
        update = train_step.build_update(lm.loss(cfg), cfg, optimizer(), mesh)
        for _ in range(updates):
            rows = jax.device_put(batch_of(4), jax.NamedSharding(mesh, jax.P(BATCH)))
            state, metrics = update(state, rows)
            losses.append(float(metrics["loss"]))
    return state, losses


@cache
def on_one_device(updates: int, *, adapts: bool = False) -> tuple[Any, list[float]]:
    state, losses = trained((1, 1, 1), None, updates, ADAPTED if adapts else CFG)
    return jax.device_get(state), losses


def assert_close(found: Any, wanted: Any) -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_updates_a_checkpoint_and_its_export_are_those_of_one_device(sizes, tmp_path):
    """The checkpoint is resumed on a mesh without the axis, and that one's here."""
    state, losses = trained(sizes, None, 2)
    wanted, expected = on_one_device(2)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(state.params, wanted.params)
    held = state.params["layers"]["expert_up"].addressable_shards[0].data.shape
    assert held == (2, 8 // sizes[3], 16 // sizes[1], 12 // sizes[2])
    query = state.params["layers"]["query"].addressable_shards[0].data.shape
    assert query[1] == 16 // (sizes[1] * sizes[3]), "no other weight is twice on the devices that split rows"
    with CheckpointManager(str(tmp_path), KEPT) as checkpoints:
        checkpoints.save(2, state, {})
    other = (1, 2, 1) if sizes == (1, 1, 1, 2) else (1, 1, 1, 2)
    mesh = make_mesh(*other)
    with jax.set_mesh(mesh), CheckpointManager(str(tmp_path), KEPT) as checkpoints:
        restored, _ = checkpoints.restore(2, train_step.abstract_state(CFG, optimizer(), mesh))
    assert_close(trained(other, restored, 1)[0].params, on_one_device(3)[0].params)


@pytest.mark.parametrize("sizes", [(1, 2, 1, 2), *wide((4, 1, 1), (2, 2, 1), (1, 2, 2))], ids=str)
def test_adapters_of_experts_are_split_as_these_learn_as_on_one_device_and_resume(sizes, tmp_path):
    """Frozen weights, the routers' too, keep each bit."""
    state, losses = trained(sizes, None, 1, ADAPTED)
    held = {name: state.params["layers"][f"expert_{name}"].addressable_shards[0].data.shape for name in PARTS}
    _, fsdp, tensor, expert = (*sizes, 1)[:4]
    assert held["up_lora_a"] == held["gate_lora_a"] == (2, 8 // expert, 16 // fsdp, 2)
    assert held["up_lora_b"] == (2, 8 // expert, 2, 12 // tensor)
    assert (held["down_lora_a"], held["down_lora_b"]) == (
        (2, 8 // expert, 12 // tensor, 2),
        (2, 8 // expert, 2, 16 // fsdp),
    )
    with CheckpointManager(str(tmp_path), KEPT) as checkpoints:
        checkpoints.save(1, state, {})
    other = (1, 1, 1, 4) if sizes == (1, 2, 1, 2) else (1, 2, 1, 2)
    mesh = make_mesh(*other)
    with jax.set_mesh(mesh), CheckpointManager(str(tmp_path), KEPT) as checkpoints:
        restored, _ = checkpoints.restore(1, train_step.abstract_state(ADAPTED, optimizer(), mesh))
    resumed, more = trained(other, restored, 2, ADAPTED)
    wanted, expected = on_one_device(3, adapts=True)
    assert losses + more == pytest.approx(expected, rel=1e-5)
    assert_close(resumed.params, wanted.params)
    for name, weight in params_of(FAMILY)["layers"].items():
        np.testing.assert_array_equal(resumed.params["layers"][name], weight, err_msg=name)
    for name in PARTS:
        view = matrix_views(ADAPTED)[f"layers.expert_{name}"]
        assert (view.shape, view.trained) == ((2 * 8, *wanted.params["layers"][f"expert_{name}"].shape[2:]), True)
        assert np.abs(resumed.params["layers"][f"expert_{name}"]).max() > 0.01


def test_rows_of_experts_elsewhere_add_nothing_whatever_a_kernel_leaves_there(monkeypatch):
    plain = lax.ragged_dot

    def careless(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
        in_a_group = jnp.arange(len(x))[:, None] < sizes.sum()
        return jnp.where(in_a_group, plain(x, weight, sizes), jnp.nan)

    own = {name: np.asarray(weight[0]) for name, weight in params_of(FAMILY)["layers"].items()}
    # ten rows: the last of the four devices has one
    x = np.random.default_rng(0).normal(size=(2, 5, CFG.dim)).astype(np.float32)

    def total(own: weights.Params, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(experts.feed_forward(x, own, CFG)[0]))

    wanted = jax.jit(jax.value_and_grad(total, (0, 1)))(own, x)
    monkeypatch.setattr(lax, "ragged_dot", careless)
    with jax.set_mesh(make_mesh(1, 1, 2, 4)):
        found = jax.jit(jax.value_and_grad(total, (0, 1)))(own, x)
    assert_close(found, wanted)


SAMPLERS = [
    (Mesh(data=1, fsdp=1, tensor=2, expert=2), (1, 2, 2)),
    (None, (1, 2, 1, 2)),
    *wide((Mesh(data=-1, fsdp=1, tensor=1, expert=4), (2, 1, 2)), (None, (1, 1, 1, 8))),
]


@pytest.mark.parametrize("wanted", [None, *wide(Mesh(data=1, fsdp=1, tensor=2, expert=2))], ids=str)
def test_a_sampler_with_adapters_of_experts_replies_as_with_merged_weights(wanted):
    expected, cfg = expected_of(FAMILY), ADAPTED.model_copy(update={"remat": "none"})
    prompts = [row[:length].tolist() for row, length in zip(expected["prompts"], (3, 14), strict=False)]
    random = np.random.default_rng(0)
    drawn = jax.tree.map(lambda w: random.normal(0, 0.3, w.shape).astype(np.float32), weights.weight_table(cfg))
    own = weights.overlay(drawn, params_of(FAMILY))
    merged = jax.tree.map(np.asarray, store.merged(own, cfg))

    def replies(params: weights.Params, model: Model, *sizes: int) -> dict[int, list[int]]:
        settings = SamplerSettings(14, 15, slots=4, chunk=4, dtype="float32", mesh=wanted)
        sampler = Sampler(model, settings, make_mesh(*sizes), StopCriteria(()))
        found = sampler.generate(sampler.load_params(params), prompts, 1, jax.random.key(0), 0.0)
        return {drawn.row: list(drawn.tokens) for drawn in found}

    found = replies(own, cfg, 1, 2, 1, 2)
    assert found == replies(merged, cfg.model_copy(update={"lora": None}), 1, 2, 1, 2)
    assert found[0] != expected["generated"][0].tolist()


@pytest.mark.parametrize("family", [FAMILY, *wide("gemma4_moe", SHARED)])
@pytest.mark.parametrize("meshes", SAMPLERS, ids=str)
def test_a_sampler_gives_the_same_replies(meshes, family):
    """Its copy has all weights but experts whole; without a mesh of its own it splits experts as training does.

    It computes on its own mesh while training's is in force, as in a run.
    """
    (wanted, sizes), expected, cfg = meshes, expected_of(family), described(family, remat="none")
    prompts = [
        row[:length].tolist() for row, length in zip(expected["prompts"], expected["prompt_lengths"], strict=True)
    ]
    settings = SamplerSettings(14, 15, slots=4, chunk=4, dtype="float32", mesh=wanted)
    sampler = Sampler(cfg, settings, mesh := make_mesh(*sizes), StopCriteria(()))
    copy = sampler.load_params(params_of(family))
    split = sampler.programs.mesh.shape["expert"]
    assert split == (sizes[3] if wanted is None else wanted.expert)
    assert copy["layers"][1]["expert_up"].addressable_shards[0].data.shape[0] == 8 // split
    assert copy["layers"][1]["query"].addressable_shards[0].data.shape[0] == cfg.dim
    with jax.set_mesh(mesh):
        found = {drawn.row: drawn.tokens for drawn in sampler.generate(copy, prompts, 1, jax.random.key(0), 0.0)}
    np.testing.assert_array_equal([found[row] for row in range(len(prompts))], expected["generated"])


def test_operations_are_those_without_the_axis(lm_run):
    """A row is multiplied on the device of its expert alone."""
    loop = lm_run["loop"] | {"total_batch_tokens": 8 * 32, "seq_len": 32, "micro_batch_size": None}
    run = RunFile.model_validate(lm_run | {"model": CFG.model_dump(), "loop": loop})
    one, many = (memory.count_flops("update", run, make_mesh(*sizes)) for sizes in ((1, 2, 1), (1, 2, 1, 4)))
    assert many == pytest.approx(one)


@pytest.mark.parametrize(("modules", "each"), [(("layers.query",), 2), (LORA.target_modules, 2 + 6)])
def test_a_frozen_expert_has_no_product_for_a_gradient(modules, each):
    """Per matrix and layer: forward, and for its input; of both of an adapter also for themselves."""
    how = {"scan_layers": False, "remat": "none", "lora": LORA.model_copy(update={"target_modules": modules})}
    cfg = CFG.model_copy(update=how)
    params = weights.overlay(weights.init_params(cfg, jax.random.key(0)), params_of(FAMILY))

    def loss(trained: weights.Params) -> jax.Array:
        return train_step.loss_of(lm.loss(cfg)(weights.overlay(params, trained), batch_of(2))).total

    text = str(jax.make_jaxpr(jax.grad(loss))(weights.trained_part(params, cfg)))
    assert text.count("ragged_dot_general[") == 2 * 3 * each


def test_operations_of_adapters_of_experts_are_those_of_the_rows_that_they_take(lm_run):
    """Six per weight."""
    loop = lm_run["loop"] | {"total_batch_tokens": 8 * 32, "seq_len": 32, "micro_batch_size": None}

    def counted(*sizes: int, modules: tuple[str, ...]) -> tuple[float, float]:
        lora = LORA.model_copy(update={"target_modules": modules})
        cfg = ADAPTED.model_copy(update={"lora": lora, "remat": "none"})
        run = RunFile.model_validate(lm_run | {"model": cfg.model_dump(), "loop": loop})
        return memory.count_flops("update", run, make_mesh(*sizes)), model_flops(cfg, 8 * 32, 32)

    few, many = (counted(1, 2, 1, modules=modules) for modules in (("layers.query",), LORA.target_modules))
    assert many[0] - few[0] == pytest.approx(many[1] - few[1]) == pytest.approx(6 * 256 * 3 * 6 * 2 * 28)
    assert counted(1, 2, 1, 4, modules=LORA.target_modules)[0] == pytest.approx(many[0])


def test_what_it_does_not_go_with_is_named(lm_run, grpo_run):
    with pytest.raises(RunFileError, match=r"mesh\.expert: 3 devices cannot split the 8 experts of layers\.expert_"):
        weights.param_shardings(CFG.model_copy(update={"dim": 18}), make_mesh(1, 1, 1, 3))
    with pytest.raises(RunFileError, match=r"mesh\.fsdp x mesh\.expert: 6 devices cannot split the 16 embed of "):
        weights.param_shardings(CFG, make_mesh(1, 3, 1, 2))
    dense = RunFile.model_validate(grpo_run | {"mesh": {"data": 1, "fsdp": 1, "tensor": 1, "expert": -1}})
    assert isinstance(dense.loop, GrpoLoop)
    own = dense.loop.sampler.model_copy(update={"mesh": Mesh(data=1, fsdp=1, tensor=1, expert=8)})
    run = dense.model_copy(update={"loop": dense.loop.model_copy(update={"sampler": own})})
    why = "the axis is for experts, and the model has none; use 1"
    assert dict(refusals(run, 0, "cpu")) == {"mesh.expert": why, "loop.sampler.mesh.expert": why}
    small = SamplerSettings(8, 8, slots=2, chunk=2, mesh=Mesh(data=1, fsdp=1, tensor=1, expert=4))
    words = r"loop\.sampler\.mesh: data 1 x fsdp 1 x tensor 1 x expert 4 does not make 8 devices"
    with pytest.raises(RunFileError, match=words):
        sampler_mesh(CFG, small, make_mesh(8, 1, 1))
