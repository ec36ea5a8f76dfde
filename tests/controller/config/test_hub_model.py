"""`model=hf model.weights=hf://OWNER/NAME`: one word gives decoder, weights, tokenizer, chat and special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controller.config.hub_model import with_hub_weights
from controller.localcloud.hub import HubServer
from tests.composed import config_of, problems_of
from tests.hub import hub, write
from tests.paths import ROOT

__all__ = ["hub"]
GEMMA = ROOT / "tests" / "trainer" / "fixtures" / "gemma2" / "config.json"
WEIGHTS = "hf://acme/Tuned-2.5B"
CHAT = {"chat_template": "…<start_of_turn>…", "bos_token": "<bos>", "eos_token": {"content": "<eos>"}}


@pytest.fixture
def tuned(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The Hub, with a small model that was tuned on a chat."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    describe(hub, CHAT)
    return hub


def describe(hub: HubServer, tokenizer: dict[str, Any], config: str | None = None) -> None:
    files = {"config.json": config or GEMMA.read_text(), "tokenizer_config.json": json.dumps(tokenizer)}
    write(hub.state.folder / "models/acme/Tuned-2.5B", {name: text.encode() for name, text in files.items()})


HF = ("model=hf", f"model.weights={WEIGHTS}", "~model.vocab_size")  # the size is the experiment's
WORDS = ("+experiment=quickstart", *HF, "~model.attention_pattern", "~model.sliding_window")


def test_one_word_is_enough(tuned: HubServer) -> None:
    config = config_of(*WORDS)
    assert config.model is not None
    assert config.model.weights == "assets://tuned-2-5b"
    assert config.assets.models["tuned-2-5b"].source == "hf://acme/Tuned-2.5B/*"
    assert (config.model.dim, config.model.vocab_size) == (32, 97)
    data: Any = config.data
    assert data.tokenizer == "assets://tuned-2-5b/tokenizer.json"
    assert (data.chat_template, data.bos, data.eos) == ("gemma", None, None)


def test_a_pretrained_model_has_no_chat_and_its_own_special_tokens(tuned: HubServer) -> None:
    describe(tuned, {"bos_token": "<s>", "add_bos_token": False, "eos_token": "<|endoftext|>"})
    data: Any = config_of(*WORDS).data
    assert (data.chat_template, data.bos, data.eos) == ("none", None, "<|endoftext|>")


def test_a_tokenizer_of_ones_own_keeps_the_data_as_they_are(tuned: HubServer) -> None:
    data: Any = config_of(*WORDS, "data.tokenizer=/my/tokenizer.json").data
    assert (data.tokenizer, data.chat_template, data.eos) == ("/my/tokenizer.json", "none", "<eos>")
    assert not [r for r in tuned.state.requests if "tokenizer_config" in r]


def test_an_unknown_field_is_refused_by_name(tuned: HubServer) -> None:
    describe(tuned, CHAT, json.dumps(json.loads(GEMMA.read_text()) | {"mixture_of_depths": 3}))
    [problem] = problems_of(*WORDS)
    assert "config.json: mixture_of_depths: unknown to gemma2" in problem


def test_the_tokenizer_of_the_weights_that_it_replaces_goes(tuned: HubServer) -> None:
    data: Any = config_of("+experiment=gemma2b_gsm8k", *HF).data
    assert (data.tokenizer, data.chat_template) == ("assets://tuned-2-5b/tokenizer.json", "gemma")


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("hf://acme", "model.weights: 'hf://acme' is neither hf://"),
        ("hf://datasets/acme/rows", "model.weights: hf://datasets/acme/rows is a data set; name a model"),
        ("hf://acme/none", "there is no public repository http://127.0.0.1:"),
        ("hf://acme/gated", "it is gated; accept its license at http://127.0.0.1:"),
        ("hf://acme/Tuned-2.5B@v9", "has no revision v9"),
        ("hf://acme/open", "acme/open has no tokenizer_config.json"),
    ],
)
def test_what_cannot_be_read_is_one_line(tuned: HubServer, weights: str, words: str) -> None:
    [problem] = problems_of(*WORDS, f"model.weights={weights}")
    assert words in problem
    assert len(problem.splitlines()) == 1


def test_a_chat_that_we_do_not_have_is_named(tuned: HubServer) -> None:
    describe(tuned, {"chat_template": "[INST]", "eos_token": "</s>"})
    [problem] = problems_of(*WORDS)
    assert problem.startswith("data.chat_template: hf://acme/Tuned-2.5B was tuned on a chat other than qwen, gemma")


def test_other_weights_are_left_alone() -> None:
    data = {"model": {"weights": "gs://b/w"}, "data": {"tokenizer": "bytes"}}
    assert with_hub_weights(data) == (data, [])
