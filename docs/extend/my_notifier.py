"""Notifier: one line per event in a file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path("~/slipway-events.jsonl")


def to_file(event: Mapping[str, Any]) -> None:
    """Append the event; it has `text`, `event`, `run`, `pod`, `verdict` and `results`."""
    with FILE.expanduser().open("a") as file:
        file.write(json.dumps(dict(event)) + "\n")
