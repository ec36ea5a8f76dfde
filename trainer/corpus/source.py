"""A data set as groups of documents, read one at a time: byte ranges of text and JSON lines.

Row groups of Parquet are in `parquet.py`. A document is a row of named columns; plain text is one column, `text`.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import IO, Any, NamedTuple, Protocol

from conf.formats import RunFileError
from conf.json_lines import HALF_SURROGATE, LineError, abbreviate, is_half_surrogate, parse_json
from conf.schema.training.data import CustomDocuments
from trainer.corpus import files
from trainer.extension import load_extension

GROUP_BYTES = 4 * 2**20
"""Bytes of text or JSON lines per group."""
GROUP_TEXTS = 1024
"""Texts of a function per group."""
MAX_DOCUMENT_BYTES = 2**30
"""Bytes of a document, or of the text of a row group, that are read into memory."""
CHUNK_BYTES = 2**18
"""Bytes scanned at a time for the end of a document."""

Document = dict[str, str]
"""Text by column."""


class BadLineError(RunFileError):
    """A line, row or document is unusable; `data.on_bad_line` tells whether to skip it."""


class ColumnError(LineError):
    """A row lacks the columns that the config names."""


class Group(Protocol):
    """Documents in memory."""

    def __len__(self) -> int: ...

    def take(self, numbers: Sequence[int]) -> list[Document]:
        """Return these documents. Raises BadLineError if one is invalid."""
        ...

    def location(self, number: int) -> str:
        """Return a document's location, for messages."""
        ...


@dataclass(frozen=True)
class _ParsedGroup:
    """Documents that are parsed when they are taken."""

    items: Sequence[Any]
    parse: Callable[[Any], Document]
    locate: Callable[[Any], str]

    def __len__(self) -> int:
        return len(self.items)

    def take(self, numbers: Sequence[int]) -> list[Document]:
        return [self.parse(self.items[number]) for number in numbers]

    def location(self, number: int) -> str:
        return self.locate(self.items[number])


class DocumentSource(Protocol):
    """A data set; `len` is its number of groups."""

    def __len__(self) -> int: ...

    def read(self, number: int) -> Group:
        """Return one group. Raises RunFileError if it cannot be read."""
        ...


class CachedSource:
    """Source that caches its latest groups, so that streams that advance together read each once."""

    def __init__(self, source: DocumentSource, groups: int) -> None:
        self._source, self._groups = source, groups
        self._cache: OrderedDict[int, Group] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._source)

    def read(self, number: int) -> Group:
        with self._lock:  # readers of the same group wait for it
            if number not in self._cache:
                while len(self._cache) >= self._groups:
                    self._cache.popitem(last=False)
                self._cache[number] = self._source.read(number)
            self._cache.move_to_end(number)
            return self._cache[number]


