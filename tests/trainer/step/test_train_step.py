"""One update on many devices equals the same on one, in one all-reduce where every device holds all weights."""

import functools
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from jax.sharding import Mesh

from conf.schema.training.model import Lora, Model
from tests.conftest import wide
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from trainer.distributed import mesh as meshes
from trainer.distributed.runtime import shard_batch
from trainer.losses import lm, token_logprobs
from trainer.models import decoder, weights
from trainer.pretrained import store
from trainer.step import metric_sums, train_step
from trainer.step.metric_sums import Max, Mean, Min


def make_rows(length: int = 12) -> dict[str, np.ndarray]:
    """Eight rows of unlike weight: a mean of the devices' means would be wrong."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 512, (8, length + 1), dtype=np.int32)
    counted = (np.arange(length) < random.integers(0, length + 1, (8, 1))).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": counted}


def loss_of(cfg):
    def loss(params, batch):
        positions = jnp.broadcast_to(jnp.arange(12), batch["tokens"].shape)
        hidden = decoder.forward(params, cfg, batch["tokens"], positions)
        logprobs, entropy = token_logprobs.token_logprobs(hidden, params, batch["targets"], cfg)
        count = batch["weights"].sum()
        return {
            "loss": Mean(-(logprobs * batch["weights"]).sum(), count),
            "entropy": Mean((entropy * batch["weights"]).sum(), count),
            "rows": Mean(batch["weights"].any(axis=1).sum(), len(positions)),
        }

    return loss


@pytest.fixture
def tiny(tiny: Model) -> Model:
    """Of one layer: it is what lies around the model that is tested here."""
    return tiny.model_copy(update={"num_layers": 1})


@pytest.fixture(scope="module")
def batch():
    return make_rows()


@cache
def first_state(cfg, opt, devices: Mesh) -> train_step.State:
    return train_step.init_state(cfg, opt, devices, jax.random.key(5))


@cache
def update_of(cfg, opt, devices: Mesh) -> jax.stages.Compiled:
    """Compiled for the batch of these tests."""
    with jax.set_mesh(devices):
        batch = shard_batch(make_rows(), devices)
        update = train_step.build_update(loss_of(cfg), cfg, opt, devices)
        return update.lower(first_state(cfg, opt, devices), batch).compile()


def start_of(cfg, opt, devices: Mesh) -> train_step.State:
    """A copy of the first state, whose buffers an update may take."""
    return jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), first_state(cfg, opt, devices))


def trained(cfg, opt, devices: Mesh, batch, updates: int = 3):
    """And the metrics of each update."""
    told = []
    with jax.set_mesh(devices):
        state = start_of(cfg, opt, devices)
        for _ in range(updates):
            state, metrics = update_of(cfg, opt, devices)(state, shard_batch(batch, devices))
            told.append(metrics)
        return state, jax.device_get(told)


def assert_equal_one(cfg, opt, sizes, updates: int, rtol: float, of_norm: float) -> None:
    """Metrics of each update; running means of gradients beside the largest entry of a weight."""
    (one, expected), (many, told) = (
        trained(cfg, opt, make_mesh(*shape), make_rows(), updates) for shape in ((1, 1, 1), sizes)
    )
    for found, wanted in zip(told, expected, strict=True):
        for name, value in found.items():
            np.testing.assert_allclose(value, wanted[name], rtol=of_norm if name == "grad_norm" else rtol, err_msg=name)
    for a, b in zip(*(jax.tree.leaves(optax.tree_utils.tree_get(s.optimizer, "mu")) for s in (many, one)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=max(1e-4, of_norm) * np.abs(b).max())
    if updates < 10:  # where a gradient is nearly 0 Adam makes a step of its rounding
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), many.params, one.params)
    assert told[-1].keys() >= {"loss", "entropy", "rows", "grad_norm", "learning_rate"}


@pytest.fixture(scope="module")
def guarded(adamw):
    """With all that an update may do beside its step."""
    return adamw.model_copy(update={"ema_decay": 0.2, "nan_policy": "skip"})


@pytest.mark.parametrize("sizes", [(2, 2, 2), *wide((8, 1, 1))])
def test_many_devices_equal_one(tiny, guarded, sizes):
    assert_equal_one(tiny, guarded, sizes, 3, 2e-5, 2e-5)


@pytest.mark.deep
@pytest.mark.parametrize(("sizes", "scan"), [((2, 2, 2), True), ((1, 4, 2), False), ((4, 1, 2), False)])
def test_fifty_updates_on_any_mesh(tiny, adamw, sizes, scan):
    layers = {"num_layers": 2, "scan_layers": scan, "logit_chunk": 5, "remat": "products"}
    assert_equal_one(tiny.model_copy(update=layers), adamw, sizes, 50, 1e-4, 1e-4)


@pytest.mark.parametrize("sizes", [(2, 2, 2), *wide((1, 4, 2))])
def test_activations_are_split_as_the_table_says(tiny, adamw, sizes):
    """Of all arrays of the compiled update, those whose size is a multiple of the sequence's prime length."""
    length, devices = 23, make_mesh(*sizes)
    cfg = tiny.model_copy(update={"remat": "none", "logit_chunk": 5})
    with jax.set_mesh(devices):
        state = train_step.abstract_state(cfg, adamw, devices)
        step = train_step.build_update(lm.loss(cfg), cfg, adamw, devices)
        text = step.lower(state, shard_batch(make_rows(length), devices)).compile().as_text()
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", text)}
    activations = {shape for shape in shapes if np.prod(shape) % length == 0}
    rows, hidden, heads = (
        size // meshes.num_shards(devices, axis)
        for axis, size in (("batch", 8), ("hidden", cfg.mlp_dim), ("heads", cfg.num_heads))
    )
    assert {(rows, length, cfg.dim), (rows, length, hidden), (rows, length, heads, cfg.head_dim)} <= activations
    assert max(np.prod(shape) for shape in activations) == rows * length * hidden


