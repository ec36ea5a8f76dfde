"""Encode documents as token arrays, int32 [tokens, 2]: the id, and 1 if its prediction counts in the loss."""

import re
from collections.abc import Sequence

import numpy as np

from conf.schema.training.data import Corpus, TableData, TextData
from conf.schema.training.run_yaml import RunFileError
from trainer.corpus.source import Document
from trainer.tokenizer.loading import Tokenizer


class DocumentEncoder:
    """Encodes documents by `data`: BOS, text, EOS; of a prompt and its answer only the answer and EOS count."""

    def __init__(self, data: Corpus, tokenizer: Tokenizer) -> None:
        """Raise RunFileError if the tokenizer lacks a special token."""
        self._tokenizer = tokenizer
        self._bos = [_special_id(name, "data.bos", tokenizer) for name in (data.bos,) if name is not None]
        self._eos = [_special_id(name, "data.eos", tokenizer) for name in (data.eos,) if name is not None]
        self._template = data.template if isinstance(data, TableData) else None
        self._column = "text" if isinstance(data, TextData) else getattr(data, "text_column", None)
        self._remove = re.compile(self._template.remove) if self._template and self._template.remove else None

    def __call__(self, rows: Sequence[Document]) -> list[np.ndarray]:
        if self._template is None:
            assert self._column is not None
            texts = self._tokenizer.encode([row[self._column] for row in rows])
            return [self._document((), ids, bos_counts=1) for ids in texts]
        prompts = self._tokenizer.encode([self._filled(self._template.prompt, row) for row in rows])
        answers = self._tokenizer.encode([self._filled(self._template.answer, row) for row in rows])
        return [self._document(prompt, answer, bos_counts=0) for prompt, answer in zip(prompts, answers, strict=True)]

    def _document(self, prompt: Sequence[int] | np.ndarray, text: np.ndarray, bos_counts: int) -> np.ndarray:
        ids = np.concatenate([self._bos, prompt, text, self._eos]).astype(np.int32)
        counts = np.ones(len(ids), np.int32)
        counts[: len(self._bos)] = bos_counts
        counts[len(self._bos) : len(self._bos) + len(prompt)] = 0
        return np.stack([ids, counts], axis=1)

    def _filled(self, template: str, row: Document) -> str:
        columns = {name: self._remove.sub("", text) if self._remove else text for name, text in row.items()}
        return template.format_map(columns)


def _special_id(name: str, key: str, tokenizer: Tokenizer) -> int:
    if name not in tokenizer.special:
        choices = ", ".join(tokenizer.special) or "none"
        raise RunFileError(f"{key}: the tokenizer has no special token {name}; it has {choices}")
    return tokenizer.special[name]
