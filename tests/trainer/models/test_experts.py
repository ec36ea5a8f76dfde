"""Experts: products, routing, load and its loss, on meshes too; both layouts of their files; what they do not go with.

Logits, gradients, replies and exports of a whole model are compared in test_decoder.py and beside it.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from pydantic import TypeAdapter, ValidationError

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.model import Lora, Model
from conf.schema.training.optimizer import Muon, Optimizer
from conf.schema.training.refusals import refusals
from conf.schema.training.run_yaml import RunFile
from conf.schema.training.settings import Mesh
from controller.checks.fit import matrix_weights
from controller.run.estimate import token_flops
from tests.conftest import wide
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from tests.trainer.models.reference_models import described, expected_of, params_of
from trainer.fit.remat import remat_candidates
from trainer.losses import lm
from trainer.models import decoder, experts, weights
from trainer.models.decoder_weights import weight_table
from trainer.optimizer import muon
from trainer.optimizer.rules import matrix_views, update_rules
from trainer.pretrained import hf_families, hf_files
from trainer.sampler import Sampler, SamplerSettings, StopCriteria
from trainer.step import train_step
from trainer.telemetry.throughput import model_flops

FAMILY, SHARED = "qwen3_moe", "qwen3_5_moe"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_grouped_product_and_its_gradients_are_those_of_each_group(dtype):
    """A group is empty; the weight's gradient leaves its product in float32."""
    sizes = jnp.array([3, 0, 5, 4], jnp.int32)
    of_row = np.repeat(np.arange(4), sizes)
    keys = jax.random.split(jax.random.key(0), 3)
    x, change = (jax.random.normal(key, (12, n)).astype(dtype) for key, n in zip(keys[:2], (8, 6), strict=True))
    weight = jax.random.normal(keys[2], (4, 8, 6))

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum("ni,nio->no", x, weight.astype(dtype)[of_row])

    @partial(jax.jit, static_argnums=0)
    def computed(product: Any, x: jax.Array, weight: jax.Array, change: jax.Array) -> Any:
        out, pull = jax.vjp(product, x, weight)
        return out, *pull(change)

    def grouped(x: jax.Array, weight: jax.Array) -> jax.Array:
        return experts._grouped_product(x, weight, sizes, None)

    found, wanted = (computed(product, x, weight, change) for product in (grouped, plain))
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        tolerance = 1e-5 if dtype == "float32" else 0.1
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=0, atol=tolerance)


def one_layer(params: weights.Params) -> weights.Params:
    return {name: weight[0] for name, weight in params["layers"].items()}


@pytest.mark.parametrize(("family", "is_divided"), [(FAMILY, True), (FAMILY, False), (SHARED, True)])
def test_each_token_gets_the_sum_of_its_likeliest_experts(family, is_divided):
    """As a loop over tokens computes it, even if all of them take the same experts: none is dropped."""
    cfg = described(family)
    assert cfg.experts is not None
    cfg = cfg.model_copy(update={"experts": cfg.experts.model_copy(update={"norm_topk_prob": is_divided})})
    for same in (False, True):
        own = {name: np.asarray(weight) for name, weight in one_layer(params_of(family)).items()}
        x = np.random.default_rng(0).normal(size=(2, 5, cfg.dim)).astype(np.float32)
        if same:
            x[:] = x[0, 0]
        found, load = experts.feed_forward(jnp.asarray(x), own, cfg)
        assert load is None
        for at in np.ndindex(2, 5):
            logits = x[at] @ own["router"]
            shares = np.exp(logits - logits.max())
            shares = shares / shares.sum()
            chosen = np.argsort(-shares)[: cfg.experts.per_token]
            shares = shares / shares[chosen].sum() if is_divided else shares
            wanted = np.zeros(cfg.dim)
            for i in chosen:
                gate, up = x[at] @ own["expert_gate"][i], x[at] @ own["expert_up"][i]
                wanted += shares[i] * ((gate / (1 + np.exp(-gate)) * up) @ own["expert_down"][i])
            if family == SHARED:
                gate, up, of_all = (x[at] @ own[name] for name in ("gate", "up", "shared_gate"))
                wanted += ((gate / (1 + np.exp(-gate)) * up) @ own["down"]) / (1 + np.exp(-of_all))
            np.testing.assert_allclose(found[at], wanted, rtol=0, atol=1e-5)


