"""Format version of the agent's messages and of its files on the worker, which a later agent may read."""

import json
from collections.abc import Mapping
from typing import Any

FORMAT = 1


def format_problem(body: Any, where: str) -> str:
    """Return why a document cannot be read, or "" if its format is the current one. Mirrors `conf.formats`."""
    written = body.get("format") if isinstance(body, dict) else None
    if written is None:
        return f"{where} has no format; this slipway reads format {FORMAT}: something else or an older slipway wrote it"
    if written != FORMAT:
        return f"{where} has format {written!r:.20}; this slipway reads format {FORMAT}: update slipway"
    return ""


def dump(body: Mapping[str, Any]) -> bytes:
    """Serialize a document to JSON, including its format version."""
    return json.dumps({"format": FORMAT, **body}).encode()


def say(answer: Mapping[str, Any]) -> None:
    print(dump(answer).decode(), flush=True)
