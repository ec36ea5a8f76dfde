"""A tokenizer trained by us: any text comes back, every token's bytes are counted, and its names are not the text's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema.training.run_yaml import RunFileError
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
    assert batches.Dataset(data).vocab_size == len(batches.Dataset(data).token_bytes()) == 320
    batches.Dataset(data).check_vocab_size(320)
    with pytest.raises(
        RunFileError, match=r"^model\.vocab_size: 319 is too small for data\.tokenizer=\S+ .* least 320"
    ):
        batches.Dataset(data).check_vocab_size(319)
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
