"""Documents of one logical stream, in an order set by the seed, with an exact position.

Streams partition the documents of a data set. With enough groups, whole groups are assigned to streams; otherwise every
stream reads all groups and their documents are split. Neither depends on the number of processes.
"""

import logging
import re
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grain
import numpy as np

from conf.formats import RunFileError
from conf.schema.training.data import Corpus, CustomDocuments, TableData, TextData
from trainer.corpus.source import BadLineError, CachedSource, Document, DocumentSource, Group
from trainer.tokenizer.loading import Tokenizer, special_id


class DocumentEncoder:
    """Encodes documents by `data`: BOS, text, EOS; of a prompt and its answer only the answer and EOS count."""

    def __init__(self, data: Corpus, tokenizer: Tokenizer) -> None:
        """Raise RunFileError if the tokenizer lacks a special token."""
        self._tokenizer = tokenizer
        self._bos = [] if data.bos is None else [special_id(tokenizer, data.bos, "data.bos")]
        self._eos = [] if data.eos is None else [special_id(tokenizer, data.eos, "data.eos")]
        self._template = data.template if isinstance(data, TableData) else None
        self._column = "text" if isinstance(data, TextData | CustomDocuments) else getattr(data, "text_column", None)
        self._remove = re.compile(self._template.remove) if self._template and self._template.remove else None

    def __call__(self, rows: Sequence[Document]) -> list[np.ndarray]:
        if self._template is None:
            assert self._column is not None
            texts = self._tokenizer.encode([row[self._column] for row in rows])
            return [self._to_array((), ids, bos_counts=1) for ids in texts]
        prompts = self._tokenizer.encode([self._fill_template(self._template.prompt, row) for row in rows])
        answers = self._tokenizer.encode([self._fill_template(self._template.answer, row) for row in rows])
        return [self._to_array(prompt, answer, bos_counts=0) for prompt, answer in zip(prompts, answers, strict=True)]

    def _to_array(self, prompt: Sequence[int] | np.ndarray, text: np.ndarray, bos_counts: int) -> np.ndarray:
        ids = np.concatenate([self._bos, prompt, text, self._eos]).astype(np.int32)
        counts = np.ones(len(ids), np.int32)
        counts[: len(self._bos)] = bos_counts
        counts[len(self._bos) : len(self._bos) + len(prompt)] = 0
        return np.stack([ids, counts], axis=1)

    def _fill_template(self, template: str, row: Document) -> str:
        columns = {name: self._remove.sub("", text) if self._remove else text for name, text in row.items()}
        return template.format_map(columns)


GROUPS_PER_STREAM = 8
"""With fewer groups, whole-group assignment would give streams of very different lengths."""
ENCODE_BATCH_SIZE = 32
"""Documents encoded per call, so that a tokenizer can use several threads."""
CACHED_GROUPS = 3

logger = logging.getLogger(__name__)

DocumentSplitter = Callable[[np.ndarray], "list[np.ndarray] | str"]
"""Returns a document's pieces, in order, or the reason it has none."""


@dataclass(frozen=True)
class Split:
    """The training or validation part of a data set."""

    source: DocumentSource
    fraction: float  # of the documents, held out for validation
    is_validation: bool
    streams: int
    seed: int | None  # None: file order
    epochs: int | None  # None: endless
    key: str  # config key, for messages
    skips_bad_lines: bool = False

    @property
    def splits_by_group(self) -> bool:
        return len(self.source) >= GROUPS_PER_STREAM * self.streams

    def group_order(self, stream: int, epoch: int) -> np.ndarray:
        """Return the groups that a stream reads in an epoch, in order."""
        if self.splits_by_group:
            return self._shuffled(np.arange(stream, len(self.source), self.streams), epoch, stream)
        return self._shuffled(np.arange(len(self.source)), epoch)  # the same for all streams, so they can share groups

    def document_order(self, stream: int, epoch: int, group: int, count: int) -> np.ndarray:
        """Return a stream's document indices among the `count` of a group, in order."""
        numbers = self._in_split(group, count)
        if not self.splits_by_group:
            numbers = numbers[(stream - _group_offset(group)) % self.streams :: self.streams]
        return self._shuffled(numbers, epoch, group)

    def with_cached_groups(self) -> "Split":
        """Return a split that reads groups common to all streams once, if the streams advance together."""
        return self if self.splits_by_group else replace(self, source=CachedSource(self.source, CACHED_GROUPS))

    def is_empty(self) -> bool:
        """Return whether no stream has a document, reading groups until one is found."""
        sizes = ((i, len(self.source.read(i))) for i in range(len(self.source)))
        return not any(self._in_split(group, count).size for group, count in sizes)

    def _in_split(self, group: int, count: int) -> np.ndarray:
        """Return the indices of a group's documents in this part."""
        shares = np.floor((np.arange(count + 1) + _group_offset(group)) * self.fraction)
        return np.flatnonzero((np.diff(shares) > 0) == self.is_validation)

    def _shuffled(self, numbers: np.ndarray, *at: int) -> np.ndarray:
        return numbers if self.seed is None else np.random.default_rng((self.seed, *at)).permutation(numbers)


def _group_offset(group: int) -> int:
    """Return a group-specific offset; without it every part or stream would get each group's first documents."""
    return zlib.crc32(str(group).encode()) % 4096


