"""A tokenizer trained by us: any text comes back, every token's bytes are counted, and its names are not the text's."""

import itertools
import json
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
from tokenizers import Regex, Tokenizer, pre_tokenizers

from conf.formats import RunFileError
from conf.schema.training.data import JsonlData, TextData
from tests.groups import load_group
from tests.trainer.data.corpora import lm_loop, make_documents, write_jsonl, write_parquet
from trainer.data import batches
from trainer.tokenizer import loading, training
from trainer.tokenizer.__main__ import main

TEXT = "The 12345 quick brown foxes don't jump; they're jumping over 99 lazy dogs.\n\n日本語 naïve 🚢\t" * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tokenizer.json and token_bytes.npy, as the command writes them."""
    made = tmp_path_factory.mktemp("tokenizer")
    (made / "text").write_text(TEXT)
    assert main(["train", str(made / "text"), "--output", str(made), "--vocab", "320"]) == 0
    return made


@pytest.fixture(scope="module")
def trained(folder: Path) -> loading.Tokenizer:
    return loading.load_tokenizer(str(folder / "tokenizer.json"))


@given(st.text())
def test_any_text_comes_back(trained, text):
    text = text.encode("utf-8", "replace").decode()
    (ids,) = trained.encode([text])
    assert trained.decode(ids) == text
    assert ids.dtype == np.int32
    assert trained.token_bytes()[ids].sum() == len(text.encode())


def test_it_learns_pairs_within_the_split_and_ends_in_special_tokens(trained):
    (ids,) = trained.encode([TEXT])
    assert len(ids) < len(TEXT.encode()) / 2
    assert trained.vocab_size == 320
    assert list(trained.special_tokens) == list(training.SPECIAL_TOKENS)
    assert sorted(trained.special_tokens.values()) == list(range(311, 320))
    assert [trained.decode([i]) for i in trained.encode(["12345"])[0]] == ["12", "34", "5"]  # two digits at most


def test_special_tokens_have_no_bytes_and_are_no_text(trained, folder):
    lengths = trained.token_bytes()
    np.testing.assert_array_equal(lengths, np.load(folder / "token_bytes.npy"))
    assert lengths.dtype == np.int32
    assert set(np.flatnonzero(lengths == 0)) == set(trained.special_tokens.values())
    (ids,) = trained.encode(["a <|bos|> in a text"])
    assert trained.special_tokens["<|bos|>"] not in ids
    assert trained.decode([trained.special_tokens["<|bos|>"], *ids]) == "a <|bos|> in a text"


def test_rows_are_read_and_cut(tmp_path, capsys):
    texts = make_documents(200)
    write_jsonl(tmp_path / "a.jsonl", texts)
    write_parquet(tmp_path / "a.parquet", texts, 50)
    for kind in ("jsonl", "parquet"):
        arguments = ["train", str(tmp_path / f"*.{kind}"), "--output", str(tmp_path / kind), "--vocab", "300"]
        assert main([*arguments, "--doc-chars", "20"]) == 0
        assert "300 tokens" in capsys.readouterr().out
    one, other = ((tmp_path / kind / "tokenizer.json").read_text() for kind in ("jsonl", "parquet"))
    assert one == other
    assert list(training.take_documents(["abcd", "efgh", "ij"], characters=5, longest=3)) == ["abc", "ef"]
    assert main(["train", str(tmp_path / "a.jsonl"), "--output", str(tmp_path), "--column", "body"]) == 2
    assert capsys.readouterr().err == f"--column: {tmp_path}/a.jsonl:1 has no column 'body'; it has 'id', 'text'\n"


def test_a_tokenizer_must_fit_the_model_and_know_the_marks(trained, folder, tmp_path):
    path = str(folder / "tokenizer.json")
    data = write_jsonl(tmp_path / "a.jsonl", ["x"], tokenizer=path, bos="<|bos|>")
    assert batches.Dataset(data).vocab_size == batches.Dataset(data).text_bytes.shape[1] == 320
    batches.Dataset(data).check_vocab_size(320)
    with pytest.raises(
        RunFileError, match=r"^model\.vocab_size: 319 is too small for data\.tokenizer=\S+ .* least 320"
    ):
        batches.Dataset(data).check_vocab_size(319)
    library = Tokenizer.from_file(path)
    library.add_special_tokens(["<image_soft_token>"])  # id 320, as 262144 beside gemma-3-1b
    library.save(path := str(tmp_path / "tokenizer.json"))
    images = data.model_copy(update={"tokenizer": path})
    batches.Dataset(images).check_vocab_size(320)
    assert batches.Dataset(images).text_bytes.shape[1] == 320
    assert max(loading.load_tokenizer(path).encode(["<image_soft_token>"])[0]) < 320
    wrong = data.model_copy(update={"bos": "<bos>"})
    with pytest.raises(RunFileError, match=r"^data\.bos: the tokenizer has no special token <bos>; it has <\|bos\|>, "):
        batches.Dataset(wrong).train_batches(lm_loop(8, 10), 0, range(8))


@pytest.mark.parametrize(
    ("content", "words"), [(None, "does not exist"), ("{}", "is not a tokenizer.json"), ("\xff", "is not a")]
)
def test_a_file_that_is_none(tmp_path, content, words):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content, encoding="latin1")
    with pytest.raises(RunFileError, match=rf"^data\.tokenizer: .*{words}"):
        loading.load_tokenizer(str(path))


def test_tokens_of_sentencepieces_kind_are_counted_in_bytes():
    vocab = {"<pad>": 0, "<bos>": 1, "<0xE2>": 2, "▁": 3, "▁the": 4, "é": 5, "the": 6}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    added = [{"id": i, "content": name} | plain for i, name in enumerate(("<pad>", "<bos>"))]
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    raw = {"version": "1.0", "added_tokens": added, "model": model, "decoder": decoder}
    known = loading.parse_tokenizer(json.dumps(raw).encode(), "here")
    assert known.token_bytes().tolist() == [0, 0, 1, 1, 4, 2, 3]
    assert known.special_tokens == {"<pad>": 0, "<bos>": 1}


WORDS = "to be, or not: ünïcode 🙂"


@pytest.fixture
def data(tmp_path) -> TextData:
    path = tmp_path / "text.txt"
    path.write_text(WORDS)
    return TextData(**load_group("data/text") | {"path": str(path), "tokenizer": "characters"})


def test_ids_are_the_characters_of_the_text_in_order(data):
    tokenizer = batches.Dataset(data).tokenizer
    (ids,) = tokenizer.encode([WORDS])
    assert tokenizer.vocab_size == batches.Dataset(data).vocab_size == len(set(WORDS))
    assert [sorted(set(WORDS))[i] for i in ids] == list(WORDS)
    assert tokenizer.decode(ids) == WORDS
    assert int(np.sum(tokenizer.token_bytes()[ids])) == len(WORDS.encode())


def test_characters_of_the_validation_part_count_too(data, tmp_path):
    """What neither has is named."""
    other = tmp_path / "other.txt"
    other.write_text("Ω")
    both = data.model_copy(update={"eval_path": str(other), "eval_fraction": 0.0})
    assert batches.Dataset(both).vocab_size == batches.Dataset(data).vocab_size + 1
    with pytest.raises(RunFileError, match=r"data\.tokenizer: .*'Ω'"):
        batches.Dataset(data).tokenizer.encode(["to Ω"])


def test_only_a_text_has_characters():
    table = load_group("data/jsonl") | {"path": "rows.jsonl", "text_column": "text", "tokenizer": "characters"}
    with pytest.raises(RunFileError, match=r"data.tokenizer: characters requires a text, not jsonl"):
        _ = batches.Dataset(JsonlData(**table)).tokenizer


LETTERS = {letter: byte for byte, letter in enumerate(loading.byte_characters())}
SOURCE = "for (int i = 0; i < 10; ++i) { sum += values[i]; }\n" * 3 + TEXT


class Encoding:
    """tiktoken's as far as a pickle knows it: its module, its name, the state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def __getstate__(self) -> dict[str, Any]:
        return self.state


Encoding.__module__, Encoding.__qualname__ = training.ENCODING


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
    module = ModuleType("tiktoken.core")
    module.Encoding = Encoding  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "tiktoken", ModuleType("tiktoken"))
    monkeypatch.setitem(sys.modules, "tiktoken.core", module)
    return pickle.dumps(Encoding(**state))


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
            training.convert_nanochat(raw, "here")
        assert words in str(refused.value)
    assert not (tmp_path / "ran").exists()
    assert main(["convert", "absent.pkl", "--output", "out"]) == 2
    assert capsys.readouterr().err == "absent.pkl: cannot be read: No such file or directory\n"
