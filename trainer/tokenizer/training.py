"""Byte-pair encoding, trained on documents or converted from nanochat.

It has GPT-4's split, with numbers of at most two digits, as in nanochat.

https://arxiv.org/abs/1508.07909; the split: https://github.com/openai/tiktoken, cl100k_base.
"""

import io
import json
import pickle
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from conf.formats import RunFileError
from trainer.tokenizer import loading

SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = (
    "<|bos|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)
"""nanochat's special tokens, which get the last ids."""

MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""One id per byte and special token."""


def train_tokenizer(documents: Iterable[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE with `vocab` ids (265 or more), or fewer if the documents have too few pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # makes any byte encodable
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def take_documents(documents: Iterable[str], characters: int, longest: int) -> Iterator[str]:
    """Yield documents, each cut after `longest` characters, up to `characters` in total."""
    left = characters
    for document in documents:
        if left <= 0:
            return
        piece = document[: min(longest, left)]
        left -= len(piece)
        yield piece


ENCODING = ("tiktoken.core", "Encoding")
NUM_BYTES = 256


class _State:
    """Stands in for the Encoding."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_State]:
        if (module, name) != ENCODING:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and plain data do not")
        return _State

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to data outside the file")


def convert_nanochat(raw: bytes, whence: str) -> bytes:
    """Return the content of a tokenizer.json. Raises RunFileError with a message that begins with `whence`.

    The file is a pickle of a tiktoken `Encoding` (https://github.com/karpathy/nanochat, nanochat/tokenizer.py), whose
    state is plain data: a split pattern, the rank of each token, and the special tokens. A pickle can call any
    function, so it is read without one: each name but that class is refused, and what stands in for the class only
    keeps the state.
    """
    ranks, special, pattern = _read(raw, whence)
    letters = loading.byte_characters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    made = json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": i, "content": name, **flags, "special": True}
                for name, i in sorted(special.items(), key=lambda item: item[1])
            ],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "decoder": level,
            "model": {
                "type": "BPE",
                "vocab": {names[token]: rank for token, rank in ranks.items()},
                "merges": [[names[left], names[right]] for left, right in _merges(ranks)],
                "ignore_merges": True,  # as tiktoken: a piece of text that is a token is not split
            },
        }
    ).encode()
    found = loading.parse_tokenizer(made, whence)
    if found.special_tokens != special or found.vocab_size != len(ranks) + len(special):
        raise RunFileError(f"{whence}: ids of tokens must be 0, 1, … without a gap, with those of special tokens last")
    return made


def _read(raw: bytes, whence: str) -> tuple[dict[bytes, int], dict[str, int], str]:
    """Return the rank of each token, the special tokens, and the split pattern."""
    try:
        found = _PlainUnpickler(io.BytesIO(raw)).load()
        state = found.state if isinstance(found, _State) else found
        ranks, special, pattern = state["mergeable_ranks"], state["special_tokens"], state["pat_str"]
    except Exception as error:  # a damaged pickle raises nearly anything
        raise RunFileError(f"{whence} is not nanochat's tokenizer.pkl: {type(error).__name__}: {error}") from None
    is_plain = isinstance(ranks, dict) and isinstance(special, dict) and isinstance(pattern, str)
    is_plain = is_plain and all(type(key) is bytes and type(value) is int for key, value in ranks.items())
    if not is_plain or not all(type(key) is str and type(value) is int for key, value in special.items()):
        raise RunFileError(f"{whence} is not nanochat's tokenizer.pkl: ranks of bytes, special tokens and a pattern")
    if any(bytes([byte]) not in ranks for byte in range(NUM_BYTES)):
        raise RunFileError(f"{whence}: a byte has no token, so not every text can be encoded")
    return ranks, special, pattern


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pairs that tiktoken would merge, the first to be merged first: each way to split a token in two."""
    pairs = [
        (rank, ranks[token[:i]], token[:i], token[i:])
        for token, rank in ranks.items()
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    return [(left, right) for _, _, left, right in sorted(pairs)]