class Documents(grain.IterDataset):
    """Pieces of documents, int32 [tokens, columns of `cut`]."""

    def __init__(
        self, whole: Split, stream: int, encode: DocumentEncoder, cut: DocumentSplitter, *, refuses: bool
    ) -> None:
        """Create the stream. refuses: raise an error for a document without pieces instead of skipping it."""
        super().__init__()
        self._iterator_args = (whole, stream, encode, cut, refuses)

    def __iter__(self) -> "_DocumentIterator":
        return _DocumentIterator(*self._iterator_args)


class _DocumentIterator(grain.DatasetIterator):
    """Iterator with state {epoch, group, document, piece}, each an index within the stream in the epoch's order.

    `bad` and `long` count the lines and the long documents that were skipped before; an older position lacks them.
    """

    def __init__(
        self, whole: Split, stream: int, encode: DocumentEncoder, cut: DocumentSplitter, refuses: bool
    ) -> None:
        super().__init__()
        self._split, self._stream, self._encode, self._cut, self._refuses = whole, stream, encode, cut, refuses
        self._warned = self._warned_of_bad = False
        self.set_state({"epoch": 0, "group": 0, "document": 0, "piece": 0, "bad": 0, "long": 0})

    def get_state(self) -> dict[str, Any]:
        return dict(self._state)

    def set_state(self, state: dict[str, Any]) -> None:
        self._state = dict(state)
        self._epoch, self._at, self._document = state["epoch"], state["group"], state["document"]
        self._skip, self._bad, self._long = state["piece"], state.get("bad", 0), state.get("long", 0)
        self._barren = self._at == self._document == self._skip == 0  # no piece from this epoch yet
        self._ready: deque[tuple[np.ndarray, dict[str, int]]] = deque()
        self._groups: np.ndarray | None = None
        self._group: Group | None = None

    def __next__(self) -> np.ndarray:
        while not self._ready:
            if self._epoch == self._split.epochs:
                raise StopIteration
            self._advance()
        piece, self._state = self._ready.popleft()
        return piece

    def _advance(self) -> None:
        """Encode the next few documents, or advance to the next group or epoch."""
        if self._groups is None:
            self._groups = self._split.group_order(self._stream, self._epoch)
        if self._at >= len(self._groups):
            self._end_epoch()
            return
        number = int(self._groups[self._at])
        if self._group is None:
            self._group = self._split.source.read(number)
            self._numbers = self._split.document_order(self._stream, self._epoch, number, len(self._group))
        chosen = self._numbers[self._document : self._document + ENCODE_BATCH_SIZE]
        if chosen.size:
            documents = self._take(self._group, chosen.tolist())
            encoded = iter(self._encode([row for row in documents if not isinstance(row, BadLineError)]))
            for number, row in zip(chosen.tolist(), documents, strict=True):
                if isinstance(row, BadLineError):
                    self._skip_line(row)
                else:
                    self._add_pieces(next(encoded), self._group, number)
        if self._document >= len(self._numbers):
            self._group, self._at, self._document = None, self._at + 1, 0

    def _take(self, group: Group, numbers: list[int]) -> list[Document | BadLineError]:
        """Return documents, or why each cannot be used. Raises BadLineError if none may be skipped."""
        try:
            return [*group.take(numbers)]
        except BadLineError:
            if not self._split.skips_bad_lines:
                raise
        return [_take_one(group, number) for number in numbers]

    def _skip_line(self, error: BadLineError) -> None:
        if not self._warned_of_bad:
            logger.warning("%s; it and other such lines are skipped (data.on_bad_line)", error)
        self._warned_of_bad = True
        self._bad, self._document, self._skip = self._bad + 1, self._document + 1, 0

    def _add_pieces(self, tokens: np.ndarray, group: Group, number: int) -> None:
        pieces = self._cut(tokens)
        if isinstance(pieces, str):
            self._skip_document(f"{group.location(number)} {pieces}")
            pieces, self._long = [], self._long + 1
        last = len(pieces) - 1
        skipped = {"bad": self._bad, "long": self._long}
        at = {"epoch": self._epoch, "group": self._at, "document": self._document, **skipped}
        for i, piece in enumerate(pieces):
            after = at | {"piece": i + 1} if i < last else at | {"document": self._document + 1, "piece": 0}
            if i >= self._skip:
                self._ready.append((piece, after))
        self._barren = self._barren and not pieces
        self._skip = 0
        self._document += 1

    def _skip_document(self, message: str) -> None:
        if self._refuses:
            raise RunFileError(f"data.long_documents: {message}; set split or skip, or raise loop.seq_len")
        if not self._warned:
            logger.warning("%s; it and other such documents are skipped", message)
        self._warned = True

    def _end_epoch(self) -> None:
        if self._barren and self._split.epochs is None:
            raise RunFileError(self._empty_message())
        self._epoch, self._at, self._groups, self._barren = self._epoch + 1, 0, None, True

    def _empty_message(self) -> str:
        whole = self._split
        if self._warned_of_bad:
            return f"{whole.key}: stream {self._stream} has no line that can be used"
        if self._warned:
            return f"data.long_documents: stream {self._stream} has no document that fits; set split"
        if whole.streams > 1:
            return (
                f"data.streams: {whole.streams} streams are too many for {whole.key}: stream {self._stream} gets no "
                "document; set fewer"
            )
        return f"{whole.key}: no documents to train on"


def _take_one(group: Group, number: int) -> Document | BadLineError:
    try:
        return group.take([number])[0]
    except BadLineError as error:
        return error
