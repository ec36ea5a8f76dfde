"""Hostile strings, and every place of a config that holds a string: read off the schema, so that new ones are there."""

import copy
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel

from conf.schema.config import Config

CANARY = "canary-of-the-tests"
"""A file that appears where a string was taken for a shell command."""
TOUCH_COMMAND = f"touch {CANARY}"
INJECTIONS: Sequence[str] = (
    f"; {TOUCH_COMMAND} ;", f"$({TOUCH_COMMAND})", f"`{TOUCH_COMMAND}`", f"a\n{TOUCH_COMMAND}\n",
    f"' ; {TOUCH_COMMAND} ; '",
    f'" ; {TOUCH_COMMAND} ; "', f"| {TOUCH_COMMAND} &",
    "-", "-rf", "--upload-pack=x", "../../..", "/etc/passwd", "~root", "*", "\0", "a\0b", "\r\n", "\t", " ", "",
    "\x1b]0;t\x07", "\x9b31m", "\u202eab", "\u200b", "é🙂\U0010ffff", "\ud800", "é" * 70_000, "{assets.models.m}",
    "[/][bold]", "!!python/object/apply:os.system [x]", "- a\n- b: &c", "?alt=media#%2e%2e%2f",
    "git@-oProxyCommand=x:y",
    "https://u:p@h/\r\nX: y",
)  # fmt: skip
"""Each of them is tried in every place."""
ODD_STRINGS: Sequence[str] = (
    f"&& {TOUCH_COMMAND} &", f"> {CANARY}", f"<({TOUCH_COMMAND})", f"\\\n{TOUCH_COMMAND}", f"#\n{TOUCH_COMMAND}",
    f"${{IFS}}{TOUCH_COMMAND}",
    "rm -rf ~", "'", '"',
    "\\", "$", "${HOME}", "$0", "!", "?", "~", "--", "--help", "-oProxyCommand=x", "..", ".", "/", "a/../b", "\n",
    "\x1b[2J", "\x7f", "\x85", "\u2028", "\u2066", "\ufeff", "שלום", "x" * 70_000, "%s%n", "{0}",
    "{bucket}", "{output}",
    "{{", "a: b", "? a", "&a *a", "null", "1e3", "0x1", "a&b=c", "a@b", "ext::sh -c x", "file:///etc/passwd",
    "env:HOME",
    "secretmanager:projects/../secrets/x", "user:key", "0.0.0.0/0",
)  # fmt: skip
HOSTILE_STRINGS = (*INJECTIONS, *ODD_STRINGS)


def hostile_strings() -> st.SearchStrategy[str]:
    """One of them, some of them in a row, or any text around them."""
    one = st.sampled_from(HOSTILE_STRINGS)
    return one | st.lists(one | st.text(max_size=8), min_size=1, max_size=4).map("".join)


def string_fields(annotation: Any = Config, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Keys that hold a string: `*` is any key of a mapping, `<key>` that key itself, `0` an item of a list."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    kind = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from string_fields(field.annotation, (*path, name))
    elif annotation is str or annotation is Any:
        yield path
    elif kind is dict:
        if [*string_fields(get_args(annotation)[0])]:
            yield (*path, "<key>")
        yield from string_fields(get_args(annotation)[1], (*path, "*"))
    elif kind is tuple:
        yield from string_fields(get_args(annotation)[0], (*path, "0"))
    elif get_args(annotation) and all(isinstance(part, type) or get_args(part) for part in get_args(annotation)):
        for part in get_args(annotation):
            yield from string_fields(part, path)


def with_value(raw: dict[str, Any], path: Sequence[str], value: str) -> dict[str, Any] | None:
    """A copy of the data with the value there; None where the data has no such place."""
    found = dict(raw)
    at: Any = found
    for part in path[:-1]:
        key: Any = 0 if isinstance(at, list) else next(iter(at), None) if part == "*" else part
        inner = at[key] if at and (isinstance(at, list) or key in at) else None
        if not isinstance(inner, dict | list):
            return None
        at[key] = copy.copy(inner)  # the rest is shared
        at = at[key]
    last = path[-1]
    if isinstance(at, dict) and last == "<key>" and at:
        at[value] = at.pop(next(iter(at)))
    elif isinstance(at, dict) and last == "*" and at:
        at[next(iter(at))] = value
    elif isinstance(at, dict) and last in at:
        at[last] = value
    elif isinstance(at, list) and last == "0" and at:
        at[0] = value
    else:
        return None
    return found