def test_training_begins_with_the_weights_it_is_given(tiny, adamw, tmp_path):
    given = jax.tree.map(np.asarray, jax.jit(weights.init_params, static_argnums=0)(tiny, jax.random.key(11)))
    store.write_params(epath.Path(tmp_path), given, tiny)
    cfg = tiny.model_copy(update={"weights": str(tmp_path)})
    state = train_step.init_state(cfg, adamw, make_mesh(1, 4, 2), jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, state.params, given)
    placed = weights.param_shardings(cfg, make_mesh(1, 4, 2))["layers"]["up"]
    assert state.params["layers"]["up"].sharding.spec == placed.spec


@pytest.mark.parametrize("sizes", [(4, 1, 1), *wide((1, 2, 2))])
def test_a_batch_in_parts_gives_the_gradient_of_the_whole(tiny, adamw, batch, sizes):
    """Though tokens are spread unevenly over the parts. With data parallelism alone, they share the one all-reduce."""
    devices, parts = make_mesh(*sizes), jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), batch)
    placed = jax.tree.map(lambda x: jax.device_put(x, meshes.named_sharding(devices, None, "batch")), parts)
    params = first_state(tiny, adamw, devices).params
    with jax.set_mesh(devices):
        loss = train_step.without_carry(loss_of(tiny))
        compiled = jax.jit(train_step.mean_gradient(loss, tiny, devices, 2)).lower(params, placed, None).compile()
        found, metrics, _ = compiled(params, placed, None)
        compute = jax.jit(train_step.mean_gradient(loss, tiny, devices))
        whole, expected, _ = compute(params, shard_batch(batch, devices), None)
    for name, value in metrics.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, err_msg=name)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    if meshes.is_data_parallel(devices):
        assert_one_all_reduce(compiled)


def assert_one_all_reduce(compiled: jax.stages.Compiled) -> None:
    hlo = compiled.as_text() or ""
    assert hlo.count(" all-reduce(") + hlo.count(" all-reduce-start(") == 1
    assert "all-gather" not in hlo


@pytest.mark.deep
def test_with_data_parallelism_means_are_weighted_by_what_counts_in_one_all_reduce(tiny, adamw, batch):
    devices = make_mesh(8, 1, 1)
    _, [metrics] = trained(tiny, adamw, devices, batch, updates=1)
    assert_one_all_reduce(update_of(tiny, adamw, devices))
    sums = jax.jit(loss_of(tiny))(jax.device_get(first_state(tiny, adamw, devices).params), batch)
    np.testing.assert_allclose(metrics["loss"], sums["loss"][0] / batch["weights"].sum(), rtol=1e-5)
    assert metrics["rows"] == batch["weights"].any(axis=1).mean()


def test_a_batch_without_weight_changes_nothing(tiny, adamw, batch):
    empty = batch | {"weights": np.zeros_like(batch["weights"])}
    state, [metrics] = trained(tiny, adamw, make_mesh(8, 1, 1), empty, updates=1)
    assert metrics["loss"] == metrics["grad_norm"] == 0
    start = first_state(tiny, adamw, make_mesh(8, 1, 1)).params
    jax.tree.map(np.testing.assert_array_equal, state.params, start)


