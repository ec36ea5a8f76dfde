"""LoRA: adapters of PEFT's, frozen weights, meshes, averages, resuming and exports."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from pydantic import ValidationError
from safetensors.numpy import load_file

from conf.formats import RunFileError
from conf.schema.training.model import Lora, Model
from conf.schema.training.optimizer import Adamw
from tests.conftest import wide
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from tests.trainer.lives import train
from tests.trainer.models.reference_models import DERIVED, FIXTURES, described, expected_of, params_of
from tests.trainer.models.test_experts import BATCH, batch_of
from trainer.losses import grpo, lm
from trainer.models import decoder, experts, weights
from trainer.policy.export import export_weights
from trainer.pretrained import hf_families, hf_files, peft_files, run_weights, store
from trainer.step import train_step

TARGETS = {"gemma2": ("layers.query", "layers.value", "layers.down"), "llama3": ("layers.*", "unembedding")}
MATRICES = {"gemma4": 10, "gemma4_e2b": 14, "gemma4_moe": 16, "qwen3_5": 13, "qwen3_5_yarn": 13, "qwen3_5_moe": 16}
"""Those that `layers.*` adapts, where they are not the usual seven."""
EXPERTS = Lora(r=2, lora_alpha=3, target_modules=("layers.query", "layers.expert_*"), base_dtype="float32")
LORA = {
    "gemma2": Lora(r=4, lora_alpha=8, target_modules=TARGETS["gemma2"], base_dtype="float32"),
    "llama3": Lora(r=3, lora_alpha=6, use_rslora=True, target_modules=TARGETS["llama3"], base_dtype="float32"),
    "qwen3_moe": EXPERTS,
    "gpt_oss": EXPERTS,
}


def adapted(family: str, **changes: Any) -> Model:
    lora = LORA[family].model_copy(update={"adapter": str(FIXTURES / f"lora_{family}")} | changes)
    found = store.read_model(epath.Path(FIXTURES / family))
    return found.model_copy(update={"activation_dtype": "float32", "lora": lora})


def load(family: str, cfg: Model) -> weights.Params:
    return store.load_sharded(epath.Path(FIXTURES / family), cfg, make_mesh(1, 1, 1))


def logits(params: weights.Params, cfg: Model, family: str) -> np.ndarray:
    tokens = expected_of(family)["tokens"]

    @jax.jit
    def compute(params: weights.Params) -> jax.Array:
        hidden = decoder.forward(params, cfg, tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
        return decoder.unembed(params, cfg, hidden)

    return np.asarray(compute(params))


def bare(cfg: Model) -> Model:
    return cfg.model_copy(update={"lora": None})


@pytest.mark.parametrize("family", LORA)
def test_an_adapter_of_peft_computes_what_peft_computes_merged_or_not_and_is_written_as_by_peft(
    family: str, tmp_path: Path
) -> None:
    cfg, made = adapted(family), FIXTURES / f"lora_{family}"
    params = load(family, cfg)
    expected = np.load(made / "expected.npz")["logits"]
    assert np.abs(expected - expected_of(family)["logits"]).max() > 0.05
    found = logits(params, cfg, family)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    merged = jax.tree.map(np.asarray, store.merged(params, cfg))
    assert jax.tree.structure(merged) == jax.tree.structure(weights.weight_table(bare(cfg)))
    np.testing.assert_allclose(logits(merged, bare(cfg), family), found, atol=1e-5)

    peft_files.write_adapter(epath.Path(tmp_path), params, cfg)
    ours, theirs = (load_file(folder / peft_files.WEIGHTS_FILE) for folder in (tmp_path, made))
    theirs.pop("base_model.model.lm_head.base_layer.weight", None)  # PEFT may save it, and does not need it
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    written, known = (json.loads((folder / peft_files.CONFIG_FILE).read_text()) for folder in (tmp_path, made))
    named = {name: known[name] and sorted(known[name]) for name in ("target_modules", "target_parameters")}
    known |= named | {"base_model_name_or_path": cfg.weights}
    assert known | written == known


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 5}, r"model\.lora: r is 4 in .*, not 5"),
        ({"lora_alpha": 9.0}, r"model\.lora\.lora_alpha: adapters of .* are multiplied by 2, not 2\.25"),
        ({"target_modules": ("layers.query",)}, r"the tensor .* is of no matrix of model\.lora\.target_modules"),
        ({"target_modules": ("layers.*",)}, r"\d+ tensors are missing, such as base_model\.model\."),
        ({"target_modules": ("unembedding",)}, r"target_modules\.0: 'unembedding' matches no matrix; choices: layers"),
        ({"use_dora": True}, "uses use_dora, which Slipway's adapters do not have"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA' in .*, not 'LORA'"),
        ({"rank_pattern": {"q_proj": 2}}, "uses rank_pattern"),
        ({"alora_invocation_tokens": [3, 4]}, "uses alora_invocation_tokens"),
        ({"kasa_config": {"beta": 1e-4}}, "uses kasa_config"),
        ({"of_a_later_peft": True}, "uses of_a_later_peft"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "has init_lora_weights 'pissa_niter_4', which may have changed the base",
        ),
        ({"init_lora_weights": "olora"}, "has init_lora_weights 'olora'"),
        (None, "has no valid adapter_config.json of PEFT"),
    ],
)
def test_an_adapter_of_another_model_or_kind_is_refused(changes: Any, message: str, tmp_path: Path) -> None:
    """Changes are of the config, or of PEFT's file."""
    shutil.copytree(FIXTURES / "lora_gemma2", tmp_path / "a")
    file = tmp_path / "a" / peft_files.CONFIG_FILE
    of_config = changes if changes is not None and changes.keys() <= Lora.model_fields.keys() else {}
    if not of_config:
        file.write_text("[]" if changes is None else json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(RunFileError, match=message):
        load("gemma2", adapted("gemma2", adapter=str(tmp_path / "a"), **of_config))


def test_frozen_weights_have_no_moments_no_average_and_their_own_dtype(tiny: Model, adamw: Adamw) -> None:
    lora = Lora(r=2, lora_alpha=4, target_modules=("layers.query", "layers.down"))
    with pytest.raises(ValidationError, match="lora: only attention_form causal"):
        Model(**load_group("model/tiny") | {"implementation": "a:b", "lora": lora.model_dump()})
    cfg, opt = tiny.model_copy(update={"lora": lora}), adamw.model_copy(update={"ema_decay": 0.9})
    mesh = make_mesh(2, 1, 1)
    state = train_step.abstract_state(cfg, opt, mesh)
    names = {"query_lora_a", "query_lora_b", "down_lora_a", "down_lora_b"}
    assert state.average.keys() == {"layers"}
    assert state.average["layers"].keys() == names
    sizes = sorted(leaf.shape for leaf in jax.tree.leaves(state.optimizer) if leaf.shape)
    assert sizes == sorted([state.params["layers"][name].shape for name in names] * 2)
    assert state.params["embedding"].dtype == jnp.bfloat16
    assert {state.params["layers"][name].dtype for name in names} == {jnp.dtype("float32")}


def randomly_adapted(family: str, **lora: Any) -> tuple[Model, weights.Params]:
    """A family's model and weights with random adapters of rank 2."""
    how = {"r": 2, "lora_alpha": 3.0, "target_modules": ("layers.*",), "base_dtype": "float32"} | lora
    cfg = described(family, scan_layers=False, remat="none", lora=Lora(**how))
    table, random = weights.weight_table(cfg)["layers"], np.random.default_rng(0)
    new = {name: random.normal(0, 0.3, w.shape).astype(np.float32) for name, w in table.items() if "_lora_" in name}
    base = jax.tree.map(np.asarray, params_of(family))
    return cfg, base | {"layers": base["layers"] | new}


def test_adapters_of_all_experts_in_one_are_read_as_peft_computes_them(tmp_path: Path) -> None:
    """As transformers 5 has them: one A serves gate and up. They are written one by one, as transformers 4 has them."""
    made = FIXTURES / "lora_qwen3_moe_packed"
    cfg = adapted("qwen3_moe", adapter=str(made))
    params = load("qwen3_moe", cfg)
    np.testing.assert_allclose(logits(params, cfg, "qwen3_moe"), np.load(made / "expected.npz")["logits"], atol=1e-5)
    peft_files.write_adapter(epath.Path(tmp_path), params, cfg)
    again = peft_files.read_adapter(epath.Path(tmp_path), cfg)["layers"]
    jax.tree.map(np.testing.assert_array_equal, again, {name: params["layers"][name] for name in again})
    # as PEFT saves it once it has joined the experts of such files
    config = json.loads((tmp_path / peft_files.CONFIG_FILE).read_text())
    config |= {key: {r".*\.gate_up_proj": n} for key, n in {"rank_pattern": 4, "alpha_pattern": 6}.items()}
    (tmp_path / peft_files.CONFIG_FILE).write_text(json.dumps(config))
    modules = [*peft_files._adapters(cfg, is_packed=True)]
    parts = {a.module: peft_files._to_peft(params, a, EXPERTS) for a in modules}
    tensors = {
        f"{peft_files.PREFIX}{name}.lora_{x}.weight": p
        for name, ab in parts.items()
        for x, p in zip("AB", ab, strict=True)
    }
    file = epath.Path(tmp_path / peft_files.WEIGHTS_FILE)
    hf_files.write_safetensors(file, tensors)
    joined = peft_files.read_adapter(epath.Path(tmp_path), cfg)["layers"]
    jax.tree.map(np.testing.assert_array_equal, joined, again)
    mixed = {name: value + (".base_layer.lora_B" in name) for name, value in tensors.items()}
    hf_files.write_safetensors(file, mixed)
    with pytest.raises(RunFileError, match=r"experts\.base_layer\.lora_B: it also adapts what .*, or mixes"):
        peft_files.read_adapter(epath.Path(tmp_path), cfg)
    fewer = {name: value for name, value in tensors.items() if not name.endswith("1.mlp.experts.lora_A.weight")}
    hf_files.write_safetensors(file, fewer)
    with pytest.raises(RunFileError, match=r"1 tensors are missing, such as base_model\..*1\.mlp\.experts\.lora_A"):
        peft_files.read_adapter(epath.Path(tmp_path), cfg)


def exported(folder: Path, params: weights.Params, cfg: Model) -> dict[str, np.ndarray]:
    """Return the tensors of Hugging Face's file of merged weights."""
    hf_files.write_params(epath.Path(folder), params, bare(cfg), hf_families.hf_config(bare(cfg)))
    return load_file(folder / hf_files.SINGLE_FILE)


def packed(tensors: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Those of experts as transformers 5 computes with them."""
    found = {name: value for name, value in tensors.items() if ".experts." not in name}
    for at in sorted({name.partition(".experts.")[0] for name in tensors.keys() - found.keys()}):
        names = ([f"{at}.experts.{j}.{part}_proj.weight" for j in range(count)] for part in ("gate", "up", "down"))
        gate, up, down = (np.stack([tensors[name] for name in own]) for own in names)
        found |= {f"{at}.experts.gate_up_proj": np.concatenate([gate, up], axis=1), f"{at}.experts.down_proj": down}
    return found


@pytest.mark.parametrize("family", DERIVED)
@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_a_newer_family_are_peft_s_product_beside_its_own_matrices(
    family: str, rslora: bool, tmp_path: Path
) -> None:
    """Phi's are fused: PEFT computes x W + scale (x A) B of qkv_proj and gate_up_proj, of ranks of their own."""
    cfg, params = randomly_adapted(family, use_rslora=rslora)
    before = exported(tmp_path / "base", jax.tree.map(np.asarray, params_of(family)), cfg)
    after = exported(tmp_path / "merged", store.merged(params, cfg), cfg)
    peft_files.write_adapter(epath.Path(tmp_path), params, cfg)
    adapter = load_file(tmp_path / peft_files.WEIGHTS_FILE)
    if family == "qwen3_5_moe" and cfg.experts is not None:  # PEFT joins no modules of these
        before, after = (packed(tensors, cfg.experts.count) for tensors in (before, after))
    config = json.loads((tmp_path / peft_files.CONFIG_FILE).read_text())
    changed = {name.removesuffix(".weight"): name for name in before if not np.array_equal(before[name], after[name])}
    prefix, of_all = peft_files.PREFIX, {"experts.gate_up_proj": "experts.base_layer", "experts.down_proj": "experts"}
    modules = {name: re.sub(r"experts\.\w+_proj$", lambda found: of_all[found[0]], name) for name in changed}
    assert sorted(modules.values()) == sorted(
        name.removeprefix(prefix).removesuffix(".lora_A.weight") for name in adapter if ".lora_A" in name
    )
    for name, module in modules.items():
        old, new, short = before[changed[name]], after[changed[name]], name.split(".")[-1]
        a, b = (adapter[f"{prefix}{module}.lora_{part}.weight"] for part in "AB")
        rank = config.get("rank_pattern", {}).get(short, config["r"])
        alpha = config.get("alpha_pattern", {}).get(short, config["lora_alpha"])
        count = len(old) if old.ndim == 3 else 1
        assert a.shape[0] == rank * count == b.shape[1]
        scale = alpha / (rank**0.5 if config["use_rslora"] else rank)
        of_expert = np.einsum("ore,eri->eoi", b.reshape(len(b), rank, count), a.reshape(count, rank, -1))
        of_expert = of_expert.swapaxes(1, 2) if family == "gpt_oss" and old.ndim == 3 else of_expert
        change = scale * (of_expert if old.ndim == 3 else of_expert[0])
        np.testing.assert_allclose(new, old + change, rtol=0, atol=1e-5, err_msg=name)
    assert config["use_rslora"] == (rslora and family != "qwen3_moe")
    again = peft_files.read_adapter(epath.Path(tmp_path), cfg)
    jax.tree.map(np.testing.assert_array_equal, again["layers"], {k: params["layers"][k] for k in again["layers"]})
    assert again["layers"].keys() == {name for name in params["layers"] if "_lora_" in name}
    assert len(again["layers"]) == 2 * MATRICES.get(family, 7)


@pytest.mark.parametrize("family", ["phi3", *wide(*(name for name in DERIVED if name != "phi3"))])
def test_adapters_of_a_newer_family_learn_and_merge(family: str) -> None:
    """Each has a gradient, frozen weights are not asked for one, and the merged model computes the same."""
    cfg, params = randomly_adapted(family)
    trained = {name: value for name, value in params["layers"].items() if "_lora_" in name}
    tokens = expected_of(family)["tokens"]
    at = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)

    def loss(adapters: weights.Params, params: weights.Params, cfg: Model) -> tuple[jax.Array, jax.Array]:
        whole = params | {"layers": params["layers"] | adapters}
        found = decoder.unembed(whole, cfg, decoder.forward(whole, cfg, tokens, at))
        return -jax.nn.log_softmax(found[:, :-1]).mean(), found

    computed = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)
    (_, found), gradient = computed(trained, params, cfg)
    assert all(np.abs(g).max(axis=tuple(range(1, g.ndim))).all() for g in jax.tree.leaves(gradient))
    assert np.abs(found - expected_of(family)["logits"]).max() > 0.05
    merged = jax.tree.map(np.asarray, store.merged(params, cfg))
    # a DeltaNet normalizes what its heads read, which magnifies rounding
    atol = 2e-5 * (float(np.abs(found).max()) if family.startswith("qwen3_5") else 1)
    np.testing.assert_allclose(logits(merged, bare(cfg), family), found, rtol=0, atol=atol)


