"""nanochat's tokenizer.pkl: the ids of tiktoken's algorithm, written out here, and no code of the file is run."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from conf.schema.training.run_yaml import RunFileError
from tests.trainer.tokenizer.test_training import TEXT
from trainer.tokenizer import loading, nanochat, training
from trainer.tokenizer.__main__ import main

LETTERS = {letter: byte for byte, letter in nanochat._letters().items()}
SOURCE = "for (int i = 0; i < 10; ++i) { sum += values[i]; }\n" * 3 + TEXT


def encoding_class() -> type:
    """tiktoken's Encoding as far as a pickle knows it: its module, its name, the state."""

    class Encoding:
        def __init__(self, **state: Any) -> None:
            self.state = state

        def __getstate__(self) -> dict[str, Any]:
            return self.state

    Encoding.__module__, Encoding.__qualname__ = nanochat.ENCODING
    return Encoding


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """Ranks trained as nanochat trains them, with a token that no merge makes."""
    library = training.train_tokenizer([SOURCE], 400)
    added = set(library.get_added_tokens_decoder())
    vocabulary = {token: i for token, i in library.get_vocab().items() if i not in added}
    ranks = {bytes(LETTERS[letter] for letter in token): i for token, i in vocabulary.items()}
    by_rank = sorted(ranks, key=lambda token: ranks[token])
    ranks = {token: i for i, token in enumerate([*by_rank, b"template<typename"])}
    special = {name: len(ranks) + i for i, name in enumerate(training.SPECIAL_TOKENS)}
    tables = {"mergeable_ranks": ranks, "special_tokens": special}
    return {"name": "rustbpe", "pat_str": training.SPLIT_PATTERN} | tables


def pickled(state: Any, monkeypatch: pytest.MonkeyPatch) -> bytes:
    made = encoding_class()
    module = ModuleType("tiktoken.core")
    module.Encoding = made  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "tiktoken", ModuleType("tiktoken"))
    monkeypatch.setitem(sys.modules, "tiktoken.core", module)
    return pickle.dumps(made(**state))


@pytest.fixture(scope="module")
def converted(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> loading.Tokenizer:
    folder = tmp_path_factory.mktemp("nanochat")
    with pytest.MonkeyPatch.context() as patch:
        (folder / "tokenizer.pkl").write_bytes(pickled(state, patch))
    assert main(["convert", str(folder / "tokenizer.pkl"), "--output", str(folder)]) == 0
    found = loading.load_tokenizer(str(folder / "tokenizer.json"))
    np.testing.assert_array_equal(np.load(folder / "token_bytes.npy"), found.token_bytes())
    assert found.special_tokens == state["special_tokens"]
    expected = [len(token) for token in state["mergeable_ranks"]] + [0] * len(training.SPECIAL_TOKENS)
    assert found.token_bytes().tolist() == expected
    return found


def tiktoken_ids(state: dict[str, Any], text: str) -> list[int]:
    """https://github.com/openai/tiktoken: merge the pair of the lowest rank until there is none, piece by piece."""
    ranks, found = state["mergeable_ranks"], []
    for piece, _ in pre_tokenizers.Split(Regex(state["pat_str"]), "isolated").pre_tokenize_str(text):
        raw = piece.encode()
        if raw in ranks:
            found.append(ranks[raw])
            continue
        parts = [bytes([byte]) for byte in raw]
        while True:
            pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        found += [ranks[part] for part in parts]
    return found


@settings(max_examples=60)
@example("template<typename")
@given(st.one_of(st.text(max_size=40), st.lists(st.sampled_from(SOURCE.split(" ")), max_size=8).map(" ".join)))
def test_every_text_has_the_ids_of_tiktoken(state: dict[str, Any], converted: loading.Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    (ids,) = converted.encode([text])
    assert ids.tolist() == tiktoken_ids(state, text)
    assert converted.decode(ids.tolist()) == text


class Evil:
    """A pickle that would run a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_what_is_no_such_file_is_refused_and_runs_nothing(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = {
        pickle.dumps(Evil()): "it names posix.system, and plain data do not",
        pickle.dumps({"mergeable_ranks": Evil()}): "it names posix.system",
        b"\x80\x04Pouts\n.": "it refers to data outside the file",
        b"{}": "is not nanochat's tokenizer.pkl: ",
        pickled({"name": "gpt2"}, monkeypatch): "KeyError: 'mergeable_ranks'",
        pickle.dumps(state | {"special_tokens": {"<|bos|>": 1000}}): "without a gap",
        pickle.dumps(state | {"mergeable_ranks": {b"ab": 0}}): "a byte has no token",
        pickle.dumps(state | {"mergeable_ranks": {"ab": 0}}): "ranks of bytes",
    }
    for raw, words in cases.items():
        with pytest.raises(RunFileError, match=r"^here") as refused:
            nanochat.convert(raw, "here")
        assert words in str(refused.value)
    assert not (tmp_path / "ran").exists()
    assert main(["convert", "absent.pkl", "--output", "out"]) == 2
    assert capsys.readouterr().err == "absent.pkl: cannot be read: No such file or directory\n"
