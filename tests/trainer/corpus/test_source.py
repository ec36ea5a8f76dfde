"""Reading: documents are found wherever they lie, few are held, and bad files are named."""

import random
import weakref
from contextlib import closing

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from conf.formats import RunFileError
from conf.schema.training.data import JsonlData
from tests.conftest import wide
from tests.trainer.data.corpora import lm_loop, make_documents, write_jsonl, write_parquet
from trainer.corpus import files, rows, source
from trainer.corpus.parquet import ParquetSource
from trainer.corpus.rows import read_rows
from trainer.data import batches
from trainer.distributed.mesh import Batch

LOOP = lm_loop(8, 32)


def last_batch(data, count: int) -> Batch:
    with closing(batches.Dataset(data).train_batches(LOOP, 0, range(8))) as stream:
        return [next(stream) for _ in range(count)][-1]


def first_batch(data) -> Batch:
    return last_batch(data, 1)


@given(
    pieces=st.lists(st.text("ab\r", max_size=9), max_size=12),
    separator=st.sampled_from(["\n", "\n\n", "<>"]),
    size=st.integers(1, 7),
)
def test_ranges_of_bytes_hold_every_document_once(tmp_path_factory, pieces, separator, size):
    path = tmp_path_factory.mktemp("ranges") / "text"
    path.write_bytes(separator.join([*pieces, "end"]).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "GROUP_BYTES", size)
        patch.setattr(source, "CHUNK_BYTES", 1 + size // 2)
        ranges = source.ByteRangeSource([str(path)], separator.encode(), source.text_parser("text"), "data.path")
        groups = [ranges.read(i) for i in range(len(ranges))]
        found = [row["text"] for group in groups for row in group.take(range(len(group)))]
    assert [text.strip("\n") for text in found] == [piece for piece in [*pieces, "end"] if piece.strip()]


def test_globs_are_sorted_folders_are_searched_and_files_that_are_not_there_are_named(tmp_path):
    for name in ("b.txt", "a.txt", "c.md", "deep/d.txt", "what[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert files.expand_glob(f"{tmp_path}/?.txt", "data.path") == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]
    assert len(files.expand_glob(f"{tmp_path}/**/*.txt", "data.path")) == 4
    assert files.expand_glob(f"{tmp_path}/what[1].txt", "data.path") == [f"{tmp_path}/what[1].txt"]
    for name, words in (("absent", "does not exist"), ("*.parquet", "no file matches"), ("", "is a folder; name the")):
        with pytest.raises(RunFileError, match=rf"^data\.eval_path: .*{words}"):
            files.expand_glob(f"{tmp_path}/{name}", "data.eval_path")


@pytest.mark.parametrize("rows_per_group", [2, 40])
def test_few_row_groups_are_held(tmp_path, monkeypatch, rows_per_group):
    """Of many, one for each stream; of few, which all streams read, those that are shared besides."""
    held: weakref.WeakSet = weakref.WeakSet()
    most, read = 0, ParquetSource.read

    class Watched:
        def __init__(self, group) -> None:
            self.take, self.location, self._size = group.take, group.location, len(group)

        def __len__(self) -> int:
            return self._size

    def watched(self, number):
        nonlocal most
        group = Watched(read(self, number))
        held.add(group)
        most = max(most, len(held))
        return group

    monkeypatch.setattr(ParquetSource, "read", watched)
    data = write_parquet(tmp_path / "a.parquet", make_documents(240), rows_per_group, streams=4, prefetch_batches=2)
    last_batch(data, 60)
    assert most <= 4 + 3


TEMPLATE = {"prompt": "{question}", "answer": "{text}", "remove": None}


@pytest.mark.parametrize(
    ("texts", "keys", "words"),
    [
        (["x"], {"text_column": "body"}, r"text_column: .*a\.parquet has no column 'body'; it has 'id', 'text'$"),
        (["x"], {"text_column": "id"}, r"text_column: .*a\.parquet: column 'id' contains int64, not text$"),
        (
            ["x"],
            {"text_column": None, "template": TEMPLATE, "eos": "<eos>"},
            r"template: .* has no column 'question'; it has 'id', 'text'$",
        ),
        ([], {}, r"path: .*a\.parquet has no rows$"),
        (None, {}, r"path: .*a\.parquet is not a Parquet file: "),
    ],
)
def test_bad_parquet(tmp_path, texts, keys, words):
    data = write_parquet(tmp_path / "a.parquet", texts or [], 1, **keys)
    if texts is None:
        (tmp_path / "a.parquet").write_text("no parquet at all")
    with pytest.raises(RunFileError, match=rf"^data\.{words}"):
        first_batch(data)


def test_a_corrupt_row_group_bytes_that_are_no_text_and_missing_texts_are_named_or_skipped(tmp_path):
    path = tmp_path / "a.parquet"
    data = write_parquet(path, ["x", None, "y"], 3, streams=1)
    with pytest.raises(
        RunFileError, match=r"^data\.text_column: .*row group 0, row 1 has no text in column 'text', but null"
    ):
        first_batch(data)
    skipping = data.model_copy(update={"on_bad_line": "skip"})
    assert set(first_batch(skipping)["tokens"].flat) == {257, ord("x"), ord("y")}
    parquet.write_table(pa.table({"text": pa.array([b"ok", b"\xff\xfe"]).view(pa.string())}), path)
    with pytest.raises(RunFileError, match=r"^data\.path: .*a\.parquet, row group 0, contains text that is not"):
        first_batch(data)
    assert set(first_batch(skipping)["tokens"].flat) == {257, ord("o"), ord("k")}
    write_parquet(path, make_documents(200), 100)
    path.write_bytes(path.read_bytes()[:4] + b"\xee" * 1996 + path.read_bytes()[2000:])
    with pytest.raises(RunFileError, match=r"^data\.path: .*a\.parquet, row group 0, cannot be read: "):
        last_batch(data, 40)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (b"", r"data\.path: .*a\.jsonl is empty"),
        (b"\n \n", r"data\.path: no documents to train on"),
        (b'{"text": "a"}\n\n{"text": \n', r"data\.path: .*a\.jsonl:3 is not JSON: Expecting value, at character 9"),
        (b'{"text": "a"}\n["b"]\n', r'data\.text_column: .*a\.jsonl:2 is not an object with columns, but \["b"\]'),
        (b'{"body": "a"}\n', r"data\.text_column: .*a\.jsonl:1 has no column 'text'; it has 'body'"),
        (b'{"text": 5}\n', r"data\.text_column: .*a\.jsonl:1 has no text in column 'text', but 5"),
        (b'{"text": "\xff"}\n', r"data\.path: .*a\.jsonl:1 is not UTF-8 \(invalid start byte at byte 10 of the file\)"),
        (b'{"text": "a \\ud83d"}\n', r"data\.path: .*a\.jsonl:1 has half of a surrogate pair, .*, in column 'text'"),
        (b'{"text": ' + b"9" * 5000 + b"}\n", r"data\.path: .*a\.jsonl:1 has a number with too many digits"),
        (b'{"text": "a", "text": "b"}\n', r"data\.path: .*a\.jsonl:1 has 'text' more than once in an object"),
        (
            b'{"text": "a", "more": [{"n": 1, "n": 1}]}\n',
            r"data\.path: .*a\.jsonl:1 has 'n' more than once in an object",
        ),
    ],
)
def test_bad_lines(tmp_path, lines, words):
    data = write_jsonl(tmp_path / "a.jsonl", ["x"], streams=1)
    (tmp_path / "a.jsonl").write_bytes(lines)
    with pytest.raises(RunFileError, match=f"^{words}"):
        first_batch(data)