def test_a_fused_adapter_of_peft_s_own_is_read_as_one_of_each_part(tmp_path: Path) -> None:
    """Its A, of rank r, serves all parts. What target_modules leaves out must not be adapted."""
    cfg, params = randomly_adapted("phi3")
    peft_files.write_adapter(epath.Path(tmp_path), params, cfg)
    files, random = (tmp_path / peft_files.WEIGHTS_FILE, tmp_path / peft_files.CONFIG_FILE), np.random.default_rng(1)
    config = json.loads(files[1].read_text())
    files[1].write_text(json.dumps(config | {"rank_pattern": {}, "alpha_pattern": {}}))
    shared = {}
    for name, value in load_file(files[0]).items():
        rows, columns = value.shape
        shape = (2, columns) if ".lora_A" in name else (rows, 2)
        shared[name] = random.normal(0, 0.3, shape).astype(np.float32)
    hf_files.write_safetensors(epath.Path(files[0]), shared)
    read = peft_files.read_adapter(epath.Path(tmp_path), cfg)
    whole = params | {"layers": params["layers"] | read["layers"]}
    before = exported(tmp_path / "base", jax.tree.map(np.asarray, params_of("phi3")), cfg)
    after = exported(tmp_path / "merged", store.merged(whole, cfg), cfg)
    for module in ("model.layers.1.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"):
        a, b = (shared[f"{peft_files.PREFIX}{module}.lora_{part}.weight"] for part in "AB")
        change = after[f"{module}.weight"] - before[f"{module}.weight"]
        np.testing.assert_allclose(change, 1.5 * (b @ a), rtol=0, atol=1e-5)
    fewer = cfg.lora.model_copy(update={"target_modules": ("layers.[!k]*",)}) if cfg.lora else None
    with pytest.raises(
        RunFileError, match=r"qkv_proj\.lora_B: it also adapts what model\.lora\.target_modules leaves out"
    ):
        peft_files.read_adapter(epath.Path(tmp_path), cfg.model_copy(update={"lora": fewer}))


