"""First row: the data on this machine can be read as rows with the columns that the config and the rewards name."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from conf.extension import wanted_by_name
from conf.formats import HEAD_BYTES, PACKED_SUFFIXES, packed_form
from conf.json_lines import HALF_SURROGATE, LineError, abbreviate, is_half_surrogate, parse_json
from conf.schema.config import Config
from conf.schema.training.data import ArithmeticData, Gsm8kData, JsonlData, ParquetData, TextData
from conf.schema.training.loop import REJECTED, GrpoLoop, LmLoop
from controller.checks.input_files import paths_here
from controller.core.errors import ConfigError
from controller.core.finding import Issue, check
from controller.inputs.definitions import DefinitionError, find_signature
from controller.inputs.modules import module_files, trainer_references
from controller.inputs.protocols import foreign_reward

MAX_LINE_BYTES = 1 << 24
"""Longer first lines are left to the trainer."""
MAX_FILES = 1000
"""Files whose first bytes are looked at."""
KEYS = (
    *("data.question_column", "data.question_template", "data.answer_column", "data.solution_column"),
    *("data.answer_mark", "data.text_column", "data.template", "data.NAME", "loop.rewards", "loop.accuracy_reward"),
    *("loop.loss_type", "loop.max_new_tokens", "loop.max_prompt_length", "data.long_documents"),
)
Tabular = Gsm8kData | JsonlData | ParquetData


@check("first_row", "error", *KEYS, also="warning")
def first_rows_have_the_columns(config: Config) -> Iterator[Issue]:
    """A column that the data lack, a line that is no JSON, a compressed file, or an overlong worked response ends a
    billed run.
    """
    data = config.data
    if config.program.kind != "trainer":
        return
    if isinstance(data, ArithmeticData):
        yield from _reward_issues(config, "a problem of data=arithmetic", {})
        yield from _arithmetic_issues(config, data)
    if not isinstance(data, Tabular | TextData):
        return
    for name in ("path", "validation_path", "eval_path"):
        value = getattr(data, name, None) or ""
        found = paths_here(config, value)
        if not found and value.endswith(PACKED_SUFFIXES):
            yield Issue(f"{value}: compressed data are not read; unpack them", f"data.{name}", "warning")
        packed = [issue for file in islice(found, MAX_FILES) if (issue := _packed_issue(file, data, name))]
        yield from packed[:1]
        if found and not packed and len(found) <= MAX_FILES and not any(map(_has_content, found)):
            yield Issue(
                f"{value} has no rows" if not isinstance(data, TextData) else f"{value} is empty", f"data.{name}"
            )
            continue
        if found and not packed and not isinstance(data, TextData):
            yield from _row_issues(config, data, name, next(filter(_has_content, found)))


def _has_content(file: Path) -> bool:
    """Return whether a file has more than blank lines; True if it cannot be read, which `_packed_issue` reports."""
    try:
        with file.open("rb") as stream:
            return any(chunk.strip() for chunk in iter(lambda: stream.read(MAX_LINE_BYTES), b""))
    except OSError:
        return True


def _packed_issue(file: Path, data: Tabular | TextData, name: str) -> Issue | None:
    try:
        with file.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
    except OSError as error:
        return Issue(f"{file} cannot be read: {error.strerror}", f"data.{name}")
    told = "" if _is_parquet(data, file) and head.startswith(b"PAR1") else packed_form(head)
    return Issue(f"{file} is {told}", f"data.{name}") if told else None


def _is_parquet(data: Tabular | TextData, file: Path) -> bool:
    return isinstance(data, ParquetData) or (isinstance(data, Gsm8kData) and file.suffix == ".parquet")


def _row_issues(config: Config, data: Tabular, name: str, file: Path) -> Iterator[Issue]:
    """Yield what is wrong with the first row of a file, the value of `data.NAME`, and with later lines as JSON."""
    columns = dict(_columns(data))
    if name == "path" and isinstance(config.loop, GrpoLoop) and config.loop.loss_type == "dpo":
        columns[REJECTED] = "loop.loss_type"
    try:
        row = _first_row(file, columns, parquet=_is_parquet(data, file))
    except _UnreadableError as error:
        if data.on_bad_line == "error":
            yield Issue(f"{file}: {error}", f"data.{name}")
        return
    if row is None:
        return
    source, wrong = f"the first row of {file}", False
    for column, key in columns.items():
        if column not in row:
            wrong = True
            yield Issue(f"{source} has no column {column!r}; it has {_names(row)}", key)
        elif problem := _type_problem(data, row[column]):
            wrong = True
            yield Issue(f"{source} has no text in column {column!r}, but {problem}", key)
    is_strict = not wrong and data.on_bad_line == "error" and not _is_parquet(data, file)
    if is_strict and (said := _later_problem(file, columns)):
        yield Issue(f"{file}: {said}", f"data.{name}")
    if isinstance(data, Gsm8kData) and not wrong:
        yield from _answer_issues(data, source, _text(row, data.answer_column))
        if name == "path":
            yield from _length_issues(config, data, source, row)
    if name == "path" and isinstance(data, Gsm8kData):
        yield from _reward_issues(config, source, row)
    if not isinstance(data, Gsm8kData) and not wrong:
        yield from _document_issues(config, data, source, row)


def _answer_issues(data: Gsm8kData, source: str, text: str) -> Iterator[Issue]:
    worked, answer = data.split_answer(text)
    if not worked:
        message = f"{source} has no {data.answer_mark!r} in column {data.answer_column!r}; null takes the whole column"
        yield Issue(message, "data.answer_mark")
    elif not answer:
        yield Issue(f"{source} has no answer in column {data.answer_column!r}", "data.answer_column")


def _length_issues(config: Config, data: Gsm8kData, source: str, row: Mapping[str, Any]) -> Iterator[Issue]:
    """Yield what does not fit, as far as tokens can be counted here: those of the parts of prompts that are certain."""
    loop = config.loop
    if not isinstance(loop, GrpoLoop):
        return
    if data.question_template is None:
        question = _text(row, data.question_column or "")
    else:
        question = data.question_template.format_map({name: _text(row, name) for name in data.question_columns})
    asked = question if data.prompt.formatter else data.prompt.question.format(question=question)
    if (tokens := _more_tokens(config, data, asked, loop.max_prompt_length)) is not None:
        message = f"{source} is left out: its prompt has {tokens} tokens or more, and {loop.max_prompt_length} fit"
        yield Issue(message, "loop.max_prompt_length", "warning")
    if not loop.solution_phases:
        return
    worked = data.split_answer(_text(row, data.answer_column))[0]
    if data.solution_column is not None:
        worked = _text(row, data.solution_column)
    texts = {"worked": worked} | ({REJECTED: _text(row, REJECTED)} if loop.loss_type == "dpo" else {})
    if loop.loss_type == "dpo" and worked == texts[REJECTED] and data.on_bad_line == "error":
        yield Issue(f"{source} is no pair: its solution and its {REJECTED!r} are the same", "data.path")
    most, severity, cure = loop.max_new_tokens, "warning", "raise it"
    if not loop.filter_overlong_solutions:
        severity, cure = "error", "raise it, or set loop.filter_overlong_solutions=true"
    for kind, text in texts.items():
        written = data.prompt.answer.format(answer=text)
        if data.chat_template != "none":  # most templates write a turn without blanks around it
            written = written.strip()
        tokens = _more_tokens(config, data, written, most - 1)
        if tokens is not None:
            told = f"the {kind} response of {source} has {tokens + 1} tokens with its end, and {most} fit"
            yield Issue(f"{told}; {cure}", "loop.max_new_tokens", severity)


def _arithmetic_issues(config: Config, data: ArithmeticData) -> Iterator[Issue]:
    if not isinstance(config.loop, GrpoLoop):
        return
    asked, before = data.prompt.question.format(question=data.question(90, 9)), int(data.bos is not None)
    most = config.loop.max_prompt_length
    if (tokens := _more_tokens(config, data, asked, most - before)) is not None:
        told = f"a prompt of data=arithmetic has {tokens + before} tokens or more, and {most} fit; raise it"
        yield Issue(told, "loop.max_prompt_length")


def _document_issues(
    config: Config, data: JsonlData | ParquetData, source: str, row: Mapping[str, Any]
) -> Iterator[Issue]:
    """Yield a document that is skipped or refused for its length."""
    if not isinstance(config.loop, LmLoop) or data.packing != "documents" or data.long_documents == "split":
        return
    columns, form = {name: _text(row, name) for name in data.columns}, data.template
    if form is not None and form.remove:
        columns = {name: re.sub(form.remove, "", text) for name, text in columns.items()}
    text = "".join(columns.values()) if form is None else (form.prompt + form.answer).format_map(columns)
    most = config.loop.seq_len + 1
    if (tokens := _more_tokens(config, data, text, most)) is not None:
        fate, severity = ("left out", "warning") if data.long_documents == "skip" else ("refused", "error")
        told = f"{source} is {fate}: it has {tokens} tokens or more, and loop.seq_len + 1 = {most} fit"
        yield Issue(told, "data.long_documents", severity)


def _more_tokens(config: Config, data: Tabular | ArithmeticData, text: str, most: int) -> int | None:
    """Return the tokens of a text if they are more than `most`; None if they are not, or cannot be counted here."""
    count = len(text.encode())  # a token has at least a byte
    if count > most and data.tokenizer != "bytes":
        file = next(iter(paths_here(config, data.tokenizer)), None)
        try:
            from tokenizers import Tokenizer

            count = len(Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids) if file else 0
        except Exception:  # a laptop that only launches, or a file that the trainer refuses
            return None
    return count if count > most else None


def _text(row: Mapping[str, Any], column: str) -> str:
    """Return the text of a column that has one."""
    value = row[column]
    return str(value.value if isinstance(value, _ParquetType) else value)


def _columns(data: Tabular) -> Mapping[str, str]:
    """Return the columns that every row must have, with the config key that names each."""
    if isinstance(data, Gsm8kData):
        return data.columns
    return dict.fromkeys(data.columns, "data.text_column" if data.template is None else "data.template")


def _type_problem(data: Tabular, value: Any) -> str:
    """Return what a column holds that the trainer would not read as text; empty if it would."""
    if isinstance(value, _ParquetType):
        if told := value.problem or ("" if isinstance(data, Gsm8kData) else value.number):
            return told
        value = value.value
    read = str | int | float if isinstance(data, Gsm8kData) else str
    is_missing = isinstance(value, float) and not math.isfinite(value)
    return "" if isinstance(value, read) and not isinstance(value, bool) and not is_missing else abbreviate(value)


def _reward_issues(config: Config, source: str, row: Mapping[str, Any]) -> Iterator[Issue]:
    if not isinstance(config.loop, GrpoLoop):
        return
    try:
        files = module_files(config, Path.cwd())
    except ConfigError:
        return  # `modules` reports it
    for use in trainer_references(config):
        try:
            signature = find_signature(use.reference, files, installed=False) if use.kind == "reward" else None
        except DefinitionError:
            continue  # `extension` reports it
        if signature and foreign_reward(signature):
            continue  # `extension` reports it
        required = wanted_by_name(signature).required if signature and "self" not in signature.parameters else ()
        if misplaced := [name for name in ("response", "answer") if name in required]:
            told = f"is called with (response, answer), and the rest by name; put {misplaced[0]} among the first two"
            yield Issue(f"reward {use.reference} {told}", use.key)
            continue
        for missing in [name for name in required if name not in ("prompt", "row", *row)]:
            message = f"reward {use.reference} takes {missing!r}, but {source} has no such column"
            columns = f"it has {_names(row)}, and prompt and row are" if row else "only prompt and row are"
            yield Issue(f"{message}; {columns} passed too", use.key)


class _ParquetType(NamedTuple):
    """The type of a column. problem: its name, if it is neither text nor a number; number: if it is a number.

    value: the first row's, of a column that is read.
    """

    problem: str
    number: str
    value: Any = None


class _UnreadableError(ValueError):
    """A first row that cannot be read."""


def _first_row(file: Path, columns: Iterable[str], *, parquet: bool) -> dict[str, Any] | None:
    """Return the first row, for Parquet with the types of its columns; None if it cannot be told here.

    Raises _UnreadableError if the trainer could not read it.
    """
    if parquet:
        return _parquet_row(file, columns)
    with file.open("rb") as stream:
        numbered = enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES), b""), 1)
        number, line = next(((number, line) for number, line in numbered if line.strip()), (1, b""))
    return None if not line or len(line) == MAX_LINE_BYTES else _row(number, line, columns)


def _later_problem(file: Path, columns: Iterable[str]) -> str:
    """Return what is wrong with the first line that is no row, of those in a file's first MAX_LINE_BYTES; else ""."""
    with file.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES), b""), 1):
            if stream.tell() > MAX_LINE_BYTES:
                break
            if not line.strip():
                continue
            try:
                row = _row(number, line, columns)
            except _UnreadableError as error:
                return str(error)
            if lacks := [each for each in columns if each not in row]:
                return f"line {number} has no column {lacks[0]!r}, which the first row has"
    return ""


