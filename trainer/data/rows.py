"""Rows with named columns, from JSON lines or Parquet, all in memory: the questions of the GRPO loop."""

import json
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from conf.schema.training.run_yaml import RunFileError
from trainer.corpus import files
from trainer.corpus.source import LineError, parse_json

PARQUET = ".parquet"


class Row(NamedTuple):
    """A row and its location, for messages. problem: why it cannot be read; then `value` is None."""

    location: str
    value: Any
    problem: str = ""


def read_rows(pattern: str, key: str) -> Iterator[Row]:
    """Yield the rows of all files of a path or glob. Raises RunFileError naming the key if a file cannot be read."""
    for file in files.expand_glob(pattern, key):
        with files.open_file(file) as stream:
            yield from _parquet_rows(stream, file, key) if file.endswith(PARQUET) else _json_rows(stream, file)


def _json_rows(stream: IO[bytes], file: str) -> Iterator[Row]:
    for number, line in enumerate(stream, 1):  # of bytes, since splitting as text would also split at U+2028
        place = f"{file}, line {number}"
        try:
            yield Row(place, parse_json(line))
        except LineError as error:
            yield Row(place, None, str(error))
        except UnicodeDecodeError as error:
            yield Row(place, None, f"is not UTF-8 ({error.reason} at byte {error.start} of the line)")


def _parquet_rows(stream: IO[bytes], file: str, key: str) -> Iterator[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(stream).iter_batches():
            for index in range(batch.num_rows):
                number += 1
                place = f"{file}, row {number}"
                try:
                    yield Row(place, batch.slice(index, 1).to_pylist()[0])
                except UnicodeDecodeError as error:  # Parquet's readers do not check the encoding
                    yield Row(place, None, f"is not UTF-8: {error.reason}")
    except (pa.ArrowException, OSError) as error:
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunFileError(f"{key}: {file} is not a readable Parquet file: {message}") from None


def abbreviate(value: object) -> str:
    """Return a value as JSON, cut, for messages."""
    return json.dumps(value, default=repr)[:80]
