"""Validation of composed data. Reports all problems at once, with suggestions for misspelled keys."""

import difflib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from conf.schema.config import Config
from conf.schema.renamed_keys import RENAMED, successors

MAX_SHOWN_CHARS = 600
"""Limit for a message, and for each value in it."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

VALUE_HINTS = {
    "project": "use a project ID such as my-project or example.com:my-project",
    "apis": "use a service name such as tpu.googleapis.com",
    "url": "must start with http:// or https:// and contain no spaces",
    "zone": "use a zone such as us-central1-a; conf/tpu_types.yaml lists zones with TPUs",
    "name": "use 1 to 63 characters a-z, 0-9 and -, starting with a letter",
    "python": "use a version such as 3.11",
    "user": "use 1 to 32 characters a-z, 0-9, _ and -, starting with a letter",
    "bucket_location": "use a region or multi-region such as us-central1 or us",
    "account": "use a billing account ID such as 012345-6789AB-CDEF01",
}
"""Hint for a value that does not match its pattern, by the last part of the key."""


@dataclass(frozen=True)
class ConfigProblem:
    """A problem in the config: the key to change and the reason."""

    key: str
    message: str

    def __str__(self) -> str:
        return escape_line(f"{self.key}: {self.message}")


def validate(raw: dict[str, Any]) -> tuple[Config | None, list[ConfigProblem]]:
    """Validate composed data. Return the config, or None, and every problem.

    If the only problems are unknown keys, validate again without them, so that the caller can also run the checks
    between sections and report everything at once.
    """
    if problems := [*_unprintable_values(raw)]:
        return None, problems
    try:
        return Config.model_validate(raw), []
    except ValidationError as error:
        problems = [_problem(raw, item) for item in error.errors()]
        unknown = [_key_path(raw, e["loc"]) for e in error.errors() if e["type"] == "extra_forbidden"]
    if len(unknown) < len(problems):
        return None, problems
    try:
        return Config.model_validate(_drop_paths(raw, unknown)), problems
    except ValidationError:
        return None, problems


def _problem(raw: dict[str, Any], error: Any) -> ConfigProblem:
    path = _key_path(raw, error["loc"])
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        known = _sibling_keys(path)
        if new := successors(path, error["input"]):
            return ConfigProblem(key, f"unknown key; renamed to {', '.join(new)}")
        if path[-1] in known:
            section = ".".join(path[:-1])
            whole = f"{section}=…" if len(path) == 2 else f"{section}={{kind: …}}"
            way = "choose its group" if len(path) == 2 else "set the section whole"
            return ConfigProblem(
                key, f"belongs to another kind of this section; {way} ({whole}), or remove the key (~{key})"
            )
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.6)
        hint = f"did you mean {'.'.join([*path[:-1], near[0]])}?" if near else f"choices: {', '.join(sorted(known))}"
        return ConfigProblem(key, f"unknown key; {hint}")
    if error["type"] == "missing":
        return ConfigProblem(key, "missing; choose a group that sets it (loop=…, model=…) or set the key")
    if error["type"] == "tuple_type" and isinstance(error["input"], str) and error["input"]:
        items = ", ".join(shlex.split(error["input"], posix=False))
        return ConfigProblem(key, f"must be a list of words, not a string: '{key}=[{items}]'")
    if error["type"] == "string_pattern_mismatch" and path[-1] in VALUE_HINTS:
        return ConfigProblem(key, f"{escape_line(repr(error['input']))} is invalid; {VALUE_HINTS[path[-1]]}")
    message = error["msg"].removeprefix("Value error, ")
    # A whole section would hide the message, which names the keys that matter.
    got = "" if isinstance(error["input"], dict) else f" (got {escape_line(repr(error['input']))})"
    return ConfigProblem(key, f"{message[0].lower()}{message[1:]}{got}")


def escape_line(text: str) -> str:
    """Return text on one line, with newlines and unprintable characters escaped and long text shortened."""
    if len(text) > MAX_SHOWN_CHARS:
        text = f"{text[: MAX_SHOWN_CHARS // 2]}… ({len(text)} characters) …{text[-MAX_SHOWN_CHARS // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _unprintable_values(value: Any, key: str = "") -> Iterator[ConfigProblem]:
    """Yield keys and values that no file, argument or variable can contain. Training text may contain NUL."""
    if isinstance(value, str) and not key.startswith("data.") and "\0" in value:
        yield ConfigProblem(key, "contains a NUL character, which arguments, variables and paths cannot")
    if isinstance(value, str) and LONE_SURROGATE.search(value):
        yield ConfigProblem(key, "contains a lone surrogate, which files cannot")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, child in items:
        inner = f"{key}.{name}".lstrip(".")
        yield from _unprintable_values(str(name), inner)
        yield from _unprintable_values(child, inner)


def _key_path(raw: dict[str, Any], loc: tuple[int | str, ...]) -> list[str]:
    """Return pydantic's location without the tags of discriminated unions, which are not keys in the config."""
    path: list[str] = []
    at: Any = raw
    for i, part in enumerate(loc):
        is_key = part in at if isinstance(at, dict) else isinstance(at, list) and isinstance(part, int)
        if not is_key and i < len(loc) - 1:
            continue
        path.append(str(part))
        at = at[part] if is_key else None  # pyright: ignore[reportCallIssue, reportArgumentType]
    return path


def _sibling_keys(path: list[str]) -> set[str]:
    """Return the keys the schema allows in place of the last one in `path`, for every kind of the section."""
    models: list[type[BaseModel]] = [Config]
    for part in path[:-1]:
        if part.isdigit():  # index into a list, whose items share one schema
            continue
        fields = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        models = [m for annotation in fields for m in _models_in(annotation)]
    return {name for m in models for name in m.model_fields}


def find_keys(name: str) -> list[str]:
    """Return up to three dotted keys that end in `name`, now or before a rename, for a user who omitted the section."""
    former = (new for old, new in RENAMED.items() if old.rpartition(".")[2] == name and "*" not in new)
    found: dict[str, None] = dict.fromkeys(former)
    todo: list[tuple[str, type[BaseModel]]] = [("", Config)]
    while todo:
        prefix, model = todo.pop(0)
        for key, info in model.model_fields.items():
            path = f"{prefix}{key}"
            if key == name and prefix:
                found[path] = None
            if get_origin(info.annotation) is not tuple and path.count(".") < 2:  # items of a list have no keys
                todo += [(f"{path}.", inner) for inner in _models_in(info.annotation)]
    return list(found)[:3]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in get_args(annotation) for m in _models_in(part)]


def _drop_paths(raw: dict[str, Any], paths: list[list[str]]) -> dict[str, Any]:
    clean = json.loads(json.dumps(raw))
    for path in paths:
        at = clean
        for part in path[:-1]:
            at = at[int(part)] if isinstance(at, list) else at[part]
        at.pop(path[-1], None)
    return clean
