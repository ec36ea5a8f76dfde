"""Rows of JSON lines, as the check before a run and the trainer read them."""

import json
from collections import Counter
from typing import Any


class LineError(ValueError):
    """Why a line cannot be read, without its location."""


HALF_SURROGATE = "has half of a surrogate pair, which is no character"


def is_half_surrogate(text: str) -> bool:
    """Return whether a text has what JSON and Python allow but no encoding can write, such as U+D83D alone."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def parse_json(raw: bytes) -> Any:
    """Return the value of a line of JSON. Raises LineError; other bytes than UTF-8 raise UnicodeDecodeError."""
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object)
    except LineError:
        raise
    except json.JSONDecodeError as error:
        said = f"is not JSON: {error.msg}, at character {error.pos} of the line"
        raise LineError(f"{said}; {hint}" if (hint := _form(raw.strip())) else said) from None
    except RecursionError:
        raise LineError("is JSON that is nested too deeply") from None
    except UnicodeDecodeError:
        raise
    except ValueError:  # Python converts no more than 4300 digits
        raise LineError("has a number with too many digits") from None


def _form(raw: bytes) -> str:
    """Return what a line that is no JSON begins instead; "" if nothing is known."""
    if raw.startswith(b"["):
        return "the file is one JSON list: write one object a line, without [ and ] and commas between them"
    if raw.startswith(b"{") and not raw.endswith(b"}"):
        return "write each object in one line"
    if raw.startswith(b"{'"):
        return "JSON has double quotes"
    if b"," in raw and not raw.startswith((b"{", b'"')):
        return "it looks like CSV: write one JSON object a line"
    return ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises LineError if it has a name twice, of which the reader would have to choose a value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise LineError(f"has {twice!r:.80} more than once in an object")
    return found


def abbreviate(value: object) -> str:
    """Return a value as JSON, cut, for messages."""
    return json.dumps(value, default=repr)[:80]
