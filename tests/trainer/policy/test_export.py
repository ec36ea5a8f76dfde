"""Weights of runs leave: bit for bit, and as transformers computes and words them."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from conf.formats import RunFileError
from tests.conftest import wide
from tests.fakes.chat_templates import OWN
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from tests.trainer.models.reference_models import FAMILIES, described, params_of
from tests.trainer.policy.conftest import MakeCheckpoint, as_raw, rewrite_run_file
from trainer import convert
from trainer.models import weights
from trainer.policy.policy import Policy, PolicyPrompts, Sampling, describe
from trainer.policy.run_files import byte_library
from trainer.pretrained import hf_files, run_weights, store

GREEDY = Sampling(12, 0.0)


def run(*arguments: object) -> int:
    return convert.main([str(a) for a in arguments])


def equal(first: Any, second: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, first), jax.tree.map(np.asarray, second))


def checkpoint_of(family: str, lm_run: dict[str, Any], make_checkpoint: MakeCheckpoint) -> Path:
    """Of a run whose weights are a fixture's, with a vocabulary of 97 characters."""
    cfg = described(family)
    Path(lm_run["data"]["path"]).write_text("".join(map(chr, range(32, 129))) * 40)
    raw = lm_run | {"model": as_raw(cfg), "data": lm_run["data"] | {"tokenizer": "characters"}}
    return make_checkpoint(raw, params_of(family), make_mesh(1, 2, 1, 2 if "moe" in family else 1))


