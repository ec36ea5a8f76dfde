"""nanochat's tokenizer.pkl as a tokenizer.json: the same ids for every text.

The file is a pickle of a tiktoken `Encoding` (https://github.com/karpathy/nanochat, nanochat/tokenizer.py), whose state
is plain data: a split pattern, the rank of each token, and the special tokens. A pickle can call any function, so it is
read without one: each name but that class is refused, and what stands in for the class only keeps the state.
"""

import io
import json
import pickle
from typing import Any, NoReturn

from tokenizers import pre_tokenizers

from conf.schema.training.run_yaml import RunFileError
from trainer.tokenizer import loading

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


def convert(raw: bytes, whence: str) -> bytes:
    """Return the content of a tokenizer.json. Raises RunFileError with a message that begins with `whence`."""
    ranks, special, pattern = _read(raw, whence)
    letters = _letters()
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


def _letters() -> dict[int, str]:
    """Return the printable character that stands for each byte in a tokenizer.json."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(NUM_BYTES + i) for i, byte in enumerate(others)}
    assert set(letters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters
