"""`model=pretrained` and `model=hf`: sizes, switches, tokenizer, chat and special tokens come from Hugging Face."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from conf.config_json import model_from_config
from conf.schema.assets import parse_source
from conf.schema.training.model import Model
from controller.config.pretrained_model import (
    HubFileAbsentError,
    HubFileError,
    hub_file,
    with_hub_weights,
    with_pretrained_model,
)
from controller.localcloud.hub import HubServer
from tests.composed import config_of, problems_of
from tests.hub import hub, write
from tests.paths import ROOT

__all__ = ["hub"]
FIXTURES = ROOT / "tests" / "trainer" / "fixtures"
GEMMA = str(FIXTURES / "gemma2")


def described(folder: str) -> dict[str, Any]:
    return model_from_config(json.loads((Path(folder) / "config.json").read_text())).model_dump(mode="json")


def complete(model: dict[str, Any], **sections: Any) -> Model:
    data, problems = with_pretrained_model({"model": {"weights": None} | model, **sections})
    assert problems == []
    return Model.model_validate(data["model"])


def problem(model: dict[str, Any], **sections: Any) -> str:
    _, problems = with_pretrained_model({"model": {"weights": None, "config_json": None} | model, **sections})
    assert len(problems) == 1
    assert len(str(problems[0]).splitlines()) == 1
    return str(problems[0])


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A Hub that has what the test says: a folder, or an error to raise, by repository."""
    folders: dict[str, Any] = {}

    def find(repository: str) -> Any:
        found = folders[repository]
        if isinstance(found, Exception):
            raise found
        return f"{found}/config.json"

    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repository, *_, **__: find(repository))
    return folders


def test_the_command_line_composes_a_model_of_any_size():
    words = ("model=pretrained", f"model.weights={GEMMA}", "model.remat=none", "~model.vocab_size")
    config = config_of("+experiment=gemma2b_gsm8k", *words, "model.max_seq_len=32")
    assert config.model is not None
    changed = {"weights": GEMMA, "config_json": GEMMA, "remat": "none", "max_seq_len": 32}
    assert config.model.model_dump(mode="json") == described(GEMMA) | changed


def test_sources_are_folders_files_assets_and_repositories(known):
    known["google/gemma-2-2b"] = GEMMA
    for source in (GEMMA, f"{GEMMA}/config.json", "google/gemma-2-2b"):
        assert complete({"config_json": source}).model_dump(exclude={"config_json"}) == {
            key: value for key, value in described(GEMMA).items() if key != "config_json"
        }
    build = ["hf", "download", "google/gemma-2-2b", "--local-dir", "{output}"]
    for source, asset in {"mine/gemma2": {"path": str(FIXTURES)}, "mine": {"build": build}}.items():
        assert complete({"config_json": f"assets://{source}"}, assets={"models": {"mine": asset}}).dim == 32


def test_a_kept_copy_needs_no_network(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: f"{GEMMA}/config.json")
    assert complete({"config_json": "google/gemma-2-2b"}).dim == 32


def gone(kind: type[Exception]) -> Exception:
    """Return an answer of the Hub as an error, without the response that it belongs to."""
    return kind.__new__(kind, "no")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (gone(errors.GatedRepoError), "https://huggingface.co/a/b is gated; accept its license there, then run `hf"),
        (gone(errors.RepositoryNotFoundError), "there is no public repository https://huggingface.co/a/b; for a"),
        (gone(errors.RemoteEntryNotFoundError), "https://huggingface.co/a/b has no config.json"),
        (OSError("no route"), "https://huggingface.co/a/b does not answer (no route)"),
    ],
)
def test_a_repository_that_cannot_be_read_is_named(known, answer, words):
    known["a/b"] = answer
    named = problem({"config_json": "a/b"})
    assert named.startswith(f"model.config_json: a/b: there is no such folder here, and {words}")


