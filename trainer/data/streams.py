"""Global batches from logical streams: rows of each stream, one position for all, prefetching.

Documents are packed into rows: a flat stream split at any token, or whole documents that share a row.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import finalize

import grain
import numpy as np
from grain.experimental import BestFitPackIterDataset, ThreadPrefetchDatasetIterator

from conf.formats import LocalRunFileError, RunFileError
from conf.schema.training.data import CustomDocuments, JsonlData, ParquetData, TextData
from conf.schema.training.loop import LmLoop
from trainer.corpus.files import expand_glob
from trainer.corpus.source import ByteRangeSource, DocumentSource, FunctionSource, json_parser, text_parser
from trainer.data.documents import DocumentEncoder, Documents, DocumentSplitter, Split
from trainer.distributed.mesh import Batch
from trainer.tokenizer.loading import Tokenizer

MAX_READERS = 8
"""Streams read in parallel, since one may wait for a bucket."""
NUM_BINS = 32
"""Rows filled at the same time; more rows mean less padding."""

PackedData = TextData | JsonlData | ParquetData | CustomDocuments


def train_batches(
    data: PackedData, tokenizer: Tokenizer, loop: LmLoop, seed: int, rows: range, ahead: bool
) -> "PackedBatches":
    """Return training batches, see `batches.Dataset.train_batches`."""
    whole = Split(
        open_source(data, data.path, "data.path"),
        fraction=data.eval_fraction,
        is_validation=False,
        streams=data.streams,
        seed=seed if data.shuffle else None,
        epochs=None,
        key="data.path",
        skips_bad_lines=data.on_bad_line == "skip",
    )
    return PackedBatches(_StreamGroup(data, whole, tokenizer, loop, rows), data, loop, ahead)


def validation_batches(data: PackedData, tokenizer: Tokenizer, loop: LmLoop, rows: range) -> list[Batch]:
    """Return validation batches, see `batches.Dataset.validation_batches`."""
    key = "data.path" if data.eval_path is None else "data.eval_path"
    whole = Split(
        open_source(data, data.eval_path or data.path, key),
        fraction=data.eval_fraction or 1.0,
        is_validation=True,
        streams=data.streams,
        seed=None,
        epochs=1,
        key=key,
        skips_bad_lines=data.on_bad_line == "skip",
    )
    if whole.is_empty():
        raise RunFileError(f"{key}: no document is left for validation; raise data.eval_fraction")
    together = _StreamGroup(data, whole, tokenizer, loop, rows)
    try:
        return [next(together) for _ in range(loop.eval_batches)]
    finally:
        together.close()


def open_source(data: PackedData, pattern: str, key: str) -> DocumentSource:
    """Open the files of `pattern`, the value of a config key, by the settings in `data`. Raises RunFileError."""
    if isinstance(data, CustomDocuments):
        return FunctionSource(data, pattern, key)
    found = expand_glob(pattern, key)
    if isinstance(data, TextData):
        return ByteRangeSource(found, (data.separator or "").encode(), text_parser("text"), key)
    columns, column_key = data.columns, "data.text_column" if data.template is None else "data.template"
    if isinstance(data, ParquetData):
        from trainer.corpus.parquet import ParquetSource

        return ParquetSource(found, columns, key, column_key)
    return ByteRangeSource(found, b"\n", json_parser(columns), key, column_key)


class _Prefetcher(ThreadPrefetchDatasetIterator):
    def __del__(self) -> None:
        """Skip grain's cleanup, which fails at interpreter exit; `finalize` has already closed the iterator."""


