"""Prompts for a policy, as the run that trained it wrote them, and the tokens that end its responses."""

from collections.abc import Sequence
from typing import Any

from conf.schema.training.data import Corpus, QuestionData, TableData
from conf.schema.training.run_yaml import RunFileError
from trainer.data import chat
from trainer.data.chat import CHAT_TEMPLATES, ChatMessage, ChatTemplate, SpecialToken
from trainer.data.prompting import Problem, PromptEncoder
from trainer.policy.run_files import is_plain_text
from trainer.tokenizer.loading import Tokenizer, load_tokenizer

TURN_MARKERS = {"gemma": "<start_of_turn>", "llama3": "<|start_header_id|>", "qwen": "<|im_start|>"}
"""Special token by which the tokenizer of a chat model is recognized."""


class PolicyPrompts:
    """Encodes questions, conversations and plain text.

    Attributes:
        form: the turns of a chat; None for a model without turns.
        stop_tokens: ids that end a response.
    """

    def __init__(self, data: Any, tokenizer_file: str) -> None:
        """Take `data` of a run, or None for weights from elsewhere. Raises RunFileError."""
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer_file, "tokenizer")
        self._data = data
        self._questions: PromptEncoder | None = None
        if isinstance(data, QuestionData):
            self._questions = PromptEncoder(data.model_copy(update={"tokenizer": tokenizer_file}))
            self.form = CHAT_TEMPLATES.get(data.chat_template)
            names = [data.bos or (self.form.bos if self.form else None)]
            self.stop_tokens = self._questions.stop_tokens
        elif is_plain_text(data):
            self.form, names, self.stop_tokens = None, [], ()
        else:
            self.form = None if isinstance(data, Corpus) else _recognized_form(self.tokenizer)
            names = [data.bos if isinstance(data, Corpus) else _first_present(self.tokenizer, self.form)]
            ends = [data.eos] if isinstance(data, Corpus) else _usual_ends(self.tokenizer)
            self.stop_tokens = tuple(self._special(name) for name in ends if name is not None)
        self.bos_tokens = [self._special(name) for name in names if name is not None]

    @property
    def has_wording(self) -> bool:
        """Return whether `encode_question` adds words to a text: those that the policy was trained on."""
        return self._questions is not None or bool(getattr(self._data, "columns_of_prompt", ()))

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text that the model is to continue."""
        return [*self.bos_tokens, *self._ids(text)]

    def encode_question(self, text: str) -> list[int]:
        """Return the prompt that the run would ask this question with; without questions, that of a chat's turn."""
        if self._questions is not None:
            [question] = self._questions.encode([Problem(text, "", "")])
            return question.prompt_tokens
        if isinstance(self._data, TableData) and self._data.template is not None:
            columns = self._data.columns_of_prompt
            if len(columns) != 1:
                names = ", ".join(columns)
                raise RunFileError(f"data.template.prompt: needs the columns {names}, not one text; add --raw")
            return self.encode_text(self._data.template.prompt.format_map({columns[0]: text}))
        return self.encode_chat([ChatMessage("user", text)]) if self.form else self.encode_text(text)

    def encode_chat(self, turns: Sequence[ChatMessage]) -> list[int]:
        """Return the prompt of a conversation, for a policy with turns."""
        assert self.form is not None, "a policy with turns"
        system = self._data.prompt.system if isinstance(self._data, QuestionData) else None
        if system is not None and turns[0].role != "system":
            turns = [ChatMessage("system", system), *turns]
        ids = list(self.bos_tokens)
        for part in chat.format_turns(self.form, turns):
            ids += [self._special(part.name)] if isinstance(part, SpecialToken) else self._ids(part)
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        return self.tokenizer.decode(tokens)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode([text])[0].tolist()

    def _special(self, name: str) -> int:
        if name not in self.tokenizer.special_tokens:
            raise RunFileError(f"tokenizer: it has no special token {name}, which the run's data names")
        return self.tokenizer.special_tokens[name]


def _recognized_form(tokenizer: Tokenizer) -> ChatTemplate | None:
    known = tokenizer.special_tokens
    return next((CHAT_TEMPLATES[name] for name, token in TURN_MARKERS.items() if token in known), None)


def _first_present(tokenizer: Tokenizer, form: ChatTemplate | None) -> str | None:
    candidates = ([form.bos] if form else ["<bos>", "<|begin_of_text|>", "<s>"]) if tokenizer.special_tokens else []
    return next((name for name in candidates if name in tokenizer.special_tokens), None)


def _usual_ends(tokenizer: Tokenizer) -> list[str]:
    usual = ("<eos>", "<end_of_turn>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>", "</s>")
    return [name for name in usual if name in tokenizer.special_tokens]
