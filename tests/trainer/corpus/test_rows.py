"""Rows: what is no text is named whichever reader meets it, and numbers are those that were written."""

import bz2
import gzip
import io
import lzma
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from conf.formats import RunFileError
from tests.trainer.data.corpora import lm_loop, write_jsonl, write_parquet, write_text
from trainer.corpus.rows import read_rows
from trainer.data import batches
from trainer.puzzles import sources

ROWS = b'{"text": "one"}\n\n \t\r\n{"text": "two"}\n'


def zipped(raw: bytes) -> bytes:
    """Stored as it is: nearly all of it is text."""
    with zipfile.ZipFile(whole := io.BytesIO(), "w") as archive:
        archive.writestr("a.jsonl", raw)
    return whole.getvalue()


def by_arrow(codec: str) -> Callable[[bytes], bytes]:
    def packed(raw: bytes) -> bytes:
        with pa.CompressedOutputStream(whole := pa.BufferOutputStream(), codec) as stream:
            stream.write(raw)
        return whole.getvalue().to_pybytes()

    return packed


def as_parquet(_: bytes) -> bytes:
    parquet.write_table(pa.table({"text": ["one"]}), whole := pa.BufferOutputStream())
    return whole.getvalue().to_pybytes()


PACKERS = {
    "gzip: unpack it with gunzip": gzip.compress,
    "Zstandard: unpack it with unzstd": by_arrow("zstd"),
    "bzip2: unpack it with bunzip2": bz2.compress,
    "xz: unpack it with unxz": lzma.compress,
    "LZ4: unpack it with unlz4": by_arrow("lz4"),
    "a zip archive: unpack it with unzip": zipped,
}


def of_corpus(data: batches.Data) -> None:
    with closing(batches.Dataset(data).train_batches(lm_loop(8, 32), 0, range(8))) as stream:
        next(stream)


READERS: dict[str, Callable[[Path], object]] = {
    "rows": lambda file: list(read_rows(str(file), "data.path")),
    "jsonl": lambda file: of_corpus(
        write_jsonl(Path(f"{file}.x"), ["x"], on_bad_line="skip").model_copy(update={"path": str(file)})
    ),
    "parquet": lambda file: of_corpus(
        write_parquet(Path(f"{file}.x"), ["x"], 1).model_copy(update={"path": str(file)})
    ),
    "windows": lambda file: of_corpus(write_text(Path(f"{file}.x"), ["x"]).model_copy(update={"path": str(file)})),
    "text": lambda file: of_corpus(
        write_text(Path(f"{file}.x"), ["x"], packing="stream").model_copy(update={"path": str(file)})
    ),
    "puzzles": lambda file: list(sources._rows(str(file), needs_rating=False)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("told", [*PACKERS, "Parquet: read it with data=parquet"])
def test_what_is_compressed_is_named_by_every_reader(tmp_path: Path, reader: str, told: str) -> None:
    """Whatever its name, and even where bad lines are to be skipped."""
    if told.startswith("Parquet") and reader == "parquet":
        return
    (tmp_path / "a.txt").write_bytes(PACKERS.get(told, as_parquet)(20 * ROWS))
    with pytest.raises(RunFileError, match=rf"^(data\.path|--source): {tmp_path}/a\.txt is (compressed by )?{told}"):
        READERS[reader](tmp_path / "a.txt")


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n" + ROWS + b"\n\n")
    assert [row.value["text"] for row in read_rows(str(tmp_path / "a.jsonl"), "data.path")] == ["one", "two"]
    (tmp_path / "a.csv").write_text("rating,question,answer\n\n7,12,21\n\n\n8,34,43\n\n")
    found = list(sources._rows(str(tmp_path / "a.csv"), needs_rating=True))
    assert [(row.question, row.rating) for row in found] == [("12", 7), ("34", 8)]


def test_numbers_of_32_bits_are_the_decimals_that_were_written(tmp_path: Path) -> None:
    written = [0.1, 2.5, 1e-7, 3.1415927, 1e10, None]
    table = pa.table({"x": pa.array(written, pa.float32()), "y": pa.array(written, pa.float64()), "n": range(6)})
    parquet.write_table(table, tmp_path / "a.parquet")
    rows = [row.value for row in read_rows(str(tmp_path / "a.parquet"), "data.path")]
    assert [row["x"] for row in rows] == [row["y"] for row in rows] == written