def test_what_is_not_finite_changes_nothing_but_counters(tiny, guarded, batch):
    devices = make_mesh(1, 1, 1)
    with jax.set_mesh(devices):
        state, step = start_of(tiny, guarded, devices), update_of(tiny, guarded, devices)
        before, after, again = [], [], []
        for weight, kept in ((1.0, before), (np.nan, after), (1.0, again)):
            weighed = batch | {"weights": batch["weights"] * np.float32(weight)}
            state, metrics = step(state, shard_batch(weighed, devices))
            kept += [jax.tree.map(np.asarray, state), jax.device_get(metrics)]
    jax.tree.map(np.testing.assert_array_equal, before[0][1:3] + before[0][4:], after[0][1:3] + after[0][4:])
    assert [(int(s.step), int(s.skipped)) for s in (before[0], after[0], again[0])] == [(1, 0), (2, 1), (3, 1)]
    assert [(m["finite"], m["skipped"]) for m in (before[1], after[1], again[1])] == [(1, 0), (0, 1), (1, 1)]
    assert before[1]["loss"] != again[1]["loss"] < np.inf


def test_the_average_follows_the_weights(tiny, guarded, batch):
    """Fast at first: its decay is (1 + n) / (10 + n) after n updates, until that is more than `ema`."""
    devices = make_mesh(2, 2, 2)
    with jax.set_mesh(devices):
        state = start_of(tiny, guarded, devices)
        expected = np.asarray(state.params["embedding"])
        np.testing.assert_array_equal(train_step.eval_params(state)["embedding"], expected)
        for kept in (2 / 11, 0.2, 0.2):
            state, _ = update_of(tiny, guarded, devices)(state, shard_batch(batch, devices))
            expected = kept * expected + (1 - kept) * np.asarray(state.params["embedding"])
            np.testing.assert_allclose(train_step.eval_params(state)["embedding"], expected, rtol=1e-5, atol=1e-7)
    up = state.average["layers"]["up"]
    assert up.sharding == state.params["layers"]["up"].sharding


@pytest.mark.parametrize(("sizes", "share"), [((8, 1, 1), 1), ((2, 2, 2), 4)])
def test_weights_and_moments_are_split_as_the_table_says(tiny, adamw, guarded, sizes, share):
    devices, opt = make_mesh(*sizes), adamw if sizes == (8, 1, 1) else guarded
    state = first_state(tiny, opt, devices)
    adam = state.optimizer[1].inner_states["adamw"].inner_state
    for tree in (state.params, adam.mu, adam.nu):
        query = tree["layers"]["query"]
        assert query.addressable_shards[0].data.size * share == query.size
    shapes = (train_step.abstract_state(tiny, opt, devices), state)
    abstract, found = (jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree) for tree in shapes)
    assert found == abstract


def sums_of(values: np.ndarray) -> metric_sums.MetricSums:
    x = jnp.asarray(values)
    return {"mean": Mean(x.sum(), jnp.float32(len(x))), "low": Min(x.min()), "high": Max(x.max())}


def test_parts_merge_to_the_whole_and_with_zero_nothing_changes():
    values = np.arange(-4, 4, dtype=np.float32)
    sums, zero = sums_of(values), metric_sums.zero(sums_of(values))
    for parts in ((sums_of(values[:3]), sums_of(values[3:])), (zero, sums), (sums, zero)):
        assert metric_sums.merge(*parts) == sums
    assert metric_sums.finalize(sums) == {"mean": -0.5, "low": -4, "high": 3}


def test_a_mean_over_nothing_is_unknown_but_the_loss_is_0():
    nothing = Mean(jnp.float32(0), jnp.float32(0))
    found = metric_sums.finalize({"loss": nothing, "steps": nothing})
    assert found["loss"] == 0
    assert np.isnan(found["steps"])


SMALL = {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 16, "vocab_size": 64}
SMALL |= {"attention_pattern": "L", "sliding_window": 16, "scan_layers": False, "remat": "none"}
SMALL |= {"max_seq_len": 64, "logit_chunk": 2}
SUMMED = ("embedding", "position_embedding", "unembedding", "_bias", "_scale", "norm")
TOKENS, LENGTH = 65_536, 64


@functools.cache
def start(cfg: Model) -> weights.Params:
    """Initial weights, moved so that no gradient is 0."""
    random = np.random.default_rng(1)
    params = jax.jit(weights.init_params, static_argnums=0)(cfg, jax.random.key(1))
    return jax.tree.map(lambda x: np.asarray(x) + random.normal(0, 0.1, x.shape).astype(np.float32), params)


