"""What a check has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conf.schema.validation import escape_line


@dataclass(frozen=True)
class Finding:
    """`key` is what to change. An error stops `up`; a warning is shown, and so is a note, about what is not wrong."""

    check: str
    severity: Literal["error", "warning", "note"]
    key: str
    words: str

    def __str__(self) -> str:
        return escape_line(f"{self.key}: {self.words}")
