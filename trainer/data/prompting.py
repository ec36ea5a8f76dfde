"""Problems and the questions made of them: prompt tokens, and the texts of responses."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from conf.schema.training.data import QuestionData
from conf.schema.training.run_yaml import RunFileError
from trainer.data import chat
from trainer.data.chat import ChatMessage, PromptPart, SpecialToken
from trainer.tokenizer import loading


class Problem(NamedTuple):
    """One question, its correct answer, and a worked response that ends in the answer.

    row: the columns that it was made from, for rewards that ask for them; messages: (role, text) of a conversation that
    is the prompt, in place of the question in the wording of `data.prompt`.
    """

    question: str
    answer: str
    solution: str
    row: Mapping[str, Any] | None = None
    messages: Sequence[tuple[str, str]] | None = None


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
        self._prompt, self._template = data.prompt, chat.CHAT_TEMPLATES.get(data.chat_template)
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
            Question(chat.render(pieces), prompt, problem.answer, [*answer, self.stop_tokens[0]], problem.row)
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
        pieces = chat.next_turns(self._template, turns, ended=ended)
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
            return chat.format_turns(self._template, turns)
        if self._template:
            return chat.chat_prompt(self._template, self._prompt, problem.question)
        return chat.plain_prompt(self._prompt, problem.question)

    def _to_ids(self, pieces: Sequence[PromptPart], texts: Iterator[list[int]]) -> list[int]:
        """Return the ids of a prompt. texts: ids of its text pieces, in order."""
        ids = list(self.bos)
        for piece in pieces:
            ids += [self._special_id(piece.name)] if isinstance(piece, SpecialToken) else next(texts)
        return ids

    def _format_solution(self, worked: str) -> str:
        """Return a worked answer; chats strip surrounding white space, as in earlier turns of the model."""
        text = chat.format_solution(self._prompt, worked)
        return text.strip() if self._template else text

    def _special_id(self, name: str, key: str = "data.chat_template") -> int:
        return loading.special_id(self.tokenizer, name, key)