@pytest.mark.parametrize("sizes", [None, *wide((2, 2, 2))])
def test_an_update_changes_adapters_only_and_equally_on_a_mesh(tiny: Model, adamw: Adamw, sizes: Any) -> None:
    lora = Lora(r=2, lora_alpha=4, target_modules=("layers.*",), base_dtype="float32")
    cfg = tiny.model_copy(update={"lora": lora, "num_layers": 1})
    opt = adamw.model_copy(update={"ema_decay": 0.5, "lr": 0.01})
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (8, 12), dtype=np.int32)
    batch = {"tokens": tokens, "mask": np.ones((8, 11), np.float32)}

    def trained(*sizes: int) -> tuple[train_step.State, train_step.State]:
        mesh = make_mesh(*sizes)
        with jax.set_mesh(mesh):
            state = train_step.init_state(cfg, opt, mesh, jax.random.key(0))
            before = jax.device_get(state)
            update = train_step.build_update(grpo.supervised_loss(cfg), cfg, opt, mesh)
            for _ in range(2):
                state, _ = update(state, batch)
            return before, jax.device_get(state)

    before, state = trained(1, 1, 1)
    for (path, old), new in zip(jax.tree.leaves_with_path(before.params), jax.tree.leaves(state.params), strict=True):
        name = jax.tree_util.keystr(path)
        assert np.array_equal(old, new) == ("_lora_" not in name), name
    if sizes is not None:
        _, other = trained(*sizes)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), state.params, other.params)
    evaluated = train_step.eval_params(state)
    assert jax.tree.structure(evaluated) == jax.tree.structure(state.params)
    assert not np.array_equal(evaluated["layers"]["query_lora_b"], state.params["layers"]["query_lora_b"])


