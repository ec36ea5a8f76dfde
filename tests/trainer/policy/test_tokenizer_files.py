"""The built-in tokenizers as files give the same ids as in training."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from conf.schema.training.data import Data
from conf.schema.training.run_yaml import RunFileError
from tests.groups import load_group
from trainer.policy.tokenizer_files import byte_library, tokenizer_files
from trainer.tokenizer import byte_level
from trainer.tokenizer.loading import ByteTokenizer, parse_tokenizer

BYTES = parse_tokenizer(byte_library().to_str().encode(), "bytes")


@given(st.text())
def test_bytes_are_the_bytes_of_the_text(text: str) -> None:
    ours = ByteTokenizer()
    ids = ours.encode([text])[0].tolist()
    assert BYTES.encode([text])[0].tolist() == ids
    assert BYTES.decode([257, *ids, 258]) == ours.decode(ids) == text


def test_bytes_have_the_same_special_tokens() -> None:
    assert BYTES.special_tokens == ByteTokenizer().special_tokens
    assert BYTES.vocab_size == ByteTokenizer.vocab_size
    assert byte_level.decode([0xFF, 65, byte_level.PAD, 300]) == "\ufffdA"  # bytes that are no text are marked
    assert BYTES.encode(["<eos>"])[0].tolist() == list(b"<eos>"), "a question cannot end itself"
    windows = dict(tokenizer_files(text_data(Path("text"), packing="windows")))
    assert parse_tokenizer(windows["tokenizer.json"], "bytes").vocab_size == 256  # which have none


def text_data(path: Path, **changes: Any) -> Any:
    return TypeAdapter(Data).validate_python(load_group("data/text") | {"path": str(path)} | changes)


def test_characters_are_those_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a b\nc é\t😀")
    files = dict(tokenizer_files(text_data(tmp_path / "text", tokenizer="characters")))
    made = parse_tokenizer(files["tokenizer.json"], "characters")
    assert made.vocab_size == 8
    assert made.encode(["\t\na"])[0].tolist() == [0, 1, 3]
    assert made.decode(made.encode(["é b\n😀"])[0].tolist()) == "é b\n😀"
    with pytest.raises(RunFileError, match="nowhere"):
        dict(tokenizer_files(text_data(tmp_path / "nowhere", tokenizer="characters")))


def test_a_tokenizer_comes_with_the_files_beside_it(tmp_path: Path) -> None:
    raw = byte_library().to_str().encode()
    (tmp_path / "tokenizer.json").write_bytes(raw)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    files = dict(tokenizer_files(text_data(tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))))
    assert files == {"tokenizer.json": raw, "tokenizer_config.json": b"{}"}
    assert not dict(tokenizer_files(text_data(tmp_path, tokenizer=str(tmp_path / "absent.json"))))
