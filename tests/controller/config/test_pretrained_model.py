"""`model=pretrained`: sizes and switches come from a config.json of Hugging Face."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from conf.hugging_face.config_json import model_from_config
from conf.schema.training.model import Model
from controller.config.pretrained_model import with_pretrained_model
from tests.composed import config_of
from tests.paths import ROOT

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
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A Hub that has what the test says: a folder, or an error to raise, by repository."""
    known: dict[str, Any] = {}

    def find(repository: str) -> Any:
        found = known[repository]
        if isinstance(found, Exception):
            raise found
        return f"{found}/config.json"

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_url", lambda repository, _: repository)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda repository, **_: find(repository))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repository, _: find(repository))
    return known


def test_the_command_line_composes_a_model_of_any_size():
    words = ("model=pretrained", f"model.weights={GEMMA}", "model.remat=none", "~model.vocab_size")
    config = config_of("+experiment=gemma2b_gsm8k", *words, "model.max_seq_len=32")
    assert config.model is not None
    changed = {"weights": GEMMA, "config_json": GEMMA, "remat": "none", "max_seq_len": 32}
    assert config.model.model_dump(mode="json") == described(GEMMA) | changed


def test_sources_are_folders_files_assets_and_repositories(hub):
    hub["google/gemma-2-2b"] = GEMMA
    for source in (GEMMA, f"{GEMMA}/config.json", "google/gemma-2-2b"):
        assert complete({"config_json": source}).model_dump(exclude={"config_json"}) == {
            key: value for key, value in described(GEMMA).items() if key != "config_json"
        }
    build = ["hf", "download", "google/gemma-2-2b", "--local-dir", "{output}"]
    for source, asset in {"mine/gemma2": {"path": str(FIXTURES)}, "mine": {"build": build}}.items():
        assert complete({"config_json": f"assets://{source}"}, assets={"models": {"mine": asset}}).dim == 32


def test_a_kept_copy_needs_no_network(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: f"{GEMMA}/config.json")
    assert complete({"config_json": "google/gemma-2-2b"}).dim == 32


def gone(kind: type[Exception]) -> Exception:
    """Return an answer of the Hub as an error, without the response that it belongs to."""
    return kind.__new__(kind, "no")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (gone(errors.GatedRepoError), "it is gated; accept its license at https://huggingface.co/a/b, then run `hf"),
        (gone(errors.RepositoryNotFoundError), "there is no such folder here, and no public repository https://"),
        (gone(errors.EntryNotFoundError), "https://huggingface.co/a/b has no config.json"),
        (OSError("no route"), "there is no such folder here, and https://huggingface.co/a/b does not answer (no"),
    ],
)
def test_a_repository_that_cannot_be_read_is_named(hub, answer, words):
    hub["a/b"] = answer
    assert problem({"config_json": "a/b"}).startswith(f"model.config_json: a/b: {words}")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({}, "model.weights: set it to a folder of Hugging Face, or set model.config_json"),
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


def test_a_rehearsal_has_sizes_and_needs_no_file():
    config = config_of("+experiment=gemma2b_gsm8k", "model=pretrained", "scale=tiny")
    assert config.model is not None
    assert (config.model.dim, config.model.weights, config.model.config_json) == (32, None, None)
