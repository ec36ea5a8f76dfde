"""Parquet (https://parquet.apache.org) as groups of documents: row groups, reading only the columns needed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import parquet, types

from conf.formats import RunFileError
from trainer.corpus import files, source
from trainer.corpus.source import BadLineError, Document, Group

FOOTERS_AT_ONCE = 16
ROWS_AT_ONCE = 1024
"""Rows of a group that are decoded at a time; fewer where they are long."""


class ParquetSource:
    """Row groups of all files, in order. Raises RunFileError if a file is not Parquet or lacks the columns."""

    def __init__(self, found: list[str], columns: tuple[str, ...], key: str, column_key: str) -> None:
        self._columns, self._key, self._column_key = list(columns), key, column_key
        self._files = files.UnchangingFiles(key)
        with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
            filled = list(pool.map(self._nonempty_groups, found))
        self._groups = [(file, i) for file, groups in zip(found, filled, strict=True) for i in groups]
        if not self._groups:
            raise RunFileError(f"{key}: {found[0]} has no rows" + (", nor has any other file" * (len(found) > 1)))

    def __len__(self) -> int:
        return len(self._groups)

    def read(self, number: int) -> Group:
        file, index = self._groups[number]
        place = f"{file}, row group {index},"
        try:
            with self._files.open(file) as stream:
                table = _bounded_table(parquet.ParquetFile(stream), index, self._columns)
        except _TooLargeError as error:
            raise RunFileError(f"{self._key}: {place} {error}; write smaller row groups") from None
        except RunFileError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise RunFileError(f"{self._key}: {place} cannot be read: {source.first_line(error)}") from None
        return _RowGroup(table, place, self._key, self._column_key)

    def _nonempty_groups(self, file: str) -> list[int]:
        try:
            with self._files.open(file) as stream:
                files.refuse_packed(stream, file, self._key, is_parquet=True)
                opened = parquet.ParquetFile(stream)
                schema, footer = opened.schema_arrow, opened.metadata
        except RunFileError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise RunFileError(f"{self._key}: {file} is not a Parquet file: {source.first_line(error)}") from None
        for column in self._columns:
            if column not in schema.names:
                message = f"{file} has no column {column!r}; it has {', '.join(map(repr, schema.names))}"
                raise RunFileError(f"{self._column_key}: {message}")
            if not _is_text(schema.field(column).type):
                message = f"{file}: column {column!r} contains {schema.field(column).type}, not text"
                raise RunFileError(f"{self._column_key}: {message}")
        return [i for i in range(footer.num_row_groups) if footer.row_group(i).num_rows]


class _TooLargeError(ValueError):
    """A row group has more text than is read into memory."""


def _bounded_table(opened: Any, index: int, columns: list[str]) -> pa.Table:
    """Read a row group in batches: a dictionary makes gigabytes of a few kilobytes, and no footer tells how many."""
    footer = opened.metadata.row_group(index)
    largest = max((footer.column(i).total_uncompressed_size for i in range(footer.num_columns)), default=0)
    rows = max(1, min(ROWS_AT_ONCE, source.MAX_DOCUMENT_BYTES // max(largest, 1)))
    batches, size = list[Any](), 0
    for batch in opened.iter_batches(batch_size=rows, row_groups=[index], columns=columns, use_threads=False):
        batches.append(batch)
        size += batch.nbytes
        if size > source.MAX_DOCUMENT_BYTES:
            raise _TooLargeError(f"has more than {source.MAX_DOCUMENT_BYTES:,} bytes of text")
    return pa.Table.from_batches(batches).combine_chunks()


@dataclass(frozen=True)
class _RowGroup:
    table: pa.Table
    group_location: str
    key: str
    column_key: str

    def __len__(self) -> int:
        return self.table.num_rows

    def take(self, numbers: Sequence[int]) -> list[Document]:
        try:
            rows = self.table.take(list(numbers)).to_pylist()
        except UnicodeDecodeError as error:  # Parquet's readers do not check the encoding
            raise BadLineError(
                f"{self.key}: {self.group_location} contains text that is not UTF-8: {error.reason}"
            ) from None
        for number, row in zip(numbers, rows, strict=True):
            for name, text in row.items():
                if text is None:
                    raise BadLineError(
                        f"{self.column_key}: {self.location(number)} has no text in column {name!r}, but null"
                    )
        return rows

    def location(self, number: int) -> str:
        return f"{self.group_location} row {number}"


def _is_text(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return types.is_null(kind) or types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
