"""The tokenizer of a run as files of Hugging Face's tokenizers library, whatever `data.tokenizer` names.

A run keeps them beside its checkpoints, in RUN/tokenizer/, so that its weights can be used without its data.
"""

from collections.abc import Iterator
from typing import Any

from etils import epath
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from conf.schema.training.data import Corpus, TextData
from conf.schema.training.prompts import QuestionData
from trainer.data.batches import Dataset
from trainer.tokenizer import byte_level, loading

TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_FILE = "tokenizer.json"
COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files of a Hugging Face model beside tokenizer.json that are kept with it."""


def tokenizer_files(data: Any) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the tokenizer's files; nothing for data without a tokenizer, or if it is absent.

    Raises:
        RunFileError: the text of a tokenizer of characters cannot be read.
    """
    if not isinstance(data, Corpus | QuestionData):
        return
    if data.tokenizer == loading.BYTES:
        library = byte_library(special=not is_plain_text(data))
        yield TOKENIZER_FILE, library.to_str(pretty=True).encode()
        return
    if data.tokenizer == loading.CHARACTERS:
        if isinstance(data, TextData):
            vocabulary = Dataset(data).tokenizer
            characters = [vocabulary.decode([i]) for i in range(vocabulary.vocab_size)]
            yield TOKENIZER_FILE, character_library(characters).to_str(pretty=True).encode()
        return
    path = epath.Path(data.tokenizer)
    if not path.exists():
        return  # the loop reports it, on all processes
    yield TOKENIZER_FILE, path.read_bytes()
    for name in COMPANIONS:
        if (path.parent / name).exists():
            yield name, (path.parent / name).read_bytes()


def is_plain_text(data: Any) -> bool:
    """Return whether the data are windows of a text, which has no special tokens."""
    return isinstance(data, TextData) and data.packing == "windows"


def byte_library(*, special: bool = True) -> Tokenizer:
    """Return the tokenizer `bytes` as the library has it: the same ids for every text and special token."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    ordered = sorted(loading.ByteTokenizer().special_tokens.items(), key=lambda item: item[1])
    if special:
        made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name, _ in ordered])
        assert made.get_vocab_size() == byte_level.VOCAB_SIZE
    return made


def character_library(characters: list[str]) -> Tokenizer:
    """Return a tokenizer with one id per character, in the given order; other characters are left out of a text."""
    made = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(characters)}, merges=[]))
    made.decoder = decoders.Fuse()
    return made


def _byte_characters() -> list[str]:
    """Return the character by which byte-level tokenizers write each byte.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py: printable bytes stand for themselves, the others follow
    from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