MESHES = [(1, 1, 1), (1, 2, 1, 2), *wide((4, 1, 1), (2, 2, 1), (1, 2, 2))]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_gradients_of_experts_adapters_are_those_of_merged_weights_on_any_mesh(family: str, sizes: Any) -> None:
    """With what balances the routers, which are frozen."""
    how = {"router_aux_loss_coef": 0.1, "logit_chunk": 7, "scan_layers": sizes == (1, 1, 1), "remat": "products"}
    cfg, params = randomly_adapted(family)
    cfg, batch, rank_scale = cfg.model_copy(update=how), batch_of(4), 1.5
    trained = weights.trained_part(params, cfg)
    assert sum(name.startswith("expert_") for name in trained["layers"]) == 6

    def merged(trained: weights.Params) -> jax.Array:
        own, base = trained["layers"], params_of(family)
        changed = {
            name: base["layers"][name] + rank_scale * own[f"{name}_lora_a"] @ own[f"{name}_lora_b"]
            for name in experts.MATRICES
        }
        for name in ("query", "key", "value", "output"):
            a, b = own[f"{name}_lora_a"].reshape(len(base["layers"][name]), -1, 2), own[f"{name}_lora_b"]
            b = b.reshape(len(b), 2, -1)
            changed[name] = base["layers"][name] + rank_scale * (a @ b).reshape(base["layers"][name].shape)
        found = lm.loss(bare(cfg))(base | {"layers": base["layers"] | changed}, batch)["loss"]
        return found.total / found.weight

    mesh = make_mesh(*sizes)
    placed = jax.device_put(params, weights.param_shardings(cfg, mesh))
    with jax.set_mesh(mesh):
        mean = train_step.mean_gradient(train_step.without_carry(lm.loss(cfg)), cfg, mesh)
        rows = jax.device_put(batch, jax.NamedSharding(mesh, jax.P(BATCH)))
        found, metrics, _ = jax.jit(mean)(placed, rows, None)
    loss, wanted = jax.jit(jax.value_and_grad(merged))(trained)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    norm = np.sqrt(sum(np.vdot(g, g) for g in jax.tree.leaves(wanted)))
    assert found["layers"].keys() == wanted["layers"].keys()
    for name, gradient in wanted["layers"].items():
        assert np.abs(gradient).max() > 1e-5, name
        np.testing.assert_allclose(found["layers"][name], gradient, rtol=0, atol=2e-6 * norm, err_msg=name)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_new_adapters_of_experts_change_no_bit(family: str) -> None:
    cfg = adapted(family)
    new = weights.init_params(cfg, jax.random.key(0))
    params = weights.overlay(new, params_of(family))
    assert np.abs(params["layers"]["expert_up_lora_a"]).max() > 0.1
    np.testing.assert_array_equal(logits(params, cfg, family), logits(params_of(family), bare(cfg), family))


