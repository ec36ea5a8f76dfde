"""The tokenizer that `data.tokenizer` names: bytes, characters, or a tokenizer.json of Hugging Face's library."""

import json
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from etils import epath
from tokenizers import Tokenizer as Library

from conf.chat_template import ChatTemplateError, TokenizerFiles
from conf.formats import BYTE_TOKENS, RunFileError

BYTES = "bytes"
CHARACTERS = "characters"
PAD, BOS_ID, EOS_ID = 256, 257, 258
"""What the byte-level tokenizer has after the bytes of UTF-8."""
VOCAB_SIZE = PAD + len(BYTE_TOKENS)
"""Vocabulary size that a model of bytes needs."""
IMAGE = "image"
"""In the names of special tokens that stand for images."""


class Tokenizer(Protocol):
    """Converts text to ids and back. Names of special tokens in a text are plain text."""

    vocab_size: int
    """Exclusive upper bound of the ids."""
    special_tokens: dict[str, int]
    """Ids of the special tokens, by name."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text without special tokens; bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_bytes(self) -> np.ndarray:
        """Return each id's bytes of text, int32 [vocab]; 0 for special tokens."""
        ...


def load_tokenizer(name: str, key: str = "data.tokenizer") -> Tokenizer:
    """Return the tokenizer of that name or path, the value of a config key. Raises RunFileError."""
    if name == BYTES:
        return ByteTokenizer()
    path = epath.Path(name)
    if not path.exists():
        raise RunFileError(
            f"{key}: {name} does not exist; set `bytes`, `characters` (for a text), or the path of a tokenizer.json"
        )
    return parse_tokenizer(path.read_bytes(), f"{key}: {name}", _ends(name))


def _ends(name: str) -> set[str]:
    """Return the names by which the files beside a tokenizer end a text and the model's turn."""
    files = TokenizerFiles(read_beside(name))
    try:
        turn = files.template.end_of_turn(files.stop_names) if files.template is not None else None
        return {end for end in (turn, files.tokens.get("eos_token")) if end is not None}
    except ChatTemplateError:
        return set()  # who uses these files reports it


def read_beside(name: str) -> Callable[[str], bytes | None]:
    """Return a function that reads a file of a tokenizer's folder, and returns None if there is none."""
    if name in (BYTES, CHARACTERS):
        return lambda _: None
    folder = epath.Path(name).parent
    return lambda file: (folder / file).read_bytes() if (folder / file).exists() else None


def parse_tokenizer(raw: bytes, whence: str, ends: Collection[str] = ()) -> Tokenizer:
    """Parse the content of a tokenizer.json. Raises RunFileError with a message that begins with `whence`.

    ends: tokens that are special, even if it says that they are not.
    """
    try:
        return LibraryTokenizer(Library.from_str(raw.decode()), ends)
    except Exception as error:  # the library raises plain Exception
        raise RunFileError(f"{whence} is not a tokenizer.json of Hugging Face tokenizers: {error}") from None


def check_vocab_size(model_vocab: int, ids: int, key: str) -> None:
    """Raise RunFileError if the tokenizer that a config key names has ids beyond the model's vocabulary."""
    if ids > model_vocab:
        raise RunFileError(
            f"model.vocab_size: {model_vocab} is too small for {key}, which has {ids} ids; set at least {ids}, or use "
            "the tokenizer of the weights"
        )


def special_id(tokenizer: Tokenizer, name: str, key: str) -> int:
    """Return the id of a special token, which a config key names. Raises RunFileError if there is none."""
    known = tokenizer.special_tokens
    if name not in known:
        choices = ", ".join(list(known)[:12]) or "none"
        raise RunFileError(f"{key}: the tokenizer has no special token {name}; it has {choices}")
    return known[name]


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8."""

    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.special_tokens: dict[str, int] = dict(zip(BYTE_TOKENS, (PAD, BOS_ID, EOS_ID), strict=True))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < PAD).decode(errors="replace")

    def token_bytes(self) -> np.ndarray:
        return np.array([1] * PAD + [0] * len(self.special_tokens), np.int32)


class CharacterTokenizer:
    """Ids are the characters of one small text, in the order of Unicode, like nanoGPT's shakespeare_char."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._characters = "".join(sorted(set().union(*texts)))
        self._codes = np.array([ord(character) for character in self._characters], np.int64)
        self.vocab_size = len(self._characters)
        self.special_tokens: dict[str, int] = {}

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text. Raises RunFileError for a character that the source text lacks."""
        return [self._ids(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._characters[i] for i in ids if i < self.vocab_size)

    def token_bytes(self) -> np.ndarray:
        return np.array([len(character.encode()) for character in self._characters], np.int32)

    def _ids(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64)
        ids = np.searchsorted(self._codes, codes)
        known = self._codes[np.minimum(ids, self.vocab_size - 1)] == codes
        if not known.all():
            unknown = chr(codes[np.argmin(known)])
            raise RunFileError(
                f"data.tokenizer: characters are those of data.path, which lacks {unknown!r}; use bytes, or remove it"
            )
        return ids.astype(np.int32)


class LibraryTokenizer:
    """A tokenizer.json. ends: added tokens that are special, even if it says that they are not."""

    def __init__(self, library: Library, ends: Collection[str] = ()) -> None:
        library.no_padding()
        library.no_truncation()
        library.encode_special_tokens = True  # a document that holds `<|bos|>` must not begin a document
        plain = [token for token in library.get_added_tokens_decoder().values() if token.content in ends]
        for token in plain:
            token.special = True
        library.add_special_tokens(plain)
        added = library.get_added_tokens_decoder()
        self._library = library
        self._added = {token.content for token in added.values()}
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        known = library.get_vocab(with_added_tokens=True).items()
        # no text becomes the token of an image, for which models of text such as gemma-3-1b have no row
        self.vocab_size = 1 + max((i for name, i in known if not self._is_image(name)), default=-1)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in found]

    def encode_special(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, but the names of special tokens in a text are these tokens."""
        return [found.ids for found in self._with_special.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _is_image(self, name: str) -> bool:
        return IMAGE in name and name in self.special_tokens

    @cached_property
    def _with_special(self) -> Library:
        made = Library.from_str(self._library.to_str())
        made.encode_special_tokens = False
        return made

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray:
        lengths = np.zeros(self.vocab_size, np.int32)
        is_byte_level = "ByteLevel" in _decoder_kinds(json.loads(self._library.to_str())["decoder"])
        special = set(self.special_tokens.values())
        for token, i in self._library.get_vocab(with_added_tokens=True).items():
            if i not in special:
                lengths[i] = len(token) if is_byte_level and token not in self._added else _token_bytes(token)
        return lengths


def _decoder_kinds(decoder: Any) -> set[str]:
    """Return the decoder types of a tokenizer.json, whose decoder may be a sequence."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoder_kinds(inner) for inner in decoder.get("decoders", [])))


def _token_bytes(token: str) -> int:
    """Return the bytes of a SentencePiece-style token: `▁` is a space, `<0x0A>` a byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("▁", " ").encode())


def byte_characters() -> list[str]:
    """Return the character by which byte-level tokenizers write each byte.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py: printable bytes stand for themselves, the others follow
    from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
