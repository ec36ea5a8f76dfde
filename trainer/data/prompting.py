"""Problems and the questions made of them: prompt tokens, and the texts of responses."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from conf.chat_template import ChatMessage
from conf.formats import RunFileError
from conf.schema.training.data import Prompt, QuestionData
from conf.schema.training.refusals import characters_problem
from trainer.data.chat import load_chat, stop_ids, tools_in_words
from trainer.extension import load_extension
from trainer.tokenizer import loading


def plain_prompt(prompt: Prompt, question: str) -> str:
    """Return system message, shots and question as one text, for models without turns."""
    shots = [_format_question(prompt, shot.question) + format_solution(prompt, shot.answer) for shot in prompt.shots]
    parts = [*([prompt.system] if prompt.system is not None else []), *shots, _format_question(prompt, question)]
    return prompt.between.join(parts)


def chat_turns(prompt: Prompt, question: str) -> list[ChatMessage]:
    """Return system message, shots and question as turns."""
    turns = [ChatMessage("system", prompt.system)] if prompt.system is not None else []
    for shot in prompt.shots:
        turns += [
            ChatMessage("user", _format_question(prompt, shot.question)),
            ChatMessage("assistant", format_solution(prompt, shot.answer)),
        ]
    return [*turns, ChatMessage("user", _format_question(prompt, question))]


def format_solution(prompt: Prompt, answer: str) -> str:
    """Format a worked answer by the prompt's settings."""
    return prompt.answer.format(answer=answer)


def _format_question(prompt: Prompt, question: str) -> str:
    if prompt.formatter is None:
        return prompt.question.format(question=question)
    text = load_extension("prompt", prompt.formatter, "data.prompt.formatter")(question)
    if not isinstance(text, str):
        raise RunFileError(f"data.prompt.formatter: {prompt.formatter} must return text, not {text!r:.80}")
    return text


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

    chat: the turns of the prompts, None for plain text; stop_tokens: ids that end a response, of which the first one
    follows a worked answer; vocab_size: ids that the model must know; bos: the token before each prompt, if any.
    """

    def __init__(self, data: QuestionData) -> None:
        """Raise RunFileError if the tokenizer is unreadable or lacks special tokens of data or template."""
        if why := characters_problem(data):
            raise RunFileError(f"data.tokenizer: {why}")
        self._prompt = data.prompt
        self.tokenizer = loading.load_tokenizer(data.tokenizer)
        self.chat = load_chat(data, self.tokenizer)
        if self.chat is not None:
            self.bos = self.chat.bos
        else:
            self.bos = [self._special_id(data.bos, "data.bos")] if data.bos else []
        ends = [self.chat.end] if self.chat is not None and self.chat.end is not None else []
        ends += [self._special_id(name, "data.eos") for name in data.ends]
        self.stop_tokens = tuple(dict.fromkeys([*ends, *stop_ids(data.tokenizer)]))
        if not self.stop_tokens:
            raise RunFileError("data.eos: neither the template nor the model's files say what ends a response; set it")
        self.vocab_size = self.tokenizer.vocab_size

    def encode(self, problems: Sequence[Problem]) -> list[Question]:
        """Return questions with tokenized prompts and tokenized worked answers, including their end."""
        worked = [format_solution(self._prompt, problem.solution) for problem in problems]
        if self.chat is None:
            prompts = [self._plain(problem) for problem in problems]
            ids = [found.tolist() for found in self.tokenizer.encode([*prompts, *worked])]
            asked = [[*self.bos, *tokens] for tokens in ids[: len(prompts)]]
            answers = [[*tokens, self.stop_tokens[0]] for tokens in ids[len(prompts) :]]
        else:
            turns = [self._turns(problem) for problem in problems]
            written = [self.chat.write(said) for said in turns]
            responses = [self.chat.write_response(*each) for each in zip(turns, written, worked, strict=True)]
            ids = self.chat.encode([*written, *responses])
            asked, prompts = ids[: len(turns)], [self.chat.shown(text) for text in written]
            answers = [
                tokens if tokens[-1:] == [self.stop_tokens[0]] else [*tokens, self.stop_tokens[0]]
                for tokens in ids[len(turns) :]
            ]
        return [
            Question(prompt, tokens, problem.answer, answer, problem.row)
            for problem, prompt, tokens, answer in zip(problems, prompts, asked, answers, strict=True)
        ]

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text within a response."""
        return self.tokenizer.encode([text])[0].tolist()

    def encode_observation(self, text: str, last: int, messages: Sequence[tuple[str, str]] | None = None) -> list[int]:
        """Return the ids of what the policy reads between two of its turns, up to the start of the next one.

        last: token that ended the policy's turn. In a chat the text is a turn of the user, or the messages are turns of
        their own.
        """
        if self.chat is None:
            return self.encode_text(text)
        turns = [ChatMessage("user", text)] if messages is None else [ChatMessage(*message) for message in messages]
        [ids] = self.chat.encode([self.chat.write_next(turns, ended=last == self.chat.end)])
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        return self.tokenizer.decode(tokens)

    def _turns(self, problem: Problem) -> list[ChatMessage]:
        if problem.messages is not None:
            return [ChatMessage(*message) for message in problem.messages]
        return chat_turns(self._prompt, problem.question)

    def _plain(self, problem: Problem) -> str:
        if problem.messages is not None:
            return self._prompt.between.join(turn.content for turn in tools_in_words(self._turns(problem)))
        return plain_prompt(self._prompt, problem.question)

    def _special_id(self, name: str, key: str) -> int:
        return loading.special_id(self.tokenizer, name, key)