class PackedBatches:
    """Batches of packed documents, see `batches.BatchStream`."""

    def __init__(self, together: "_StreamGroup", data: PackedData, loop: LmLoop, ahead: bool) -> None:
        self._stream_group, self._reads_ahead = together, ahead and data.prefetch_batches > 0
        self._prefetcher = _Prefetcher(together, data.prefetch_batches)
        self._close = finalize(self, _close, self._prefetcher, together)  # closes it even if the owner does not
        self._start_reading()
        self._settings = {
            "data.packing": data.packing,
            "data.streams": data.streams,
            "loop.seq_len": loop.seq_len,
            "data.path": f"{together.num_groups} groups",
        }

    def __next__(self) -> Batch:
        try:
            return next(self._prefetcher)
        except RunFileError as error:
            raise LocalRunFileError(str(error)) from None

    def position(self) -> dict[str, Any]:
        return self._prefetcher.get_state() | {"of": self._settings}

    def left_out(self) -> dict[str, dict[str, int]]:
        names = {"bad_lines": "bad", "documents_left_out": "long"}
        states = self._prefetcher.get_state().items()
        return {stream: {name: _count(state, key) for name, key in names.items()} for stream, state in states}

    def restore(self, position: dict[str, Any]) -> None:
        began = position.get("of", {"data.packing": "windows"})
        for key, value in self._settings.items():
            if began.get(key) != value:
                raise RunFileError(
                    f"{key}: the checkpoint was written with {began.get(key)}, not {value}; resume with the original "
                    "data settings"
                )
        self._prefetcher.set_state({name: position[name] for name in self._stream_group.get_state()})
        self._start_reading()

    def close(self) -> None:
        self._close()

    def _start_reading(self) -> None:
        """Start prefetching before the first batch is requested, while the loop compiles."""
        if self._reads_ahead:
            self._prefetcher.start_prefetch()


def _count(state: dict[str, Any], key: str) -> int:
    """Return a count in the state of a stream's documents, which those of its packing contain."""
    inside = (_count(value, key) for value in state.values() if isinstance(value, dict))
    return state.get(key, 0) + sum(inside)


def _close(ahead: ThreadPrefetchDatasetIterator, together: "_StreamGroup") -> None:
    ahead.close()
    together.close()