def batch_of(rows: int) -> dict[str, np.ndarray]:
    """Tokens in two documents and padding, whose tokens do not count."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 64, (rows, 12), dtype=np.int32)
    segments = np.tile(np.int32([1] * 5 + [2] * 4 + [0] * 3), (rows, 1))
    segments[0, 4:] = 0  # rows of unequal numbers
    weight = (segments > 0).astype(np.float32)
    at = np.tile(np.int32([*range(5), *range(4), *range(3)]), (rows, 1))
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, 1),
        "weights": weight,
        "segments": segments,
        "positions": at,
    }


def expected_load(family: str, cfg: Model, batch: dict[str, np.ndarray]) -> tuple[float, float]:
    """The balance and the share of the busiest expert, from what reaches the routers of each layer."""
    assert cfg.experts is not None
    counted, seen = batch["segments"].reshape(-1) > 0, list[jax.Array]()

    def probabilities(rows: jax.Array, router: jax.Array, *bias: jax.Array) -> jax.Array:
        seen.append(jax.nn.softmax(sum(bias, rows @ router)))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_probabilities", probabilities)
        eager = cfg.model_copy(update={"scan_layers": False, "remat": "none"})
        decoder.forward(params_of(family), eager, *(batch[name] for name in ("tokens", "positions", "segments")))
    found = []
    for of_layer in seen:
        of_tokens = np.asarray(of_layer)[counted]
        chosen = np.argsort(-of_tokens, axis=-1)[:, : cfg.experts.per_token]
        uses = np.bincount(chosen.reshape(-1), minlength=cfg.experts.count) / len(of_tokens)
        balance = cfg.experts.count * (uses * of_tokens.mean(axis=0)).sum()
        found.append((balance, uses.max() / cfg.experts.per_token))
    assert len(found) == cfg.num_layers
    balance, busiest = np.mean(found, axis=0)
    return float(balance), float(busiest)


DEEP = [pytest.mark.deep, pytest.mark.wide]
OPTIMIZED = [("muon", FAMILY), *((name, family) for name in ("adafactor", "muon") for family in ("gpt_oss", SHARED))]
BATCH = ("data", "fsdp", "expert")
MESHES = [(1, 1, 1), (4, 1, 1), (1, 2, 2), (1, 2, 1, 2), *wide((2, 2, 1), (1, 4, 1), (2, 1, 1, 2), (1, 1, 2, 2))]


@pytest.mark.parametrize("family", [FAMILY, *wide("gpt_oss", "gemma4_moe", SHARED)])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("how", [{"scan_layers": True, "remat": "products"}, {"scan_layers": False, "remat": "full"}])
def test_the_loss_of_the_routers_and_its_gradient_are_the_same_on_any_mesh(family, sizes, how):
    """Transformers adds the shares of all layers up before it multiplies; here each layer has a loss."""
    cfg, batch = described(family, router_aux_loss_coef=0.5, logit_chunk=7, **how), batch_of(4)
    balance, busiest = expected_load(family, cfg, batch)

    def gradient(*sizes: int) -> Any:
        mesh = make_mesh(*sizes)
        placed = jax.device_put(params_of(family), weights.param_shardings(cfg, mesh))
        with jax.set_mesh(mesh):
            mean = train_step.mean_gradient(train_step.without_carry(lm.loss(cfg)), cfg, mesh)
            rows = jax.device_put(batch, jax.NamedSharding(mesh, jax.P(BATCH)))
            return jax.jit(mean)(placed, rows, None)[:2]

    gradients, metrics = gradient(*sizes)
    assert float(metrics["router_aux_loss"]) == pytest.approx(balance, rel=1e-5)
    assert float(metrics["busiest_expert"]) == pytest.approx(busiest, rel=1e-6)
    assert float(metrics["loss"]) == pytest.approx(float(metrics["lm_loss"]) + 0.5 * balance, rel=1e-5)
    wanted = gradient(1, 1, 1)[0]
    norm = np.sqrt(sum(np.vdot(g, g) for g in jax.tree.leaves(wanted)))
    for (path, found), one in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, one, rtol=0, atol=2e-6 * norm, err_msg=str(path))
    assert np.abs(wanted["layers"]["router"]).max() > 1e-3


def test_without_a_coefficient_the_load_is_told_and_the_loss_is_that_of_the_text():
    cfg, batch = described(FAMILY), batch_of(2)
    found = jax.jit(lm.loss(cfg))(params_of(FAMILY), batch)
    assert set(found) == {"loss", "router_aux_loss", "busiest_expert"}
    dense = jax.eval_shape(lm.loss(described("qwen3")), params_of("qwen3"), batch)
    assert set(dense) == {"loss"}


def test_bfloat16_activations_stay_close():
    cfg, expected = described(FAMILY, activation_dtype="bfloat16"), expected_of(FAMILY)
    tokens = expected["tokens"]
    at = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    hidden = jax.jit(decoder.forward, static_argnums=1)(params_of(FAMILY), cfg, tokens, at)
    assert hidden.dtype == jnp.bfloat16
    logits = decoder.unembed(params_of(FAMILY), cfg, hidden)
    assert np.median(np.abs(np.asarray(logits) - expected["logits"])) < 0.05


@pytest.mark.parametrize("family", [FAMILY, *wide("gemma4_moe", SHARED)])
def test_a_sampler_that_splits_experts_gives_the_same_replies(family):
    """Over two devices, in prompts that do not fill the batch axes; the copy keeps the routers in float32."""
    expected, cfg = expected_of(family), described(family, remat="none")
    prompts = [
        row[:length].tolist() for row, length in zip(expected["prompts"], expected["prompt_lengths"], strict=True)
    ]
    settings = SamplerSettings(14, 15, slots=4, chunk=4, dtype="float32", mesh=Mesh(data=2, fsdp=1, tensor=2))
    sampler = Sampler(cfg, settings, make_mesh(1, 2, 2), StopCriteria(()))
    copy = sampler.load_params(params_of(family))
    found = {drawn.row: drawn.tokens for drawn in sampler.generate(copy, prompts, 1, jax.random.key(0), 0.0)}
    np.testing.assert_array_equal([found[row] for row in range(len(prompts))], expected["generated"])
    low = Sampler(cfg, replace(settings, dtype="bfloat16"), make_mesh(1, 2, 2), StopCriteria(()))
    layer = low.load_params(params_of(family))["layers"][0]
    assert (layer["router"].dtype, layer["expert_up"].dtype) == (jnp.float32, jnp.bfloat16)


def packed_folder(folder: Path, family: str = FAMILY) -> Path:
    """The fixture as `save_pretrained(save_original_format=False)` of transformers 5.24 writes it."""
    source = epath.Path(hf_files.__file__).parent.parent.parent / "tests/trainer/fixtures" / family
    folder.mkdir()
    tensors = {name: array for name, array in hf_files.iter_tensors(source) if ".experts." not in name}
    layers = params_of(family)["layers"]
    for i in range(2):
        prefix = f"model.layers.{i}.mlp.experts."
        gate, up, down = (np.asarray(layers[f"expert_{name}"][i]).swapaxes(1, 2) for name in ("gate", "up", "down"))
        tensors |= {f"{prefix}gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}down_proj": down}
    hf_files.write_safetensors(epath.Path(folder / hf_files.SINGLE_FILE), tensors)
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


@pytest.mark.parametrize("family", [FAMILY, SHARED])
def test_packed_experts_are_read_as_the_same(tmp_path, family):
    found = hf_files.read_params(epath.Path(packed_folder(tmp_path / "packed", family)), described(family))
    jax.tree.map(np.testing.assert_array_equal, found, params_of(family))


def test_a_folder_with_both_layouts_or_a_part_of_one_is_refused(tmp_path):
    folder = epath.Path(packed_folder(tmp_path / "packed"))
    tensors = dict(hf_files.iter_tensors(folder))
    one = {"model.layers.1.mlp.experts.3.up_proj.weight": np.zeros((12, 16), np.float32)}
    hf_files.write_safetensors(folder / hf_files.SINGLE_FILE, tensors | one)
    with pytest.raises(hf_files.PretrainedError, match="has experts both separate and packed; remove one of the two"):
        hf_files.read_params(folder, described(FAMILY))
    fewer = {name: array for name, array in tensors.items() if name != "model.layers.1.mlp.experts.down_proj"}
    hf_files.write_safetensors(folder / hf_files.SINGLE_FILE, fewer)
    with pytest.raises(
        hf_files.PretrainedError, match=r"1 tensors are missing, such as layers\.1\.mlp\.experts\.down_"
    ):
        hf_files.read_params(folder, described(FAMILY))
    none = {name: array for name, array in tensors.items() if ".experts." not in name}
    hf_files.write_safetensors(folder / hf_files.SINGLE_FILE, none)
    with pytest.raises(hf_files.PretrainedError, match=r"48 tensors are missing, such as layers\.0\.mlp\.experts\.0"):
        hf_files.read_params(folder, described(FAMILY))


def test_muon_orthogonalizes_each_expert():
    cfg = described(FAMILY)
    opt = TypeAdapter(Optimizer).validate_python(load_group("optimizer/muon") | {"orthogonalization_dtype": "float32"})
    assert isinstance(opt, Muon)
    view = matrix_views(cfg)["layers.expert_gate"]
    assert view.shape == (2 * 8, 16, 12)
    rules = update_rules(opt, cfg)
    assert {rules[f"layers.{name}"].direction for name in ("router", *experts.MATRICES)} == {"muon"}
    x = jax.random.normal(jax.random.key(0), weight_table(cfg)["layers"]["expert_gate"].shape)
    found, _ = muon._direction(x, None, view, opt)
    for at in np.ndindex(2, 8):
        alone = muon.orthogonalize(
            x[at][None], opt.orthogonalization, opt.orthogonalization_steps, jnp.dtype("float32")
        )
        np.testing.assert_allclose(found[at], alone[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "family"), [("adafactor", FAMILY), *(pytest.param(*each, marks=DEEP) for each in OPTIMIZED)]
)
def test_an_optimizer_of_matrices_takes_the_same_steps_on_a_mesh(name, family):
    """Adafactor and Muon see each expert as a matrix of its own."""
    cfg, batch = described(family, router_aux_loss_coef=0.1, logit_chunk=7), batch_of(4)
    own = {"orthogonalization_dtype": "float32"} if name == "muon" else {"b1": 0.9}
    opt = TypeAdapter(Optimizer).validate_python(load_group(f"optimizer/{name}") | {"lr": 0.01} | own)

    def stepped(*sizes: int) -> train_step.State:
        mesh = make_mesh(*sizes)
        with jax.set_mesh(mesh):
            state = train_step.init_state(cfg, opt, mesh, jax.random.key(0))
            rows = jax.device_put(batch, jax.NamedSharding(mesh, jax.P(BATCH)))
            return train_step.build_update(lm.loss(cfg), cfg, opt, mesh)(state, rows)[0]

    one, many = stepped(1, 1, 1), stepped(1, 2, 2)
    for path, found in jax.tree.leaves_with_path(many.params):
        start = weights.init_params(cfg, jax.random.key(0))
        wanted = one.params
        for key in path:
            start, wanted = start[key.key], wanted[key.key]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5, err_msg=str(path))
        assert not np.array_equal(found, start)


def test_a_token_is_counted_with_the_weights_that_it_takes():
    """Of Qwen3-30B-A3B, 3.35 G with the output layer and the embedding's row; plan estimates the same."""
    cfg = Model(**load_group("model/qwen3_30b_a3b"))
    assert weights.num_params(cfg) == 30_532_122_624
    active = model_flops(cfg, 1, 1) / 6 - 2 * cfg.num_heads * cfg.head_dim * cfg.num_layers
    attention = 2 * 2048 * 128 * (32 + 4)
    assert active == 48 * (attention + 2048 * 128 + 8 * 3 * 2048 * 768) + 151936 * 2048
    assert token_flops(cfg, 1) == pytest.approx(model_flops(cfg, 1, 1))
    assert matrix_weights(cfg) == 48 * (attention + 2048 * 128 + 128 * 3 * 2048 * 768)


