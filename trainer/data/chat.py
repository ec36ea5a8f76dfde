"""The turns of a chat as the families of models were tuned for them, by `data.chat_template`.

A prompt is a list of pieces: special tokens, and text between them. Text never becomes a special token, whatever a
question holds; so the ids are those of the whole prompt in Hugging Face's tokenizers, and no question ends its turn.

    gemma   https://ai.google.dev/gemma/docs/core/prompt-structure
    llama3  https://www.llama.com/docs/model-cards-and-prompt-formats/meta-llama-3; 3.1 to 3.3 have the same turns, the
            dates that their templates put into a system turn are not written
    qwen    https://qwen.readthedocs.io/en/latest/getting_started/concepts.html; a system turn only where one is asked
            for, as Qwen 3; Qwen 2.5 was tuned with one: prompt.system
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from conf.schema.training.prompts import Prompt


class Special(NamedTuple):
    """A special token, by its name."""

    name: str


Piece = Special | str


class Turn(NamedTuple):
    """What one side says. role: system, user or assistant."""

    role: str
    text: str


@dataclass(frozen=True)
class Format:
    """How turns are written: `before` and `after` each, with the role's name where ROLE stands."""

    bos: str | None
    before: tuple[Piece, ...]
    after: tuple[Piece, ...]
    roles: dict[str, str]
    end: str
    """The special token with which the model ends its turn."""


ROLE = "{role}"
CHATS = {
    "gemma": Format(
        bos="<bos>",
        before=(Special("<start_of_turn>"), ROLE, "\n"),
        after=(Special("<end_of_turn>"), "\n"),
        roles={"user": "user", "assistant": "model"},  # a system's words begin the user's first turn
        end="<end_of_turn>",
    ),
    "llama3": Format(
        bos="<|begin_of_text|>",
        before=(Special("<|start_header_id|>"), ROLE, Special("<|end_header_id|>"), "\n\n"),
        after=(Special("<|eot_id|>"),),
        roles={"system": "system", "user": "user", "assistant": "assistant"},
        end="<|eot_id|>",
    ),
    "qwen": Format(
        bos=None,
        before=(Special("<|im_start|>"), ROLE, "\n"),
        after=(Special("<|im_end|>"), "\n"),
        roles={"system": "system", "user": "user", "assistant": "assistant"},
        end="<|im_end|>",
    ),
}


def plain(prompt: Prompt, question: str) -> list[Piece]:
    """System, shots and question as one text, for models that know no turns."""
    shots = [_asked(prompt, shot.question) + answered(prompt, shot.answer) for shot in prompt.shots]
    parts = [*([prompt.system] if prompt.system is not None else []), *shots, _asked(prompt, question)]
    return [prompt.between.join(parts)]


def chat(form: Format, prompt: Prompt, question: str) -> list[Piece]:
    """System, shots and question as turns, up to where the model's own begins, without BOS."""
    turns = [Turn("system", prompt.system)] if prompt.system is not None else []
    for shot in prompt.shots:
        turns += [Turn("user", _asked(prompt, shot.question)), Turn("assistant", answered(prompt, shot.answer))]
    turns.append(Turn("user", _asked(prompt, question)))
    if "system" not in form.roles and turns[0].role == "system":
        system, first, *rest = turns
        turns = [Turn("user", f"{system.text.strip()}\n\n{first.text.strip()}"), *rest]
    pieces = [piece for turn in turns for piece in (*_before(form, turn.role), turn.text.strip(), *form.after)]
    return list(_joined([*pieces, *_before(form, "assistant")]))


def answered(prompt: Prompt, answer: str) -> str:
    """A worked answer in the prompt's words."""
    return prompt.answer.format(answer=answer)


def text(pieces: Sequence[Piece]) -> str:
    """As one reads it."""
    return "".join(piece.name if isinstance(piece, Special) else piece for piece in pieces)


def _asked(prompt: Prompt, question: str) -> str:
    return prompt.question.format(question=question)


def _before(form: Format, role: str) -> tuple[Piece, ...]:
    return tuple(form.roles[role] if piece == ROLE else piece for piece in form.before)


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Neighbouring texts as one: a tokenizer may merge across them."""
    waiting = ""
    for piece in pieces:
        if isinstance(piece, Special):
            if waiting:
                yield waiting
            waiting = ""
            yield piece
        else:
            waiting += piece
    if waiting:
        yield waiting