def test_a_bad_line_in_a_late_range_has_its_own_number(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "GROUP_BYTES", 64)
    monkeypatch.setattr(source, "CHUNK_BYTES", 7)
    data = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 50, streams=1)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("oops\n")
    with pytest.raises(RunFileError, match=r"a\.jsonl:51 is not JSON"):
        last_batch(data, 40)


ANSWER = {"prompt": "a", "answer": "{b}", "remove": None}


def test_keys_that_contradict_each_other(tmp_path):
    good = write_jsonl(tmp_path / "a.jsonl", ["x"]).model_dump(mode="json")
    for keys, words in (
        ({"eval_path": "x"}, "are both set; add data.eval_fraction=0 for the files, or data.eval_path=null"),
        ({"eval_fraction": 0}, "set eval_path, or an eval_fraction above 0"),
        ({"text_column": None}, "set either text_column"),
        ({"template": ANSWER}, "set either text_column"),
        ({"text_column": None, "template": ANSWER}, "eos: needed with template"),
        ({"text_column": None, "template": ANSWER | {"answer": "{b.c}"}}, "contain only a column name"),
        ({"text_column": None, "template": ANSWER | {"answer": "{b"}}, "expected '}'"),
        ({"text_column": None, "template": ANSWER | {"remove": "("}}, "not a valid regular expression"),
    ):
        with pytest.raises(ValueError, match=words):
            JsonlData(**good | keys)