@pytest.mark.parametrize(
    ("weights", "config_json", "said"),
    [
        ("ckpt", '{"model_type": "rwkv"}', "ckpt: config.json: model_type 'rwkv' is not one of"),
        ("ckpt", "{", "ckpt: config.json is not valid JSON: "),
        ("ckpt", None, "ckpt: has no config.json; it has model.safetensors"),
        (
            "ckpt/config.json",
            '{"model_type": "rwkv"}',
            "ckpt/config.json: is a file; name its folder: model.weights=ckpt",
        ),
        ("ckpt/model.safetensors", None, "ckpt/model.safetensors: is a file; name its folder: model.weights=ckpt"),
    ],
)
def test_a_folder_that_is_here_is_no_model_of_the_hub(tmp_path, monkeypatch, weights, config_json, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt/model.safetensors").touch()
    if config_json is not None:
        (tmp_path / "ckpt/config.json").write_text(config_json)
    found = problem({"weights": weights, "config_json": weights})
    assert found.startswith(f"model.weights: {said}")
    assert "Hub" not in found


@pytest.mark.parametrize("name", ["../mine", "models/gemma.git", "my--own/gemma"])
def test_a_folder_that_is_not_there_and_no_name_of_a_repository_is_named(name):
    words = f"{name}: there is no such folder here, and {name} is no name of a repository"
    assert problem({"config_json": name}) == f"model.config_json: {words}"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {},
            "model.weights: set it to a model of the Hub, such as hf://Qwen/Qwen3-0.6B, or to a folder, or set model",
        ),
        *(
            ({"weights": name, "config_json": name}, f"model.weights: {name}: {said}")
            for name, said in {
                "gemma": "there is no such folder with a config.json here; a model of the Hub is model.weights=hf://OWNER/g",
                "a/b": "there is no such folder with a config.json here; a model of the Hub is model.weights=hf://a/b",
                "hf:a/b": "there is no such folder with a config.json here; a model of the Hub is model.weights=hf://a/b",
                "huggingface.co/a/b": "there is no such folder with a config.json here; a model of the Hub is model.w",
                "HF://a/b": "is no address of weights; a model of the Hub is model.weights=hf://a/b",
                "https://huggingface.co/a/b/tree/v2/x": "is no address of weights; a model of the Hub is model.weights=hf://a/b@v2",
            }.items()
        ),
        *(
            ({"weights": place, "config_json": place}, f"model.weights: {place}: is not read from here; set model.conf")
            for place in ("gs://b/model", "gs://b", "file:///home/me/model")
        ),
        ({"weights": "hf://a/b:v2"}, "; a model of the Hub is model.weights=hf://a/b@v2"),
        ({"weights": "hf://a/b@"}, "; a model of the Hub is model.weights=hf://a/b"),
        ({"weights": "hf://a/b/x.safetensors"}, "hf://a/b/x.safetensors is a file; name its repository: hf://a/b"),
        (
            {"config_json": GEMMA, "dim": 8, "norm_eps": 1.0},
            f"model: differs from {GEMMA}: dim is 8, not 32, norm_eps is 1.0, not 1e-06; remove them: ~model.dim ~mod",
        ),
        ({"config_json": "gs://b/gemma"}, "gs://b/gemma: is not read from here; set model.config_json to the model's"),
        ({"config_json": "assets://gemma"}, "assets://gemma: assets.models.gemma.path is not set; set"),
        ({"weights": "a/b", "config_json": "a/b"}, "a/b: there is no such folder with a config.json here"),
        ({"config_json": "/nowhere/at/all"}, "/nowhere/at/all: there is no such folder with a config.json here"),
        ({"config_json": GEMMA, "dim": 8}, f"model.dim: is 8, and 32 in {GEMMA}; remove it, as in ~model.dim"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(model, words):
    assert words in problem(model)


def test_a_file_that_is_no_model_is_named(tmp_path):
    for text, words in {
        "{": "config.json is not valid JSON",
        '{"model_type": "mamba"}': "config.json: model_type 'mamba' is not one of gemma2, ",
        "[1]": "config.json: it is no mapping",
    }.items():
        (tmp_path / "config.json").write_text(text)
        assert words in problem({"config_json": str(tmp_path)})


def test_a_folder_that_is_no_model_says_what_it_has(tmp_path: Path) -> None:
    for name, words in {
        "model.gguf": "has no config.json; it has model.gguf; GGUF is not read, but safetensors",
        "adapter_config.json": f"is an adapter of LoRA; set model.lora.adapter={tmp_path}",
    }.items():
        (tmp_path / name).touch()
        assert problem({"config_json": str(tmp_path)}) == f"model.config_json: {tmp_path}: {words}"


def test_a_rehearsal_has_sizes_and_needs_no_file():
    config = config_of("+experiment=gemma2b_gsm8k", "model=pretrained", "scale=tiny")
    assert config.model is not None
    assert (config.model.dim, config.model.weights, config.model.config_json) == (32, None, None)


GEMMA_JSON = FIXTURES / "gemma2" / "config.json"
WEIGHTS = "hf://acme/Tuned-2.5B"
TURNS = "{% for m in messages %}<turn>{{ m.role ~ ': ' ~ m.content }}<end>{% endfor %}"
CHAT = {"chat_template": TURNS, "bos_token": "<bos>", "eos_token": {"content": "<end>"}}


@pytest.fixture
def tuned(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The Hub, with a small model that was tuned on a chat."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    describe_on_hub(hub, CHAT)
    return hub


def describe_on_hub(
    hub: HubServer, tokenizer: dict[str, Any], config: str | None = None, name: str = "Tuned-2.5B", **more: str
) -> None:
    files = {"config.json": config or GEMMA_JSON.read_text(), "tokenizer_config.json": json.dumps(tokenizer)}
    files |= {file.replace("__", "."): text for file, text in more.items()}
    write(hub.state.folder / "models/acme" / name, {file: text.encode() for file, text in files.items()})


HF = ("model=hf", f"model.weights={WEIGHTS}", "~model.vocab_size")  # the size is the experiment's
ON_HF = ("+experiment=quickstart", *HF, "~model.attention_pattern", "~model.sliding_window")


def test_one_word_is_enough(tuned: HubServer) -> None:
    config = config_of(*ON_HF)
    assert config.model is not None
    assert config.model.weights == "assets://tuned-2-5b"
    assert config.assets.models["tuned-2-5b"].source == "hf://acme/Tuned-2.5B/*"
    assert (config.model.dim, config.model.vocab_size) == (32, 97)
    data: Any = config.data
    assert data.tokenizer == "assets://tuned-2-5b/tokenizer.json"
    assert (data.chat_template, data.bos, data.eos) == ("own", None, None)


def test_a_file_that_was_absent_may_have_come_and_another_hub_has_its_own(
    tuned: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = parse_source(f"{WEIGHTS}/*")
    with pytest.raises(HubFileAbsentError, match=r"has no chat_template\.jinja"):
        hub_file(address, "chat_template.jinja")
    describe_on_hub(tuned, CHAT, chat_template__jinja=TURNS)
    assert hub_file(address, "chat_template.jinja").read_text() == TURNS
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubFileError, match="no network"):
        hub_file(address, "chat_template.jinja", "no network")


STALE = {"chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "eos_token": "<end>"}
NAMED = [{"name": "tools", "template": "<|im_start|>"}, {"name": "default", "template": TURNS}]


@pytest.mark.parametrize(
    ("tokenizer", "more", "chat"),
    [
        (CHAT, {}, "own"),
        (CHAT | {"eos_token": "<eos>"}, {}, "none"),  # a base model with the tokenizer of the tuned one
        (CHAT | {"eos_token": "<eos>"}, {"generation_config__json": '{"eos_token_id": [1, 7]}'}, "own"),
        (CHAT | {"eos_token": "<eos>"}, {"generation_config__json": '{"eos_token_id": 1}'}, "none"),
        (STALE, {}, "none"),
        (STALE, {"chat_template__jinja": TURNS}, "own"),  # the file is the model's, whatever the key says
        (CHAT | {"chat_template": NAMED}, {}, "own"),
        ({"eos_token": "<end>"}, {}, "none"),
        ({"eos_token": "<end>", "chat_template": "{{ messages[-1].content }}<end>"}, {}, "none"),  # it has no turns
    ],
)
def test_a_model_has_its_own_chat_if_it_stops_at_the_end_of_its_turns(
    tokenizer: dict[str, Any], more: dict[str, str], chat: str, tuned: HubServer
) -> None:
    decoder = {"added_tokens_decoder": {"1": {"content": "<eos>"}, "7": {"content": "<end>"}}}
    describe_on_hub(tuned, tokenizer | decoder, **more)
    data: Any = config_of(*ON_HF).data
    assert data.chat_template == chat
    if chat == "none":
        assert data.eos == tokenizer["eos_token"]


@pytest.mark.parametrize(("name", "chat"), [("small-it", "own"), ("small", "none")])
def test_a_models_name_says_that_it_was_tuned_where_its_files_forget_the_end_of_turn(
    name: str, chat: str, tuned: HubServer
) -> None:
    stops = {"generation_config__json": '{"eos_token_id": 1}'}
    describe_on_hub(tuned, CHAT | {"eos_token": "<eos>"}, name=name, **stops)
    data: Any = config_of(*ON_HF, f"model.weights=hf://acme/{name}").data
    assert (data.chat_template, data.eos) == (chat, None if chat == "own" else "<eos>")


def test_a_model_in_a_folder_of_a_repository_has_what_is_beside_it(tuned: HubServer) -> None:
    describe_on_hub(tuned, {"eos_token": "<other>"}, name="several")
    describe_on_hub(tuned, CHAT, name="several/tuned")
    data: Any = config_of(*ON_HF, "model.weights=hf://acme/several/tuned/*").data
    assert (data.tokenizer, data.chat_template, data.eos) == ("assets://several/tokenizer.json", "own", None)


@pytest.mark.parametrize("chat", ["own", "gemma", "qwen"])
def test_turns_that_are_asked_for_stay(chat: str, tuned: HubServer) -> None:
    data: Any = config_of(*ON_HF, f"data.chat_template={chat}", "data.bos=null").data
    assert (data.chat_template, data.bos, data.eos) == (chat, None, None)
    named = config_of(*ON_HF, "data.tokenizer=assets://tuned-2-5b/tokenizer.json").data
    assert getattr(named, "chat_template", None) == "none", "this tokenizer is named, so nothing comes with it"


def test_a_pretrained_model_has_no_chat_and_its_own_special_tokens(tuned: HubServer) -> None:
    """And a tokenizer of one's own keeps the data as they are."""
    data: Any = config_of(*ON_HF, "data.tokenizer=/my/tokenizer.json").data
    assert (data.tokenizer, data.chat_template, data.eos) == ("/my/tokenizer.json", "none", "<eos>")
    assert not [r for r in tuned.state.requests if "tokenizer_config" in r]
    describe_on_hub(tuned, {"bos_token": "<s>", "add_bos_token": False, "eos_token": "<|endoftext|>"})
    data = config_of(*ON_HF).data
    assert (data.chat_template, data.bos, data.eos) == ("none", None, "<|endoftext|>")


def test_an_unknown_field_is_refused_by_name(tuned: HubServer) -> None:
    """A config.json without it describes the same weights."""
    describe_on_hub(tuned, CHAT, json.dumps(json.loads(GEMMA_JSON.read_text()) | {"mixture_of_depths": 3}))
    [problem] = problems_of(*ON_HF)
    assert "config.json: mixture_of_depths: unknown to gemma2" in problem
    assert "for a file that is not yours, set model.config_json to a copy without it" in problem
    config = config_of(*ON_HF, f"model.config_json={GEMMA}")
    assert isinstance(config.model, Model)
    assert (config.model.weights, config.model.config_json, config.model.dim) == ("assets://tuned-2-5b", GEMMA, 32)


def test_what_other_programs_write_refuses_no_model(tuned: HubServer) -> None:
    others = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}
    describe_on_hub(tuned, CHAT, json.dumps(json.loads(GEMMA_JSON.read_text()) | others))
    assert config_of(*ON_HF).model is not None


def test_what_other_programs_compute_in_another_way_is_refused(tuned: HubServer) -> None:
    describe_on_hub(tuned, CHAT, json.dumps(json.loads(GEMMA_JSON.read_text()) | {"rope_interleaved": True}))
    [problem] = problems_of(*ON_HF)
    assert "rope_interleaved: True is not supported: the decoder rotates the halves" in problem


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no') }}", "it cannot write this conversation: no"),
        ("{% oops %}", "it is no template of Jinja: line 1: Encountered unknown tag 'oops'"),
        ("{{ strftime_now('%d') }}", "it asks for today's date (strftime_now), and a run has none"),
        (NAMED[:1], "tokenizer_config.json has the templates tools, and none called default"),
    ],
)
def test_a_template_that_cannot_be_used_is_named(template: Any, words: str, tuned: HubServer) -> None:
    describe_on_hub(tuned, {"chat_template": template, "eos_token": "</s>"})
    [problem] = problems_of(*ON_HF)
    assert problem.startswith("data.chat_template: what hf://acme/Tuned-2.5B says of prompts cannot be used: ")
    assert words in problem


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json"])
def test_a_hub_that_fails_for_one_file_is_no_absent_file(
    name: str, tuned: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = huggingface_hub.hf_hub_download

    def fails(repository: str, file: str, **how: Any) -> Any:
        if file == name:
            raise errors.LocalEntryNotFoundError("no route")
        return fetch(repository, file, **how)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    [problem] = problems_of(*ON_HF)
    assert "does not answer (no route)" in problem


def test_the_tokenizer_of_the_weights_that_it_replaces_goes(tuned: HubServer) -> None:
    data: Any = config_of("+experiment=gemma2b_gsm8k", *HF).data
    assert (data.tokenizer, data.chat_template) == ("assets://tuned-2-5b/tokenizer.json", "own")


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("hf://acme", "model.weights: 'hf://acme' is neither hf://"),
        ("hf://datasets/acme/rows", "model.weights: hf://datasets/acme/rows is a data set; name a model"),
        ("hf://acme/none", "model.weights: hf://acme/none: there is no public repository http://127.0.0.1:"),
        ("hf://acme/gated", "/acme/gated is gated; accept its license there, then run"),
        ("hf://acme/Tuned-2.5B@v9", "has no revision v9"),
        ("hf://acme/open", "data.tokenizer: is not set, and hf://acme/open has none: "),
        ("hf://models/acme/Tuned-2.5B", "a model of the Hub is model.weights=hf://acme/Tuned-2.5B"),
        (
            "hf://acme/gguf",
            "model.weights: hf://acme/gguf: has no config.json; name the repository of the model itself",
        ),
        (
            "hf://acme/lora",
            "is an adapter of LoRA: assets.models.a.source=hf://acme/lora model.lora.adapter=assets://a",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(tuned: HubServer, weights: str, words: str) -> None:
    write(tuned.state.folder / "models/acme/gguf", {"model-q4.gguf": b"x"})
    write(tuned.state.folder / "models/acme/lora", {"adapter_config.json": b"{}"})
    [problem] = problems_of(*ON_HF, f"model.weights={weights}")
    assert words in problem
    assert len(problem.splitlines()) == 1


def test_other_weights_are_left_alone() -> None:
    data = {"model": {"weights": "gs://b/w"}, "data": {"tokenizer": "bytes"}}
    assert with_hub_weights(data) == (data, [])