def test_a_token_is_counted_with_the_block_beside_its_experts():
    """Of Gemma 4 26B-A4B, whose card says 3.8 G; global layers have no values of their own."""
    cfg = Model(**load_group("model/gemma4_26b_a4b"))
    attention = 2816 * (25 * 256 * 2 * (16 + 8) + 5 * 512 * (2 * 16 + 2))
    beside, each = 30 * 2816 * (128 + 3 * 2112), 30 * 3 * 2816 * 704
    active = attention + beside + 8 * each + 262144 * 2816
    assert active == 3_821_830_144
    assert model_flops(cfg, 1, 1) / 6 - 2 * 16 * (25 * 256 + 5 * 512) == active
    assert token_flops(cfg, 1) == pytest.approx(model_flops(cfg, 1, 1))
    assert matrix_weights(cfg) == attention + beside + 128 * each


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"remat": "chunks"}, "remat chunks is not supported with experts; use full"),
        ({"mlp": "gelu"}, "experts: mlp gelu is not supported, only swiglu, geglu, clamped_swiglu"),
        ({"experts": None, "router_aux_loss_coef": 0.1}, "router_aux_loss_coef is of experts, and the model has none"),
        (
            {"experts": {"count": 4, "per_token": 5, "norm_topk_prob": True}},
            r"per_token \(5\) must be at most count \(4\)",
        ),
        ({"implementation": "models:own"}, "experts: implementation models:own is not supported"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp needs a block beside the experts"),
    ],
)
def test_what_experts_do_not_go_with_is_named(changes, words):
    with pytest.raises(ValidationError, match=words):
        Model(**described(FAMILY).model_dump() | changes)


