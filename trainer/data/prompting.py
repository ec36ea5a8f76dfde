"""Problems and the questions made of them: prompt tokens, and the texts of responses.

A prompt is a list of pieces: special tokens, and text between them. Text never becomes a special token, whatever a
question holds; so the ids are those of the whole prompt in Hugging Face's tokenizers, and no question ends its turn.
The turns of a chat, by `data.chat_template`, are those that the families of models were tuned for:

    gemma   https://ai.google.dev/gemma/docs/core/prompt-structure
    llama3  https://www.llama.com/docs/model-cards-and-prompt-formats/meta-llama-3; 3.1 to 3.3 have the same turns, the
            dates that their templates put into a system turn are not written
    qwen    https://qwen.readthedocs.io/en/latest/getting_started/concepts.html; a system turn only where one is asked
            for, as Qwen 3; Qwen 2.5 was tuned with one: prompt.system
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from conf.schema.training.data import Prompt, QuestionData
from conf.schema.training.run_yaml import RunFileError
from trainer.extension import load_extension
from trainer.tokenizer import loading


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
    if prompt.formatter is None:
        return prompt.question.format(question=question)
    text = load_extension("prompt", prompt.formatter, "data.prompt.formatter")(question)
    if not isinstance(text, str):
        raise RunFileError(f"data.prompt.formatter: {prompt.formatter} must return text, not {text!r:.80}")
    return text


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


class Problem(NamedTuple):
    """One question, its correct answer, and a worked response that ends in the answer.

    row: the columns that it was made from, for rewards that ask for them; messages: (role, text) of a conversation that
    is the prompt, in place of the question in the wording of `data.prompt`; place: of the row, for messages.
    """

    question: str
    answer: str
    solution: str
    row: Mapping[str, Any] | None = None
    messages: Sequence[tuple[str, str]] | None = None
    place: str = ""


class Question(NamedTuple):
    """A tokenized problem.

    prompt: as text; solution_tokens: a worked response, including the end; row: as in `Problem`.
    """

    prompt: str
    prompt_tokens: list[int]
    answer: str
    solution_tokens: list[int]
    row: Mapping[str, Any] | None = None


class Draw(NamedTuple):
    """Which training problems are wanted: those of a rollout, or of an update of the warm start.

    number: of the rollout or update, from 0; attempt: 0, or the round of resampling that replaces them.
    """

    phase: Literal["warm_start", "rollout"]
    number: int
    attempt: int = 0


class ProblemSource(Protocol):
    """Source of problems; every method is a pure function of its arguments and the run's seed."""

    def train(self, draw: Draw, count: int) -> list[Problem]: ...

    def validation(self, count: int) -> list[Problem]:
        """Return the fixed problems of evaluations during training, none of which occurs in training."""
        ...

    def test(self, count: int | None) -> list[Problem]:
        """Return the fixed problems of the tests before and after training; all of them if count is None."""
        ...


class PromptEncoder:
    """Encodes prompts with the tokenizer, template and wording of `data`.

    stop_tokens: ids of the special tokens that end a response; the first one follows a worked answer. vocab_size: ids
    that the model must know. bos: the token before each prompt, if any.
    """

    def __init__(self, data: QuestionData) -> None:
        """Raise RunFileError if the tokenizer is unreadable or lacks special tokens of data or template."""
        if data.tokenizer == loading.CHARACTERS:
            raise RunFileError("data.tokenizer: characters requires a text, not questions; use bytes")
        self._prompt, self._template = data.prompt, CHAT_TEMPLATES.get(data.chat_template)
        self.tokenizer = loading.load_tokenizer(data.tokenizer)
        bos = data.bos or (self._template.bos if self._template else None)
        self.bos = [self._special_id(bos, "data.bos" if data.bos else "data.chat_template")] if bos else []
        ends = [self._special_id(self._template.end_of_turn)] if self._template else []
        ends += [self._special_id(data.eos, "data.eos")] if data.eos else []
        self.stop_tokens = tuple(dict.fromkeys(ends))
        self.vocab_size = self.tokenizer.vocab_size

    def encode(self, problems: Sequence[Problem]) -> list[Question]:
        """Return questions with tokenized prompts and tokenized worked answers, including their end."""
        prompts = [self._parts(problem) for problem in problems]
        texts = [piece for pieces in prompts for piece in pieces if not isinstance(piece, SpecialToken)]
        worked = [self._format_solution(problem.solution) for problem in problems]
        ids = (found.tolist() for found in self.tokenizer.encode([*texts, *worked]))
        tokens = [self._to_ids(pieces, ids) for pieces in prompts]
        return [
            Question(render(pieces), prompt, problem.answer, [*answer, self.stop_tokens[0]], problem.row)
            for problem, pieces, prompt, answer in zip(problems, prompts, tokens, ids, strict=True)
        ]

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text within a response."""
        return self.tokenizer.encode([text])[0].tolist()

    def encode_observation(self, text: str, last: int, messages: Sequence[tuple[str, str]] | None = None) -> list[int]:
        """Return the ids of what the policy reads between two of its turns, up to the start of the next one.

        last: token that ended the policy's turn. In a chat the text is a turn of the user, or the messages are turns of
        their own.
        """
        if self._template is None:
            return self.encode_text(text)
        ended = last == self._special_id(self._template.end_of_turn)
        turns = [ChatMessage("user", text)] if messages is None else [ChatMessage(*message) for message in messages]
        pieces = next_turns(self._template, turns, ended=ended)
        found = self.tokenizer.encode([piece for piece in pieces if not isinstance(piece, SpecialToken)])
        return self._to_ids(pieces, (ids.tolist() for ids in found))[len(self.bos) :]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        return self.tokenizer.decode(tokens)

    def _parts(self, problem: Problem) -> list[PromptPart]:
        if problem.messages is not None:
            turns = [ChatMessage(*message) for message in problem.messages]
            if self._template is None:
                return [self._prompt.between.join(turn.content for turn in turns)]
            return format_turns(self._template, turns)
        if self._template:
            return chat_prompt(self._template, self._prompt, problem.question)
        return plain_prompt(self._prompt, problem.question)

    def _to_ids(self, pieces: Sequence[PromptPart], texts: Iterator[list[int]]) -> list[int]:
        """Return the ids of a prompt. texts: ids of its text pieces, in order."""
        ids = list(self.bos)
        for piece in pieces:
            ids += [self._special_id(piece.name)] if isinstance(piece, SpecialToken) else next(texts)
        return ids

    def _format_solution(self, worked: str) -> str:
        """Return a worked answer; chats strip surrounding white space, as in earlier turns of the model."""
        text = format_solution(self._prompt, worked)
        return text.strip() if self._template else text

    def _special_id(self, name: str, key: str = "data.chat_template") -> int:
        return loading.special_id(self.tokenizer, name, key)
