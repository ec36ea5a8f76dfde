"""A token per character of one small text, like nanoGPT's shakespeare_char."""

from collections.abc import Sequence

import numpy as np

from conf.schema.training.run_yaml import RunFileError


class CharacterTokenizer:
    """Ids are the characters of a text, in the order of Unicode."""

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