@pytest.mark.deep
def test_the_merged_export_of_a_run_with_adapters_computes_the_same(lm_run: dict[str, Any], tmp_path: Path) -> None:
    lora = {"r": 2, "lora_alpha": 8, "target_modules": ["layers.*"], "base_dtype": "float32"}
    raw = lm_run | {"model": lm_run["model"] | {"lora": lora}}
    train(raw | {"optimizer": lm_run["optimizer"] | {"ema_decay": 0.5, "lr": 0.02}}, tmp_path / "a")
    folder = epath.Path(raw["dir"]) / "checkpoints" / "6"
    cfg = store.read_model(folder)
    params = jax.tree.map(np.asarray, run_weights.read_params(folder, cfg))
    assert np.abs(params["layers"]["down_lora_b"]).max() > 0.001
    export_weights(folder, epath.Path(tmp_path / "out"), "slipway")
    merged = store.load_sharded(epath.Path(tmp_path / "out"), bare(cfg), make_mesh(1, 1, 1))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 16), dtype=np.int32)
    at = jnp.broadcast_to(jnp.arange(16), tokens.shape)
    found = [decoder.forward(p, c, tokens, at) for p, c in ((params, cfg), (merged, bare(cfg)))]
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize("own", [{}, {"experts": {"count": 4, "per_token": 2, "norm_topk_prob": True}}], ids=len)
def test_grpo_with_adapters_holds_a_reference_of_adapters_alone(grpo_run: Any, own: Any, tmp_path: Path) -> None:
    lora = {"lora": {"r": 2, "lora_alpha": 8, "target_modules": ["layers.*"]}}
    raw = grpo_run | {"model": grpo_run["model"] | lora | own, "loop": grpo_run["loop"] | {"kl_coef": 0.1}}
    lines = train(raw, tmp_path)
    trained = [line for line in lines if line["phase"] == "grpo"]
    assert abs(trained[0]["kl"]) < 1e-4
    assert all(line["loss"] is not None for line in trained)
