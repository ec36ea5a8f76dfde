"""Bits per byte are of the bytes of the text, whatever a tokenizer puts before it; or they are not told."""

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from conf.formats import RunFileError
from tests.trainer.data.corpora import lm_loop, write_jsonl
from tests.trainer.lives import changed, train
from trainer.data import batches
from trainer.tokenizer import text_bytes
from trainer.tokenizer.loading import ByteTokenizer, CharacterTokenizer, LibraryTokenizer
from trainer.tokenizer.loading import Tokenizer as Ours
from trainer.tokenizer.text_bytes import PROBES

BYTES = [f"<0x{i:02X}>" for i in range(256)]
PIECES = ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁a"]
SPACES = normalizers.Replace(" ", "▁")
PREFIXED = normalizers.Sequence([normalizers.Prepend("▁"), SPACES])
BACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
STRIPPED = decoders.Sequence([*BACK, decoders.Strip(" ", 1, 0)])
LEVEL = pre_tokenizers.ByteLevel


def pieces(**parts: Any) -> Tokenizer:
    """A tokenizer of SentencePiece's kind: pieces of text, and bytes for the rest."""
    vocab = {token: i for i, token in enumerate(["<bos>", "<eos>", *BYTES, *PIECES])}
    made = Tokenizer(models.BPE(vocab, [("▁", "a")], byte_fallback=True))
    made.decoder = STRIPPED
    return with_parts(made, parts)


def byte_level(**parts: Any) -> Tokenizer:
    letters = LEVEL.alphabet()
    vocab = {letter: i for i, letter in enumerate(["<bos>", "<eos>", *sorted(letters), "Ġa"])}
    made = Tokenizer(models.BPE(vocab, [("Ġ", "a")]))
    made.decoder = decoders.ByteLevel()
    return with_parts(made, {"pre_tokenizer": LEVEL(add_prefix_space=False)} | parts)


def with_parts(made: Tokenizer, parts: dict[str, Any]) -> Tokenizer:
    for name, part in parts.items():
        setattr(made, name, part)
    made.add_special_tokens(["<bos>", "<eos>"])
    return made


def word_piece() -> Tokenizer:
    letters = sorted({letter for text in PROBES for letter in text})
    vocab = {token: i for i, token in enumerate(["[UNK]", *letters, *(f"##{letter}" for letter in letters)])}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    return with_parts(made, {"pre_tokenizer": pre_tokenizers.BertPreTokenizer(), "decoder": decoders.WordPiece()})