def _row(number: int, line: bytes, columns: Iterable[str]) -> dict[str, Any]:
    """Return what a line of JSON holds. Raises _UnreadableError if the trainer could not read it."""
    try:
        row = parse_json(line)
    except LineError as error:
        raise _UnreadableError(f"line {number} {error}") from None
    except UnicodeDecodeError:
        raise _UnreadableError(f"line {number} is not UTF-8") from None
    if not isinstance(row, dict):
        raise _UnreadableError(f"line {number} is not an object with columns, but {abbreviate(row)}")
    for column in columns:
        if is_half_surrogate(str(row.get(column))):
            raise _UnreadableError(f"line {number} {HALF_SURROGATE}, in column {column!r}")
    return row


def _parquet_row(file: Path, columns: Iterable[str]) -> dict[str, _ParquetType] | None:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        return None  # a laptop that only launches
    try:
        with parquet.ParquetFile(file) as opened:
            row = {field.name: _parquet_type(field.type) for field in opened.schema_arrow}
            read = [name for name in columns if name in row and not row[name].problem]
            first = [batch.to_pylist()[0] for batch in islice(opened.iter_batches(1, columns=read), 1) if read]
            rows = opened.metadata.num_rows
    except UnicodeDecodeError:
        raise _UnreadableError("row 1 is not UTF-8") from None
    except (pa.ArrowException, OSError, ValueError):
        raise _UnreadableError("is not a Parquet file") from None
    if not rows:
        raise _UnreadableError("has no rows")
    return row | {name: row[name]._replace(value=value) for values in first for name, value in values.items()}


def _parquet_type(kind: Any) -> _ParquetType:
    from pyarrow import types

    while types.is_dictionary(kind):
        kind = kind.value_type
    text = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    if any(is_kind(kind) for is_kind in text):
        return _ParquetType("", "")
    number = types.is_integer(kind) or types.is_floating(kind)
    return _ParquetType("" if number else str(kind), str(kind) if number else "")


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "none"