def test_what_has_no_adapter_or_no_such_loss_is_named(grpo_run):
    raw = described(FAMILY).model_dump() | {"router_aux_loss_coef": 0.1, "vocab_size": 260}
    raw |= {"lora": Lora(r=1, lora_alpha=1, target_modules=("layers.router", "layers.expert_up")).model_dump()}
    run = RunFile.model_validate(grpo_run | {"model": raw})
    assert isinstance(run.loop, GrpoLoop)
    found = dict(refusals(run, 0, "cpu"))
    assert found["model.router_aux_loss_coef"] == "loop.kind=grpo does not add this loss, only lm; use 0"
    choices = ", ".join(f"layers.{name}" for name in ("query", "key", "value", "output", *experts.MATRICES))
    assert f"matches no matrix; choices: {choices}" in found["model.lora.target_modules.0"]
    cfg = described(FAMILY, remat="auto")
    auto = run.model_copy(update={"model": cfg})
    assert [each.decoder.remat for each in remat_candidates(auto)] == [
        "none",
        "products",
        "outputs",
        "attention",
        "full",
    ]


def test_other_families_are_not_exported_with_experts():
    cfg = described("llama3", experts={"count": 4, "per_token": 2, "norm_topk_prob": True})
    kept = {"count": 8, "per_token": 3}
    undivided = [described("gpt_oss", experts=kept | {"norm_topk_prob": False})]
    undivided += [described("gemma4_moe", experts=kept | {"norm_topk_prob": False, "inner_dim": 8})]
    alone = described("gemma4", experts=kept | {"norm_topk_prob": True})
    shared = kept | {"norm_topk_prob": True, "shared_dim": 20}
    others = [described(family, experts=shared) for family in (FAMILY, "gpt_oss")]
    others += [described(SHARED, experts=shared | own) for own in ({"shared_dim": 0}, {"norm_topk_prob": False})]
    assert hf_families.family_of(described(SHARED, experts=shared)) == SHARED
    for model in (cfg, alone, *undivided, *others):
        with pytest.raises(hf_families.UnknownArchitectureError, match="transformers has no architecture"):
            hf_families.hf_config(model)


def test_a_bias_of_experts_has_a_gradient_in_float32():
    """1,000 rows of 1 in bfloat16, which cannot count beyond 256."""
    of_row = jnp.arange(1000) % 2
    x, bias = jnp.ones((1000, 3), jnp.bfloat16), jnp.zeros((4, 3))
    gradient = jax.grad(lambda bias: experts._plus_bias(x, bias, of_row).astype(jnp.float32).sum())(bias)
    np.testing.assert_array_equal(gradient, np.float32([[500] * 3, [500] * 3, [0] * 3, [0] * 3]))
