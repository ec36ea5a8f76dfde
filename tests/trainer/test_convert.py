"""Weights in and out: through our folder and back they are the same, and what is broken is named in one line."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from etils import epath

from conf.formats import RunFileError
from conf.schema.training.model import Model, family_switches
from tests.trainer.conftest import make_mesh
from tests.trainer.models.reference_models import DERIVED, FAMILIES
from trainer import convert
from trainer.models import decoder, weights
from trainer.pretrained import hf_families, hf_files, store

FIXTURES = Path(__file__).with_name("fixtures")


def run(*arguments: object) -> int:
    return convert.main([str(a) for a in arguments])


@pytest.fixture(scope="module", params=[*FAMILIES, *DERIVED])
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A family and our folder with its weights."""
    folder = tmp_path_factory.mktemp("imported") / request.param
    assert run("import", FIXTURES / request.param, folder) == 0
    return request.param, folder


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return dict(hf_files.iter_tensors(epath.Path(folder)))


@pytest.mark.parametrize("shard_bytes", [2 << 30, 12_000], ids=["one-file", "shards"])
def test_export_writes_what_was_imported(imported, tmp_path, monkeypatch, shard_bytes):
    """fixtures/make_models.py has shown that transformers loads this config.json with these tensors."""
    family, folder = imported
    monkeypatch.setattr(hf_files, "SHARD_BYTES", shard_bytes)
    assert run("export", folder, tmp_path / "out") == 0
    assert (tmp_path / "out" / hf_files.INDEX_FILE).exists() == (shard_bytes < 2 << 30)
    before, after = tensors_of(FIXTURES / family), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name])
    exported = (FIXTURES / family / "exported_config.json").read_text()
    assert (tmp_path / "out/config.json").read_text() == exported
    theirs, ours = (hf_files.read_config(epath.Path(f)) for f in (FIXTURES / family, tmp_path / "out"))
    assert hf_families.model_from_config(theirs) == hf_families.model_from_config(ours)


def test_weights_are_placed_on_a_mesh(imported):
    """From our folder and from Hugging Face's, which is read as it is; of two families the model computes the same."""
    family, folder = imported
    cfg = store.read_model(epath.Path(folder)).model_copy(update={"activation_dtype": "float32"})
    mesh = make_mesh(1, 1, 2) if cfg.vocab_size % 2 == 0 else make_mesh(1, 2, 1)
    placed, theirs = (store.load_sharded(epath.Path(f), cfg, mesh) for f in (folder, FIXTURES / family))
    jax.tree.map(np.testing.assert_array_equal, placed, theirs)
    for found in (placed, theirs):
        assert jax.tree.map(lambda x: x.sharding, found) == weights.param_shardings(cfg, mesh)
    if family not in ("gemma2", "gpt2"):
        return
    with np.load(FIXTURES / family / "expected.npz") as expected:
        tokens = jnp.array(expected["tokens"])
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        with jax.set_mesh(mesh):
            hidden = jax.jit(decoder.forward, static_argnums=1)(placed, cfg, tokens, positions)
            logits = decoder.unembed(placed, cfg, hidden)
        np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)


def test_a_folder_that_holds_a_model_is_not_overwritten_nor_read_as_another(imported, capsys):
    family, folder = imported
    assert run("import", FIXTURES / family, folder) == 2
    assert "already contains a model" in capsys.readouterr().err
    cfg: Model = store.read_model(epath.Path(folder))
    with pytest.raises(store.StoreError, match=r"model\.mlp_dim: is 49, but \d+ in the weights of"):
        store.read_params(epath.Path(folder), cfg.model_copy(update={"mlp_dim": 49}))


def test_low_precision_is_kept_in_the_folder_and_widened_on_the_mesh(tmp_path, tiny):
    wide = jax.tree.map(np.asarray, weights.init_params(tiny, jax.random.key(0)))
    store.write_params(epath.Path(tmp_path / "low"), jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide), tiny)
    placed = store.load_sharded(epath.Path(tmp_path / "low"), tiny, make_mesh(1, 2, 1))
    for found, wanted in zip(jax.tree.leaves(placed), jax.tree.leaves(wide), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, wanted, rtol=2**-8)


def copy_of(family: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / family, tmp_path / family))


Spoil = Callable[[Path], object]
SHARD = "model-00002-of-00003.safetensors"