class _StreamGroup:
    """Iterates over the next rows of a process's streams, in row order; its state holds theirs, by stream."""

    def __init__(self, data: PackedData, whole: Split, tokenizer: Tokenizer, loop: LmLoop, rows: range) -> None:
        if loop.rows % data.streams:
            raise RunFileError(
                f"data.streams: {data.streams} streams cannot share the {loop.rows} rows of a batch evenly; set a "
                f"divisor of {loop.rows}"
            )
        self._rows_per_stream = loop.rows // data.streams
        numbers = range(rows.start // self._rows_per_stream, -(-rows.stop // self._rows_per_stream))
        self.num_groups = len(whole.source)
        encode, whole = DocumentEncoder(data, tokenizer), whole.with_cached_groups()
        self._streams = {i: _stream_rows(data, whole, i, encode, loop.seq_len) for i in numbers}
        first = numbers.start * self._rows_per_stream
        self._own_rows = slice(rows.start - first, rows.stop - first)
        self._padding_row = padding_row(loop.seq_len, data.packing)
        self._pool = ThreadPoolExecutor(min(MAX_READERS, len(numbers)), thread_name_prefix="data")

    def __iter__(self) -> "_StreamGroup":
        return self

    def __next__(self) -> Batch:
        rows = [row for found in self._pool.map(self._next_rows, self._streams.values()) for row in found]
        return {name: np.stack([row[name] for row in rows[self._own_rows]]) for name in self._padding_row}

    def get_state(self) -> dict[str, Any]:
        return {str(i): stream.get_state() for i, stream in self._streams.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        for i, stream in self._streams.items():
            stream.set_state(state[str(i)])

    def close(self) -> None:
        self._pool.shutdown()

    def _next_rows(self, stream: grain.DatasetIterator) -> list[Batch]:
        return [next(stream, self._padding_row) for _ in range(self._rows_per_stream)]


def _stream_rows(
    data: PackedData, whole: Split, stream: int, encode: DocumentEncoder, sequence: int
) -> grain.DatasetIterator:
    if data.packing == "stream":
        return FlatRows(iter(Documents(whole, stream, encode, keep_whole, refuses=False)), sequence)
    cut = token_target_pairs(sequence, split=data.long_documents == "split")
    documents = Documents(whole, stream, encode, cut, refuses=data.long_documents == "error")
    return packed_rows(documents, sequence, None if whole.seed is None else whole.seed + stream)


def keep_whole(tokens: np.ndarray) -> list[np.ndarray]:
    """Keep a document whole, for a flat stream."""
    return [tokens] if len(tokens) else []


def token_target_pairs(sequence: int, *, split: bool) -> DocumentSplitter:
    """Return the splitter for documents that share rows: int32 [tokens, 3] of token, target and loss weight.

    Every token except a document's first is a target exactly once.
    """

    def cut(tokens: np.ndarray) -> list[np.ndarray] | str:
        found = np.concatenate([tokens[:-1, :1], tokens[1:]], axis=1)
        if len(found) > sequence and not split:
            return f"has {len(tokens)} tokens, more than loop.seq_len + 1 = {sequence + 1}"
        return [found[at : at + sequence] for at in range(0, len(found), sequence)]

    return cut


def packed_rows(documents: Documents, sequence: int, seed: int | None) -> grain.DatasetIterator:
    """Return rows of whole documents (see `token_target_pairs`), packed by best fit; a seed shuffles the bins."""
    packed = BestFitPackIterDataset(
        documents.map(lambda piece: {"pairs": piece}),
        length_struct={"pairs": sequence},
        num_packing_bins=NUM_BINS,
        shuffle_bins=seed is not None,
        seed=seed or 0,
    )
    return iter(packed.map(_to_row))


def padding_row(sequence: int, packing: str) -> Batch:
    zeros = np.zeros(sequence, np.int32)
    plain = {"tokens": zeros, "targets": zeros, "weights": np.zeros(sequence, np.float32)}
    return plain | ({"segments": zeros, "positions": zeros} if packing == "documents" else {})


def _to_row(bins: dict[str, np.ndarray]) -> Batch:
    tokens, targets, counts = bins["pairs"].T
    return {
        "tokens": tokens,
        "targets": targets,
        "weights": counts.astype(np.float32),
        "segments": bins["pairs_segment_ids"],
        "positions": bins["pairs_positions"],
    }


class FlatRows(grain.DatasetIterator):
    """Rows of a gapless stream; a row begins with the last target of the row before.

    The state is that of the documents before the next token's, and the token's offset in its document.
    """

    def __init__(self, documents: grain.DatasetIterator, sequence: int) -> None:
        super().__init__(documents)
        self._sequence = sequence
        self._buffer: deque[tuple[np.ndarray, Any]] = deque()  # documents, each with the state before it
        self._offset = 0

    def get_state(self) -> dict[str, Any]:
        return {"documents": self._buffer[0][1] if self._buffer else self._parent.get_state(), "token": self._offset}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["documents"])
        self._buffer.clear()
        self._offset = state["token"]

    def __next__(self) -> Batch:
        size = sum(len(tokens) for tokens, _ in self._buffer) - self._offset
        while size <= self._sequence:
            before = self._parent.get_state()
            try:
                tokens = next(self._parent)
            except StopIteration:
                break
            self._buffer.append((tokens, before))
            size += len(tokens)
        if size < 2:
            raise StopIteration
        return self._next_row()

    def _next_row(self) -> Batch:
        """Return the next row, padded at the end of the stream."""
        row = np.zeros((self._sequence + 1, 2), np.int32)
        filled = 0
        for tokens, _ in self._buffer:
            start = self._offset if filled == 0 else 0
            piece = tokens[start : start + self._sequence + 1 - filled]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
        self._offset += self._sequence
        while self._buffer and self._offset >= len(self._buffer[0][0]):
            self._offset -= len(self._buffer.popleft()[0])
        ids, counts = row.T
        return {"tokens": ids[:-1], "targets": ids[1:], "weights": counts[1:].astype(np.float32)}
