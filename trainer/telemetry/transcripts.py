"""Transcripts of prompts and responses: a table in TensorBoard, and JSON lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_CELL_CHARS = 2000
"""Maximum characters of a table cell; the JSON lines hold everything."""


@dataclass(frozen=True)
class Transcript:
    """One response. answer: the correct one; extracted: the one in the response, or None; board: of a puzzle.

    turns: (who, text) of an episode.
    """

    prompt: str
    answer: str
    response: str
    extracted: str | None
    reward: float
    board: dict[str, Any] | None = None
    turns: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        found = {"prompt": self.prompt, "answer": self.answer, "response": self.response}
        found |= {"extracted": self.extracted, "reward": self.reward}
        turns = [{"role": who, "text": text} for who, text in self.turns]
        return found | ({"board": self.board} if self.board else {}) | ({"turns": turns} if turns else {})


def markdown_table(transcripts: Sequence[Transcript]) -> str:
    rows = [["prompt", "response", "extracted", "right", "reward"], ["---"] * 5]
    for t in transcripts:
        response = "\n".join(f"[{who}] {text}" for who, text in t.turns) or t.response
        texts = (t.prompt, response, t.extracted or "(none)", t.answer, f"{t.reward:g}")
        rows.append([_escape_cell(text) for text in texts])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _escape_cell(text: str) -> str:
    """Escape a text so that it cannot end its cell or become HTML."""
    if len(text) > MAX_CELL_CHARS:
        text = text[:MAX_CELL_CHARS] + " …"
    for mark, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("\r", ""), ("\n", "<br>")):
        text = text.replace(mark, written)
    return text