class TestHostileFiles:
    """Data sets of strangers: what is cut, altered or swollen is named, within bounds of memory."""

    def read(self, path) -> int:
        found = ParquetSource([str(path)], ("text",), "data.path", "data.text_column")
        return sum(len(found.read(i).take(range(len(found.read(i))))) for i in range(len(found)))

    def test_a_parquet_file_that_is_cut_anywhere(self, tmp_path):
        write_parquet(tmp_path / "a.parquet", make_documents(40), 10)
        raw = (tmp_path / "a.parquet").read_bytes()
        for size in range(0, len(raw), 97):
            (tmp_path / "a.parquet").write_bytes(raw[:size])
            with pytest.raises(RunFileError, match=r"^data\.path: .*a\.parquet"):
                self.read(tmp_path / "a.parquet")

    @pytest.mark.parametrize("count", [100, *wide(5000)])
    def test_a_parquet_file_with_altered_bytes_is_read_or_named(self, tmp_path, count):
        """Parquet has no checksums by default, so altered text may pass; nothing else does."""
        write_parquet(tmp_path / "a.parquet", make_documents(40), 10)
        raw, draw = (tmp_path / "a.parquet").read_bytes(), random.Random(0)
        named = 0
        for _ in range(count):
            altered = bytearray(raw)
            for at in (draw.randrange(len(raw)), len(raw) - 1 - draw.randrange(400)):
                altered[at] = draw.randrange(256)
            (tmp_path / "a.parquet").write_bytes(altered)
            try:
                self.read(tmp_path / "a.parquet")
                list(read_rows(str(tmp_path / "a.parquet"), "data.path"))
            except RunFileError as error:
                named += "a.parquet" in str(error)
        assert named > count / 4

    def test_a_column_name_that_is_no_text(self, tmp_path):
        write_parquet(tmp_path / "a.parquet", ["x"], 1)
        raw = (tmp_path / "a.parquet").read_bytes()
        (tmp_path / "a.parquet").write_bytes(raw.replace(b"text", b"te\xa5t"))
        with pytest.raises(RunFileError, match=r"^data\.path: .*a\.parquet is not a Parquet file: "):
            self.read(tmp_path / "a.parquet")
        with pytest.raises(RunFileError, match=r"^data\.path: .*a\.parquet is not a readable Parquet file: "):
            list(read_rows(str(tmp_path / "a.parquet"), "data.path"))

    @pytest.mark.parametrize("store_schema", [True, False])
    def test_a_parquet_file_that_swells_is_refused(self, tmp_path, monkeypatch, store_schema):
        """A dictionary of one text, and many rows that name it."""
        texts = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["x" * 10_000]))
        path = tmp_path / "a.parquet"
        parquet.write_table(pa.table({"text": texts}), path, store_schema=store_schema)
        assert path.stat().st_size < 10_000
        monkeypatch.setattr(source, "MAX_DOCUMENT_BYTES", 2**22)
        monkeypatch.setattr(rows, "MAX_FILE_BYTES", 2**22)
        if store_schema:  # stays a dictionary in memory
            group = ParquetSource([str(path)], ("text",), "data.path", "data.text_column").read(0)
            assert group.take([19_999]) == [{"text": "x" * 10_000}]
        else:
            with pytest.raises(RunFileError, match=r"^data\.path: [^:]*row group 0, has more than 4,194,304 bytes"):
                self.read(path)
        with pytest.raises(RunFileError, match=r"^data\.path: [^:]*a\.parquet has more than 4,194,304 bytes of rows"):
            list(read_rows(str(path), "data.path"))

    @pytest.mark.parametrize("separator", ["\n", None])
    def test_a_document_without_end_is_refused(self, tmp_path, monkeypatch, separator):
        monkeypatch.setattr(source, "GROUP_BYTES", 2**10)
        monkeypatch.setattr(source, "MAX_DOCUMENT_BYTES", 2**12)
        monkeypatch.setattr(rows, "MAX_ROW_BYTES", 2**12)
        (tmp_path / "a").write_bytes(b"x" * 2**14)
        found = source.ByteRangeSource(
            [str(tmp_path / "a")], (separator or "").encode(), source.text_parser("text"), "data.path"
        )
        with pytest.raises(
            RunFileError, match=r"^data\.path: .*/a has a document of more than 4,096 bytes after byte 0"
        ):
            found.read(0)
        with pytest.raises(RunFileError, match=r"^data\.path: .*/a, line 1 has more than 4,096 bytes"):
            list(read_rows(str(tmp_path / "a"), "data.path"))