def config(**changes: object) -> Spoil:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def without(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def written(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text(text)


def truncate(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-100])


MAMBA = "model_type 'mamba' is not one of gemma2, gemma3_text, gemma3, llama"


NOT_SUPPORTED = " is not supported: "


@pytest.mark.parametrize(
    "case",
    [
        (without(SHARD), f"{SHARD}: the shard is", "the shard is missing; download the model again"),
        (truncate, f"{SHARD}: is damaged or incomplete", "is damaged or incomplete"),
        (config(model_type="mamba"), MAMBA, MAMBA),
        (config(intermediate_size=49), "does not match config.json", "model.mlp_dim: is 48, but 49 in the weights of"),
        (
            without("config.json"),
            "is not a Hugging Face model: it has no config.json",
            "it has neither config.json nor model.yaml, and is no checkpoint of a run",
        ),
        (config(hidden_size=40), "the shape (97, 32) does not match config.json"),
        (config(num_hidden_layers=4), "9 tensors are missing, such as layers.3."),
        (config(hidden_act="gelu"), "hidden_act: 'gelu' is not supported: the decoder's gate"),
        (config(num_key_value_heads=3), "num_heads (4) must be a multiple of num_kv_heads (3)"),
        (config(rms_norm_eps="tiny"), "config.json: rms_norm_eps: 'tiny' is not supported: a number is required"),
        (written("config.json", '{"model_type": "llama"}'), "does not match config.json"),
        (written("config.json", "[1]"), "config.json: not a model's config: it is no mapping"),
        (config(num_hidden_layers=2), "is of no part of the model that config.json describes"),
        (written(hf_files.INDEX_FILE, "[]"), "model.safetensors.index.json: not an index of shards"),
        (without(hf_files.INDEX_FILE), "has neither model.safetensors nor model.safetensors.index"),
        (written("config.json", "{"), "config.json: not valid JSON"),
        (config(quantization_config={"quant_method": "fp8"}), NOT_SUPPORTED),
        (config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}), NOT_SUPPORTED),
        (config(use_bidirectional_attention=True), NOT_SUPPORTED, None, "gemma3"),
        (config(use_mrope=True), NOT_SUPPORTED, None, "qwen2"),
        (config(tie_word_embeddings=False), NOT_SUPPORTED, None, "gpt2"),
    ],
)
def test_what_is_broken_is_named_in_one_line_by_an_import_and_by_a_run(tmp_path, capsys, case):
    """How it is broken, the import's words, a run's words where it is asked, and another family than llama3."""
    spoil, words, run_words, family = case + (None, "llama3")[len(case) - 2 :]
    folder = copy_of(family, tmp_path)
    cfg = store.read_model(epath.Path(folder))
    spoil(folder)
    assert run("import", folder, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    if run_words:  # an error of its run file, model.weights
        with pytest.raises(RunFileError) as raised:
            store.load_sharded(epath.Path(folder), cfg, make_mesh(1, 2, 1))
        assert run_words in str(raised.value)
        assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("family", "switches"),
    [
        ("llama3", {"qk_norm": "after_rotation"}),
        ("llama3", {"final_logit_softcap": 30.0}),
        ("qwen3", {"query_pre_attn_scalar": 99.0}),
        ("gemma2", {"rope_local_theta": 100.0}),
        ("gpt2", {"tie_word_embeddings": False}),
        ("nanochat", {}),
        ("llama3", {"residual": "mhc"}),
        ("llama3", {"attention_form": "maha"}),
    ],
)
def test_what_transformers_cannot_be_told_is_not_exported(tmp_path, capsys, family, switches):
    sizes = {"num_layers": 1, "dim": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4}
    sizes |= {"mlp_dim": 8, "vocab_size": 16}
    cfg = Model(**family_switches(family) | sizes | switches)
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    assert run("export", tmp_path, tmp_path / "out") == 2
    said = capsys.readouterr().err
    why = "model: transformers has no architecture with these settings"
    for key in switches.keys() & {"residual", "attention_form"}:
        why = f"model.{key}: no published layout of weights has {switches[key]}, only "
    assert said.startswith(why)
    assert "; `--format slipway` exports" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Hugging Face's folder of a model of 11 MB in ten shards, and the bytes of its weights."""
    config = hf_files.read_config(epath.Path(FIXTURES / "qwen3"))
    cfg = hf_families.model_from_config(config).model_copy(
        update={"dim": 256, "mlp_dim": 1024, "vocab_size": 512, "tie_word_embeddings": True}
    )
    params = jax.tree.map(lambda w: np.full(w.shape, 0.01, np.float32), weights.weight_table(cfg))
    folder = tmp_path_factory.mktemp("large")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_files, "SHARD_BYTES", 2_000_000)
        hf_files.write_params(epath.Path(folder), params, cfg, hf_families.hf_config(cfg))
    assert len(list(folder.glob("model-*.safetensors"))) == 10
    return folder, 4 * weights.num_params(cfg)


def peak_of(act: Callable[[], object]) -> int:
    """Bytes that Python and NumPy held at most during an act, beside what they held before."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_neither_import_nor_reading_into_devices_holds_the_model_twice(large, tmp_path):
    """What it holds is the result, and of each shard a tensor at a time."""
    folder, size = large
    assert run("import", folder, tmp_path / "first") == 0  # imports of modules are no matter of the model's size
    peak = peak_of(lambda: run("import", folder, tmp_path / "in"))
    assert size < peak < 1.4 * size
    cfg, devices = store.read_model(epath.Path(folder)), make_mesh(1, 2, 1)
    store.load_sharded(epath.Path(folder), cfg, devices)
    peak = peak_of(lambda: store.load_sharded(epath.Path(folder), cfg, devices))
    assert size < peak < 1.4 * size