def unigram(**parts: Any) -> Tokenizer:
    made = Tokenizer(models.Unigram([("<unk>", 0.0), *((letter, -1.0) for letter in "▁abcdefg")], unk_id=0))
    return with_parts(made, {"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()} | parts)


TOLD = {
    "Llama 2": (lambda: pieces(normalizer=PREFIXED), True),
    "Metaspace": (lambda: pieces(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")), True),
    "Metaspace first": (lambda: pieces(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")), True),
    "Gemma": (lambda: pieces(normalizer=SPACES, decoder=decoders.Sequence(BACK)), False),
    "GPT-2": (byte_level, False),
    "GPT-2 with a space": (lambda: byte_level(pre_tokenizer=LEVEL(add_prefix_space=True)), True),
    "Qwen": (lambda: byte_level(normalizer=normalizers.NFC()), False),
}
UNTOLD = {
    "WordPiece": (word_piece, "the tokenizer makes "),
    "NFKC": (lambda: byte_level(normalizer=normalizers.NFKC()), "the tokenizer makes 'café 1"),
    "lower case": (
        lambda: pieces(normalizer=normalizers.Sequence([normalizers.Lowercase(), PREFIXED])),
        'makes "a loud word',
    ),
    "strip": (lambda: byte_level(normalizer=normalizers.Strip()), "and an end' of"),
    "accents": (
        lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
        "'cafe ",
    ),
    "control characters": (lambda: byte_level(normalizer=normalizers.BertNormalizer(lowercase=False)), "makes "),
    "white space": (lambda: pieces(pre_tokenizer=pre_tokenizers.WhitespaceSplit()), "the tokenizer makes "),
    "joined spaces": (lambda: byte_level(normalizer=normalizers.Replace("  ", " ")), "makes 'two spaces"),
    "unknown characters": (unigram, "the tokenizer makes "),
    "words": (lambda: Tokenizer(models.WordLevel({"word": 0})), "the tokenizer cannot encode any text: "),
    "a space before each piece": (
        lambda: byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split("w", "isolated"), LEVEL(add_prefix_space=True, use_regex=False)]
            )
        ),
        "the tokenizer makes ",
    ),
}
DOCUMENTS = ["word", "the cat", "a b", "12 é 🙂", "", "x"] * 3 + ["the end of all that"]


@pytest.mark.parametrize("name", TOLD)
def test_each_token_stands_for_the_bytes_of_its_text(name):
    make, own_space = TOLD[name]
    known = LibraryTokenizer(make())
    found = text_bytes.measure(known)
    assert not isinstance(found, str), found
    assert found.own_space == own_space
    for text, ids in zip(DOCUMENTS, known.encode(DOCUMENTS), strict=True):
        assert found.of_token[ids].sum() == len(text.encode()) + (own_space and text != "")


@pytest.mark.parametrize("name", UNTOLD)
def test_a_tokenizer_that_changes_the_text_has_no_bytes(name):
    make, words = UNTOLD[name]
    found = text_bytes.measure(LibraryTokenizer(make()))
    assert isinstance(found, str)
    assert words in found


@pytest.mark.parametrize("known", [ByteTokenizer(), CharacterTokenizer(["ab"])])
def test_our_own_tokenizers_need_no_probe(known: Ours):
    found = text_bytes.measure(known)
    assert not isinstance(found, str)
    assert not found.own_space


def test_the_probes_are_composed_and_not_by_compatibility():
    assert [unicodedata.normalize("NFC", text) for text in PROBES] == list(PROBES)
    assert [unicodedata.normalize("NFKC", text) for text in PROBES] != list(PROBES)
    assert not any(text.startswith(" ") for text in PROBES)


def counted(data: Any) -> int:
    """The bytes of all targets of the validation part, as the evaluation counts them."""
    opened = batches.Dataset(data)
    table = opened.text_bytes
    assert not isinstance(table, str), table
    found = 0
    for batch in opened.validation_batches(lm_loop(2, 40, 8), range(2)):
        stands_for = table[0][batch["targets"]]
        behind = np.where(stands_for > 0, stands_for - table[1][batch["tokens"]], 0)
        found += int((behind * batch["weights"]).sum())
    return found


@pytest.mark.parametrize("marks", [{"bos": "<bos>"}, {"eos": "<eos>"}, {"bos": "<bos>", "eos": "<eos>"}])
@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("name", ["Llama 2", "Metaspace", "GPT-2 with a space", "Gemma"])
def test_bytes_of_documents_are_those_of_their_text(tmp_path: Path, name, packing, marks):
    """Only the first token of a stream, and of a document without a mark before it, is no target."""
    known = TOLD[name][0]()
    known.save(str(tmp_path / "tokenizer.json"))
    keys = {"bos": None, "eos": None} | marks
    data = write_jsonl(
        tmp_path / "a.jsonl", DOCUMENTS, tokenizer=str(tmp_path / "tokenizer.json"), eval_fraction=0.0,
        eval_path=str(tmp_path / "a.jsonl"), streams=1, packing=packing, **keys,
    )  # fmt: skip
    whole = sum(len(text.encode()) for text in DOCUMENTS)
    ids, table = LibraryTokenizer(known).encode(DOCUMENTS), text_bytes.measure(LibraryTokenizer(known))
    assert not isinstance(table, str)
    firsts = [int(table.of_token[found[0]]) - table.own_space for found in ids if len(found)]
    untold = 0 if "bos" in marks else sum(firsts) if packing == "documents" else firsts[0]
    assert counted(data) == whole - untold


def test_without_marks_a_space_of_the_tokenizers_own_cannot_be_found(tmp_path: Path):
    known = TOLD["Llama 2"][0]()
    known.save(str(tmp_path / "tokenizer.json"))
    keys = {"tokenizer": str(tmp_path / "tokenizer.json"), "bos": None, "eos": None}
    data = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS, **keys, packing="stream")
    assert "before each document; set data.bos or data.eos" in str(batches.Dataset(data).text_bytes)
    template = {"prompt": "{text}", "answer": "{text}", "remove": None}
    pairs = {"template": template, "text_column": None, "eos": "<eos>", "packing": "documents"}
    data = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS, **keys | pairs)
    assert "before each answer" in str(batches.Dataset(data).text_bytes)


def test_a_run_leaves_out_what_it_cannot_tell_and_refuses_to_choose_by_it(lm_run, tmp_path, caplog):
    UNTOLD["NFKC"][0]().save(str(tmp_path / "tokenizer.json"))
    data, loop = {"tokenizer": str(tmp_path / "tokenizer.json")}, {"steps": 1, "eval_interval": 1}
    run = changed(lm_run, data=data, model={"vocab_size": 320}, loop=loop)
    lines = train(run, tmp_path / "local")
    assert "eval_loss" in lines[-1]
    assert "eval_bits_per_byte" not in lines[-1]
    assert "eval_bits_per_byte is left out: the tokenizer makes 'café 1" in caplog.text
    best = {"best": {"metric": "eval_bits_per_byte", "mode": "min"}}
    with pytest.raises(
        RunFileError, match=r"^checkpoint\.best\.metric: eval_bits_per_byte cannot be told, because the"
    ):
        train(changed(run, dir=str(tmp_path / "other"), checkpoint=best), tmp_path / "other-local")
