"""Rows of JSON lines and Parquet, one after the other, each with its location; blank lines are none."""

import io
from collections.abc import Iterator
from typing import Any, NamedTuple

from conf.formats import RunFileError
from conf.json_lines import LineError, parse_json
from trainer.corpus import files
from trainer.corpus.source import first_line

PARQUET = ".parquet"
MAX_ROW_BYTES = 2**26
"""Bytes of a line of JSON."""
MAX_FILE_BYTES = 2**32
"""Bytes of the rows of a Parquet file, as they are in memory; a dictionary makes them of a few kilobytes."""
ROWS_AT_ONCE = 256


class Row(NamedTuple):
    """A row and its location, for messages. problem: why it cannot be read; then `value` is None."""

    location: str
    value: Any
    problem: str = ""


def read_rows(pattern: str, key: str) -> Iterator[Row]:
    """Yield the rows of all files of a path or glob. Raises RunFileError naming the key if a file cannot be read."""
    for file in files.expand_glob(pattern, key):
        with files.open_file(file) as stream:
            files.refuse_packed(stream, file, key, is_parquet=file.endswith(PARQUET))
            yield from _parquet_rows(stream, file, key) if file.endswith(PARQUET) else _json_rows(stream, file, key)


def _json_rows(stream: io.BufferedReader, file: str, key: str) -> Iterator[Row]:
    # of bytes, since splitting as text would also split at U+2028
    for number, line in enumerate(iter(lambda: stream.readline(MAX_ROW_BYTES + 1), b""), 1):
        place = f"{file}, line {number}"
        if len(line) > MAX_ROW_BYTES:
            raise RunFileError(f"{key}: {place} has more than {MAX_ROW_BYTES:,} bytes")
        if not line.strip():
            continue
        try:
            yield Row(place, parse_json(line))
        except LineError as error:
            yield Row(place, None, str(error))
        except UnicodeDecodeError as error:
            yield Row(place, None, f"is not UTF-8 ({error.reason} at byte {error.start} of the line)")


def _parquet_rows(stream: io.BufferedReader, file: str, key: str) -> Iterator[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    number = 0
    try:
        opened, size = parquet.ParquetFile(stream), 0
        for batch in opened.iter_batches(ROWS_AT_ONCE):
            size += sum(_decoded_bytes(column) for column in batch.columns)
            if size > MAX_FILE_BYTES:
                raise RunFileError(f"{key}: {file} has more than {MAX_FILE_BYTES:,} bytes of rows; use fewer")
            batch = _as_written(batch)
            for index in range(batch.num_rows):
                number += 1
                place = f"{file}, row {number}"
                try:
                    yield Row(place, batch.slice(index, 1).to_pylist()[0])
                except UnicodeDecodeError as error:  # Parquet's readers do not check the encoding
                    yield Row(place, None, f"is not UTF-8: {error.reason}")
    except RunFileError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RunFileError(f"{key}: {file} is not a readable Parquet file: {first_line(error)}") from None


def _as_written(batch: Any) -> Any:
    """Return a batch in which numbers of 32 bits are the decimals that were written: 0.1, not 0.10000000149011612."""
    import pyarrow as pa

    for place, field in enumerate(batch.schema):
        if pa.types.is_float32(field.type):
            exact = batch.column(place).cast(pa.string()).cast(pa.float64())
            batch = batch.set_column(place, field.name, exact)
    return batch


def _decoded_bytes(column: Any) -> int:
    """Return the bytes of a column of a batch without its dictionary, if it has one."""
    return (column.dictionary_decode() if hasattr(column, "dictionary_decode") else column).nbytes