class FunctionSource:
    """Texts from a function of the user's own; a group is a run of consecutive ones."""

    def __init__(self, data: CustomDocuments, path: str, key: str) -> None:
        """Call the function. Raises RunFileError if it cannot be imported or has no texts."""
        self._name = data.source
        self._texts = load_extension("documents", data.source, "data.source", data.options)(path)
        if not hasattr(self._texts, "__getitem__") or not hasattr(self._texts, "__len__"):
            kind = type(self._texts).__name__
            raise RunFileError(f"data.source: {data.source} must return a sequence, with len and indexing, not {kind}")
        if not len(self._texts):
            raise RunFileError(f"data.source: {data.source} has no text for {key}={path}")

    def __len__(self) -> int:
        return -(-len(self._texts) // GROUP_TEXTS)

    def read(self, number: int) -> Group:
        stop = min((number + 1) * GROUP_TEXTS, len(self._texts))
        numbers = range(number * GROUP_TEXTS, stop)
        return _ParsedGroup(numbers, lambda number: {"text": self.text(number)}, self.location)

    def text(self, number: int) -> str:
        """Return one text. Raises BadLineError if it is none."""
        text = self._texts[number]
        if not isinstance(text, str):
            raise BadLineError(f"data.source: {self.location(number)} is no text, but {type(text).__name__}")
        if is_half_surrogate(text):
            raise BadLineError(f"data.source: {self.location(number)} {HALF_SURROGATE}")
        return text

    def location(self, number: int) -> str:
        return f"{self._name}[{number}]"


class _ByteRange(NamedTuple):
    file: str
    start: int
    stop: int


class ByteRangeSource:
    r"""Files of documents with a separator between them; a group is those that begin in a range of bytes.

    Without a separator a file is a group, and a document. Documents of white space are left out. Where `\n\n` stands
    between documents, a third line break in a row may be kept with either of them.
    """

    def __init__(
        self, found: list[str], separator: bytes, parse: Callable[[bytes], Document], key: str, column_key: str = ""
    ) -> None:
        """Open the files. parse: maps a document's bytes to its columns; key, column_key: config keys, for messages."""
        self._separator, self._parse, self._key, self._column_key = separator, parse, key, column_key
        self._files = files.UnchangingFiles(key)
        self._ranges: list[_ByteRange] = []
        for file in found:
            size = files.file_size(file)
            step = GROUP_BYTES if separator else max(size, 1)
            self._ranges += [_ByteRange(file, start, min(start + step, size)) for start in range(0, size, step)]
        if not self._ranges:
            raise RunFileError(f"{key}: {found[0]} is empty" + (", and so are all others" * (len(found) > 1)))

    def __len__(self) -> int:
        return len(self._ranges)

    def read(self, number: int) -> Group:
        file, start, stop = self._ranges[number]
        with self._files.open(file) as stream:
            if start == 0:
                files.refuse_packed(stream, file, self._key)
            first, last = start, stop
            if self._separator:
                first = _document_start(stream, start, self._separator)
                last = _document_start(stream, stop, self._separator)
            if last - first > MAX_DOCUMENT_BYTES + GROUP_BYTES:
                message = f"{file} has a document of more than {MAX_DOCUMENT_BYTES:,} bytes after byte {first}"
                raise RunFileError(f"{self._key}: {message}; split it")
            stream.seek(first)
            raw = stream.read(max(0, last - first))
            pieces = _split_documents(raw, first, self._separator) if self._separator else [(0, raw)]
        return _ParsedGroup(
            [piece for piece in pieces if piece[1].strip()],
            lambda piece: self.parse_document(file, *piece),
            lambda piece: self.location(file, piece[0]),
        )

    def parse_document(self, file: str, at: int, raw: bytes) -> Document:
        """Parse the document at a byte offset of its file. Raises BadLineError."""
        try:
            return self._parse(raw)
        except LineError as error:
            key, problem = self._column_key if isinstance(error, ColumnError) else self._key, str(error)
        except UnicodeDecodeError as error:
            with files.open_file(file) as stream:
                files.refuse_packed(stream, file, self._key)
            key, problem = self._key, f"is not UTF-8 ({error.reason} at byte {at + error.start} of the file)"
        raise BadLineError(f"{key}: {self.location(file, at)} {problem}")

    def location(self, file: str, at: int) -> str:
        """Return the location as `corpus.jsonl:12`: the line that begins at that byte, or contains it."""
        line = 1
        with files.open_file(file) as stream:
            while at > 0 and (chunk := stream.read(min(at, CHUNK_BYTES))):
                line += chunk.count(b"\n")
                at -= len(chunk)
        return f"{file}:{line}"


def _document_start(stream: IO[bytes], at: int, separator: bytes) -> int:
    """Return the start of the first document at or after a byte: behind the first separator ending there or later."""
    if at == 0:
        return 0
    position = max(0, at - len(separator))
    stream.seek(position)
    window = b""
    while chunk := stream.read(CHUNK_BYTES):
        window += chunk
        if (found := window.find(separator)) >= 0:
            return position + found + len(separator)
        keep = min(len(separator) - 1, len(window))
        position += len(window) - keep
        window = window[len(window) - keep :]
    return position + len(window)


def _split_documents(raw: bytes, at: int, separator: bytes) -> list[tuple[int, bytes]]:
    pieces = []
    for piece in raw.split(separator):
        pieces.append((at, piece))
        at += len(piece) + len(separator)
    return pieces


def text_parser(column: str) -> Callable[[bytes], Document]:
    return lambda raw: {column: raw.decode("utf-8-sig")}


def json_parser(columns: tuple[str, ...]) -> Callable[[bytes], Document]:
    """Parse a JSON object as a row of these columns, which must hold text."""

    def parse(raw: bytes) -> Document:
        row = parse_json(raw)
        if not isinstance(row, dict):
            raise ColumnError(f"is not an object with columns, but {abbreviate(row)}")
        for column in columns:
            if column not in row:
                raise ColumnError(f"has no column {column!r}; it has {', '.join(map(repr, row))}")
            if not isinstance(row[column], str):
                raise ColumnError(f"has no text in column {column!r}, but {abbreviate(row[column])}")
            if b"\\u" in raw and is_half_surrogate(row[column]):
                raise LineError(f"{HALF_SURROGATE}, in column {column!r}")
        return {column: row[column] for column in columns}

    return parse


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
