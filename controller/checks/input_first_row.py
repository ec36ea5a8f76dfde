"""First row: the data on this machine have the columns that the config and the rewards name."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from conf.extension import wanted_by_name
from conf.schema.config import Config
from conf.schema.training.data import ArithmeticData, Gsm8kData, JsonlData, ParquetData
from conf.schema.training.loop import GrpoLoop
from controller.checks.input_files import paths_here
from controller.core.errors import ConfigError
from controller.core.finding import Issue, check
from controller.inputs.modules import DefinitionError, find_signature, module_files, trainer_references

MAX_LINE_BYTES = 1 << 24
"""Longer first lines are left to the trainer."""
KEYS = (
    *("data.question_column", "data.question_template", "data.answer_column", "data.solution_column"),
    *("data.answer_mark", "data.text_column", "data.template", "data.NAME", "loop.rewards", "loop.accuracy_reward"),
)


@check("first_row", "error", *KEYS)
def first_rows_have_the_columns(config: Config) -> Iterator[Issue]:
    """A column that the data lack, or a line that is no JSON, ends the run after the pod was billed."""
    data = config.data
    if config.program.kind == "trainer" and isinstance(data, ArithmeticData):
        yield from _reward_issues(config, "a problem of data=arithmetic", {})
    if config.program.kind != "trainer" or not isinstance(data, Gsm8kData | JsonlData | ParquetData):
        return
    for name in ("path", "validation_path", "eval_path"):
        found = paths_here(config, getattr(data, name, None) or "")
        if not found:
            continue
        file = found[0]
        try:
            row = _first_row(file, parquet=isinstance(data, ParquetData) or file.suffix == ".parquet")
        except _UnreadableError as error:
            if data.on_bad_line == "error":
                yield Issue(f"{file}: {error}", f"data.{name}")
            continue
        if row is None:
            continue
        for column, key in _columns(data).items():
            if column not in row:
                yield Issue(f"the first row of {file} has no column {column!r}; it has {_names(row)}", key)
            elif problem := _type_problem(data, row[column]):
                yield Issue(f"the first row of {file} has no text in column {column!r}, but {problem}", key)
        if isinstance(data, Gsm8kData) and data.answer_mark is not None:
            answer = row.get(data.answer_column)
            if isinstance(answer, str) and data.answer_mark not in answer:
                message = f"the first row of {file} has no {data.answer_mark!r} in column {data.answer_column!r}"
                yield Issue(f"{message}; null takes the whole column", "data.answer_mark")
        if name == "path" and isinstance(data, Gsm8kData):
            yield from _reward_issues(config, f"the first row of {file}", row)


def _columns(data: Gsm8kData | JsonlData | ParquetData) -> Mapping[str, str]:
    """Return the columns that every row must have, with the config key that names each."""
    if isinstance(data, Gsm8kData):
        return data.columns
    return dict.fromkeys(data.columns, "data.text_column" if data.template is None else "data.template")


def _type_problem(data: Gsm8kData | JsonlData | ParquetData, value: Any) -> str:
    """Return what a column holds that the trainer would not read as text; empty if it would, or is not known."""
    if isinstance(value, _ParquetType):
        return value.problem if isinstance(data, Gsm8kData) else value.problem or value.number
    read = str | int | float if isinstance(data, Gsm8kData) else str
    return "" if isinstance(value, read) and not isinstance(value, bool) else json.dumps(value)[:80]


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
        required = wanted_by_name(signature).required if signature is not None else ()
        for missing in [name for name in required if name not in ("prompt", "row", *row)]:
            message = f"reward {use.reference} takes {missing!r}, but {source} has no such column"
            columns = f"it has {_names(row)}, and prompt and row are" if row else "only prompt and row are"
            yield Issue(f"{message}; {columns} passed too", use.key)


class _ParquetType(NamedTuple):
    """The type of a column. problem: its name, if it is neither text nor a number; number: if it is a number."""

    problem: str
    number: str


class _UnreadableError(ValueError):
    """A first row that cannot be read."""


def _first_row(file: Path, *, parquet: bool) -> dict[str, Any] | None:
    """Return the first row, for Parquet the types of its columns; None if it cannot be told here.

    Raises _UnreadableError if the trainer could not read it.
    """
    if parquet:
        return _parquet_columns(file)
    with file.open("rb") as stream:
        numbered = enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES), b""), 1)
        number, line = next(((number, line) for number, line in numbered if line.strip()), (1, b""))
    if not line or len(line) == MAX_LINE_BYTES:
        return None
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise _UnreadableError(f"line {number} is not JSON: {error.msg}, at character {error.pos}") from None
    except UnicodeDecodeError:
        raise _UnreadableError(f"line {number} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise _UnreadableError(f"line {number} cannot be read: {error}") from None
    if not isinstance(row, dict):
        text = line[:80].decode(errors="replace")
        raise _UnreadableError(f"line {number} is not an object with columns, but {text}")
    return row


def _parquet_columns(file: Path) -> dict[str, _ParquetType] | None:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        return None  # a laptop that only launches
    try:
        return {field.name: _parquet_type(field.type) for field in parquet.read_schema(file)}
    except (pa.ArrowException, OSError, ValueError):
        raise _UnreadableError("is not a Parquet file") from None


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