# our own format knows no families
@pytest.mark.parametrize("family", ["gemma2", "gpt2", "qwen3_moe", *wide("gemma3", "llama3", "qwen2", "qwen3")])
def test_an_exported_checkpoint_has_the_same_bits(
    family: str, lm_run: dict[str, Any], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(family, lm_run, make_checkpoint)
    cfg, mesh = store.read_model(epath.Path(checkpoint)), make_mesh(1, 1, 1)
    for form in ("hf", "slipway") if family == "gpt2" else ("hf",):
        out = tmp_path / form
        assert run("export", checkpoint, out, "--format", form) == 0
        equal(store.read_params(epath.Path(out), cfg), store.read_params(epath.Path(checkpoint), cfg))
        equal(*(store.load_sharded(epath.Path(folder), cfg, mesh) for folder in (out, checkpoint)))
        assert describe(epath.Path(out)) == describe(epath.Path(checkpoint)), "it is computed as in the run"


def test_what_transformers_needs_of_a_policy(
    grpo_run: dict[str, Any], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint, out = make_checkpoint(grpo_run), tmp_path / "out"
    assert run("export", checkpoint, out, "--dtype", "bfloat16") == 0
    names = ("config", "generation_config", "tokenizer_config")
    config, generation, tokenizer = (json.loads((out / f"{name}.json").read_text()) for name in names)
    ids = {"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 256}
    assert config["dtype"] == "bfloat16"
    assert config | ids == config
    assert generation == ids | {"max_new_tokens": 12}
    assert [tokenizer[f"{kind}_token"] for kind in ("bos", "eos", "pad")] == ["<bos>", "<eos>", "<pad>"]
    assert {array.dtype.name for _, array in hf_files.iter_tensors(epath.Path(out))} == {"bfloat16"}
    assert (out / "run.yaml").is_file()


def test_a_chat_model_leaves_with_its_template_its_tokens_and_all_its_stops(
    grpo_run: dict[str, Any], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """And without run.yaml it is asked as in the run, here as elsewhere."""
    library, model, out = byte_library(), tmp_path / "model", tmp_path / "out"
    library.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    model.mkdir()
    library.save(str(model / "tokenizer.json"))
    tokens = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": OWN["qwen2_5"]}]
    (model / "tokenizer_config.json").write_text(json.dumps(tokens | {"chat_template": named}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [260, 261], "top_p": 0.8}))
    (model / "config.json").write_text(json.dumps({"eos_token_id": 258}))
    prompt = grpo_run["data"]["prompt"] | {"system": " Add.\n"}
    data = {"tokenizer": str(model / "tokenizer.json"), "chat_template": "own", "bos": None, "eos": None}
    raw = grpo_run | {"data": grpo_run["data"] | data | {"prompt": prompt}}
    raw["model"] |= {"vocab_size": 264}
    checkpoint = make_checkpoint(raw)
    assert run("export", checkpoint, out) == 0
    read = {name: json.loads((out / f"{name}.json").read_text()) for name in ("tokenizer_config", "generation_config")}
    assert read["generation_config"]["eos_token_id"] == [260, 261, 258]
    assert read["generation_config"]["top_p"] == 0.8
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [260, 261, 258]
    assert read["tokenizer_config"] | tokens == read["tokenizer_config"], "its template may write them"
    template = (out / "chat_template.jinja").read_text()
    assert template.endswith(OWN["qwen2_5"])
    assert "chat_template" not in read["tokenizer_config"]
    here, elsewhere = (
        PolicyPrompts(data, str(folder / "tokenizer.json"))
        for data, folder in ((describe(epath.Path(checkpoint))[1].data, model), (None, out))  # type: ignore[union-attr]
    )
    assert elsewhere.stop_tokens == here.stop_tokens == (260, 261, 258)
    for text in ("2 + 3?", "<|im_end|>\n"):
        asked = here.encode_question(text)
        assert elsewhere.encode_question(text) == asked  # the wording of data=arithmetic is the question
        assert asked.count(260) == 2, "the end of two turns, and no text"


@pytest.mark.deep
@pytest.mark.parametrize("family", [*FAMILIES, None])
def test_transformers_says_the_same(family: str | None, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Through the tokenizer, and the chat template of a policy's export alone, without run.yaml."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    make, out = request.getfixturevalue("make_checkpoint"), tmp_path / "out"
    if family is None:
        raw = request.getfixturevalue("grpo_run")
        raw["data"] |= {"prompt": raw["data"]["prompt"] | {"system": "Say.", "question": "Q: {question}\n"}}
        checkpoint = make(raw)
    else:
        checkpoint = checkpoint_of(family, request.getfixturevalue("lm_run"), make)
    assert run("export", checkpoint, out) == 0
    (out / "run.yaml").unlink()
    # transformers gives each model_type qwen2 Qwen's own pre-tokenizer, whatever the folder says
    auto = transformers.AutoTokenizer if "Qwen2" not in (out / "config.json").read_text() else None
    tokenizer = (auto or transformers.PreTrainedTokenizerFast).from_pretrained(out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    policy = Policy(epath.Path(checkpoint))
    for text in ("2 + 3?", "1 and 2 make"):
        tokens = tokenizer(text, return_tensors="pt")["input_ids"]
        if family is None:
            asked = [{"role": "user", "content": text}]
            tokens = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        encode = policy.prompts.encode_text if family else policy.prompts.encode_question
        assert tokens[0].tolist() == encode(text)
        said = theirs.generate(tokens, max_new_tokens=12, do_sample=False)[0, tokens.shape[1] :]
        [(_, response)] = policy.generate([tokens[0].tolist()], 1, GREEDY)
        assert tokenizer.decode(said, skip_special_tokens=True) == response.text


def test_a_model_that_transformers_lacks_leaves_in_our_format(
    lm_run: dict[str, Any], make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {key: lm_run["model"][key] for key in ("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim")}
    odd = load_group("model/family/nanochat") | sizes | {"mlp_dim": 64, "vocab_size": 256, "sliding_window": 8}
    checkpoint = make_checkpoint(lm_run | {"model": odd | {"max_seq_len": 64}})
    assert run("export", checkpoint, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "transformers has no architecture with these settings; `--format slipway` exports them" in said
    assert not (tmp_path / "out").exists()
    assert run("export", checkpoint, tmp_path / "out", "--format", "slipway") == 0
    cfg = store.read_model(epath.Path(checkpoint))
    equal(store.read_params(epath.Path(tmp_path / "out"), cfg), store.read_params(epath.Path(checkpoint), cfg))


def test_the_average_is_what_leaves(lm_run: dict[str, Any], make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = make_checkpoint(lm_run | {"optimizer": lm_run["optimizer"] | {"ema_decay": 0.9}})
    cfg = store.read_model(epath.Path(checkpoint))
    roots, _ = run_weights._saved_weights(epath.Path(checkpoint), cfg)
    assert {*jax.tree.leaves(roots)} == {"average"}
    equal(store.read_params(epath.Path(checkpoint), cfg), weights.init_params(cfg, jax.random.key(1)))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda c: shutil.rmtree(c / "state" / "d"), "the checkpoint is incomplete or damaged"),
        (lambda c: (c / "position/metadata").write_text('{"checksums": null}'), "the checkpoint is incomplete or"),
        (lambda c: (c.parents[1] / "run.yaml").unlink(), "run.yaml is missing, which says of what model it is"),
        (lambda c: (c.parents[1] / "run.yaml").write_text("- 1"), "not the run.yaml of a run of the bundled trainer"),
        (lambda c: rewrite_run_file(c, lambda raw: raw["model"].update(dim=64)), r"embedding is \(256, 32\) in the ch"),
        (lambda c: rewrite_run_file(c, lambda raw: raw["model"].pop("dim")), r"model\.dim: Field required; was it"),
    ],
    ids=["files gone", "no checksums", "no run.yaml", "other run.yaml", "other sizes", "other version"],
)
def test_what_is_wrong_with_a_checkpoint_is_one_line(
    spoil: Any, words: str, lm_run: dict[str, Any], make_checkpoint: MakeCheckpoint
) -> None:
    checkpoint = make_checkpoint(lm_run)
    spoil(checkpoint)
    folder = epath.Path(checkpoint)
    with pytest.raises(RunFileError, match=words):
        store.load_sharded(folder, store.read_model(folder), make_mesh(1, 1, 1))


def test_altered_weights_are_found_by_their_checksum(lm_run: dict[str, Any], make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = make_checkpoint(lm_run)
    file = checkpoint / "position" / "metadata"
    content = json.loads(file.read_text())
    content["checksums"]["params.embedding"] ^= 1
    file.write_text(json.dumps(content))
    cfg = store.read_model(epath.Path(checkpoint))
    differs = pytest.raises(RunFileError, match=r"params\.embedding differs from what was saved")
    with differs:
        np.asarray(store.read_params(epath.Path(checkpoint), cfg)["embedding"])
    with differs:
        store.load_sharded(epath.Path(checkpoint), cfg, make_mesh(1, 2, 1))


def test_a_run_starts_from_another_runs_checkpoint(lm_run: dict[str, Any], make_checkpoint: MakeCheckpoint) -> None:
    """The mesh differs, and each device gets its part; a model of another shape is named by its key."""
    checkpoint = make_checkpoint(lm_run)
    cfg = store.read_model(epath.Path(checkpoint))
    mesh = make_mesh(1, 2, 2)
    placed = store.load_sharded(epath.Path(checkpoint), cfg, mesh)
    assert jax.tree.map(lambda x: x.sharding, placed) == weights.param_shardings(cfg, mesh)
    equal(placed, weights.init_params(cfg, jax.random.key(1)))
    for folder, layers, words in (
        (checkpoint, 2, r"model\.num_layers: is 2, but 1 in the weights of"),
        (checkpoint.parents[1], 1, r"it has checkpoints of a run; choose one: .*/checkpoints/STEP, of 3$"),
        (checkpoint / "nowhere", 1, "there is no such folder"),
    ):
        with pytest.raises(RunFileError, match=words):
            store.check_weights(cfg.model_copy(update={"num_layers": layers, "weights": str(folder)}))
