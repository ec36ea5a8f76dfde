"""The turns of a chat as the families of models were tuned for them, by `data.chat_template`.

A prompt is a list of pieces: special tokens, and text between them. Text never becomes a special token, whatever a
question holds; so the ids are those of the whole prompt in Hugging Face's tokenizers, and no question ends its turn.

    gemma   https://ai.google.dev/gemma/docs/core/prompt-structure
    llama3  https://www.llama.com/docs/model-cards-and-prompt-formats/meta-llama-3; 3.1 to 3.3 have the same turns, the
            dates that their templates put into a system turn are not written
    qwen    https://qwen.readthedocs.io/en/latest/getting_started/concepts.html; a system turn only where one is asked
            for, as Qwen 3; Qwen 2.5 was tuned with one: prompt.system
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from conf.schema.training.data import Prompt
from trainer.extension import load_extension


class SpecialToken(NamedTuple):
    name: str


PromptPart = SpecialToken | str


class ChatMessage(NamedTuple):
    """One chat message. role: system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class ChatTemplate:
    """Format of turns: the text before and after each, with the role's name in place of ROLE."""

    bos: str | None
    prefix: tuple[PromptPart, ...]
    suffix: tuple[PromptPart, ...]
    role_names: dict[str, str]
    end_of_turn: str
    """Special token that ends the model's turn."""
    strips: bool = True
    """Whether a turn loses the white space around its text."""


ROLE_PLACEHOLDER = "{role}"
CHAT_TEMPLATES = {
    "gemma": ChatTemplate(
        bos="<bos>",
        prefix=(SpecialToken("<start_of_turn>"), ROLE_PLACEHOLDER, "\n"),
        suffix=(SpecialToken("<end_of_turn>"), "\n"),
        role_names={"user": "user", "assistant": "model"},  # a system message begins the user's first turn
        end_of_turn="<end_of_turn>",
    ),
    "llama3": ChatTemplate(
        bos="<|begin_of_text|>",
        prefix=(SpecialToken("<|start_header_id|>"), ROLE_PLACEHOLDER, SpecialToken("<|end_header_id|>"), "\n\n"),
        suffix=(SpecialToken("<|eot_id|>"),),
        role_names={"system": "system", "user": "user", "assistant": "assistant"},
        end_of_turn="<|eot_id|>",
    ),
    "qwen": ChatTemplate(
        bos=None,
        prefix=(SpecialToken("<|im_start|>"), ROLE_PLACEHOLDER, "\n"),
        suffix=(SpecialToken("<|im_end|>"), "\n"),
        role_names={"system": "system", "user": "user", "assistant": "assistant"},
        end_of_turn="<|im_end|>",
        strips=False,
    ),
}


def plain_prompt(prompt: Prompt, question: str) -> list[PromptPart]:
    """Return system message, shots and question as one text, for models without turns."""
    shots = [_format_question(prompt, shot.question) + format_solution(prompt, shot.answer) for shot in prompt.shots]
    parts = [*([prompt.system] if prompt.system is not None else []), *shots, _format_question(prompt, question)]
    return [prompt.between.join(parts)]


def chat_prompt(form: ChatTemplate, prompt: Prompt, question: str) -> list[PromptPart]:
    """Return system message, shots and question as turns, up to the start of the model's turn, without BOS."""
    turns = [ChatMessage("system", prompt.system)] if prompt.system is not None else []
    for shot in prompt.shots:
        turns += [
            ChatMessage("user", _format_question(prompt, shot.question)),
            ChatMessage("assistant", format_solution(prompt, shot.answer)),
        ]
    turns.append(ChatMessage("user", _format_question(prompt, question)))
    return format_turns(form, [ChatMessage(turn.role, turn.content.strip()) for turn in turns])


def format_turns(form: ChatTemplate, turns: Sequence[ChatMessage]) -> list[PromptPart]:
    """Return the turns of a conversation, up to the start of the model's next turn, without BOS."""
    if "system" not in form.role_names and len(turns) > 1 and turns[0].role == "system":
        system, first, *rest = turns
        turns = [ChatMessage("user", f"{system.content.strip()}\n\n{first.content.strip()}"), *rest]
    pieces = list[PromptPart]()
    for turn in turns:
        content = turn.content.strip() if form.strips else turn.content
        pieces += [*_role_prefix(form, turn.role), content, *form.suffix]
    return list(_merge([*pieces, *_role_prefix(form, "assistant")]))


def next_turns(form: ChatTemplate, turns: Sequence[ChatMessage], *, ended: bool) -> list[PromptPart]:
    """Return what follows the model's turn: its end, turns of others, and the start of the model's next one.

    ended: whether the model has written its end-of-turn token.
    """
    return list(_merge([*form.suffix[int(ended) :], *format_turns(form, turns)]))


def format_solution(prompt: Prompt, answer: str) -> str:
    """Format a worked answer by the prompt's settings."""
    return prompt.answer.format(answer=answer)


def render(pieces: Sequence[PromptPart]) -> str:
    return "".join(piece.name if isinstance(piece, SpecialToken) else piece for piece in pieces)


def _format_question(prompt: Prompt, question: str) -> str:
    if prompt.formatter is not None:
        return load_extension("prompt", prompt.formatter, "data.prompt.formatter")(question)
    return prompt.question.format(question=question)


def _role_prefix(form: ChatTemplate, role: str) -> tuple[PromptPart, ...]:
    role = role if role in form.role_names else "user"  # Gemma has no turn of the system
    return tuple(form.role_names[role] if piece == ROLE_PLACEHOLDER else piece for piece in form.prefix)


def _merge(pieces: Sequence[PromptPart]) -> Iterator[PromptPart]:
    """Merge neighbouring texts, since a tokenizer may merge across them."""
    waiting = ""
    for piece in pieces:
        if isinstance(piece, SpecialToken):
            if waiting:
                yield waiting
            waiting = ""
            yield piece
        else:
            waiting += piece
    if waiting:
        yield waiting