def gradient(cfg: Model, batch: dict[str, np.ndarray], sizes: tuple[int, int, int]) -> weights.Params:
    """Of the LM loss."""
    mesh = make_mesh(*sizes)
    params = start(cfg.model_copy(update={"activation_dtype": "float32"}))
    dealt = meshes.named_sharding(mesh, "batch")
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, weights.param_shardings(cfg, mesh)), jax.device_put(batch, dealt)
        compute = jax.jit(train_step.mean_gradient(train_step.without_carry(lm.loss(cfg)), cfg, mesh))
        return jax.device_get(compute(*placed, None)[0])


def batch_of(tokens: int) -> dict[str, np.ndarray]:
    """Bytes of a text: the most frequent is a third of all."""
    frequency = 1 / np.arange(1, SMALL["vocab_size"] + 1) ** 1.2
    shape, random = (tokens // LENGTH, LENGTH + 1), np.random.default_rng(0)
    drawn = random.choice(len(frequency), shape, p=frequency / frequency.sum()).astype(np.int32)
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:], "weights": np.ones(drawn[:, 1:].shape, np.float32)}


def model(family: str, dtype: str) -> Model:
    return Model(**load_group(f"model/{family}") | SMALL | {"activation_dtype": dtype})


# gpt2: the output layer is the embedding; positions, all biases; others: an output layer of its own, scalars; of heads
@pytest.mark.deep
@pytest.mark.parametrize("family", ["gpt2", "nanochat_d16", "qwen2_5_0_5b"])
def test_sums_over_65_thousand_tokens_are_within_a_percent_of_float32(family):
    """With the token look-up and the sums in bfloat16, embeddings are off by 80 %, biases and scalars by 20."""
    sizes, compared = (2, 2, 2) if family == "gpt2" else (1, 8, 1), 0
    found = gradient(model(family, "bfloat16"), batch_of(TOKENS), sizes)
    exact = gradient(model(family, "float32"), batch_of(TOKENS), (1, 1, 1))
    for path, a in jax.tree.leaves_with_path(found):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name.endswith(SUMMED) and not (family == "gpt2" and name.endswith("key_bias")):  # without rotation it is 0
            b = functools.reduce(lambda tree, key: tree[key.key], path, exact)
            assert np.linalg.norm(np.float64(a) - b) <= 0.01 * np.linalg.norm(np.float64(b)), name
            compared += 1
    assert compared >= 4


@pytest.mark.parametrize("family", ["qwen2_5_0_5b", "gpt2", "nanochat_d16", "gemma2_2b", "llama3_1b"])
@pytest.mark.parametrize("lora", [False, True])
def test_gradients_of_matrices_leave_their_products_in_float32(family, lora):
    """Else the parts of the devices are rounded to bfloat16, and added up so over `mesh.fsdp`."""
    cfg, rows = model(family, "bfloat16"), 4 * LENGTH
    if lora:
        cfg = cfg.model_copy(update={"lora": Lora(r=4, lora_alpha=8, target_modules=("layers.*",))})
    batch = {name: jax.ShapeDtypeStruct((4, LENGTH), x.dtype) for name, x in batch_of(LENGTH).items()}

    def total(trained, params, batch):
        return train_step.loss_of(lm.loss(cfg)(weights.overlay(params, trained), batch)).total

    params = weights.abstract_params(cfg)
    lowered = jax.jit(jax.grad(total)).lower(weights.trained_part(params, cfg), params, batch).as_text()
    products = re.findall(r"stablehlo\.dot_general.*-> tensor<(\d+)x(\d+)x(bf16|f32)>", lowered)
    dtypes = {dtype for first, second, dtype in products if rows not in (int(first), int(second))}
    assert dtypes == {"f32"}


@pytest.mark.deep
@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 4, 1)])
def test_gradients_of_many_devices_are_those_of_one_though_activations_are_bfloat16(sizes):
    cfg, batch = model("nanochat_d16", "bfloat16"), batch_of(4096)
    found, expected = gradient(cfg, batch, sizes), gradient(cfg, batch, (1, 1, 1))
    for path, a in jax.tree.leaves_with_path(found):
        b = functools.reduce(lambda tree, key: tree[key.key], path, expected)
        assert np.linalg.norm(np.float64(a) - b) <= 0.01 * np.linalg.norm(np.float64(b)), path
