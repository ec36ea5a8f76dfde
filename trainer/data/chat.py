"""Conversations as tokens, by the model's own template or a built-in one (`data.chat_template`).

The text of a message never becomes a special token, whatever it holds, so no question ends its turn. Such names are
put between two marks before the template writes them, and the tokenizer reads what is between the marks as plain text;
all other ids are those of the whole rendering in Hugging Face's tokenizers.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from etils import epath

from conf.chat_template import BUILT_IN, ChatMessage, ChatTemplate, ChatTemplateError, TokenizerFiles
from conf.environment import TOOLS
from conf.formats import RunFileError
from conf.schema.training.data import QuestionData
from trainer.tokenizer import loading
from trainer.tokenizer.loading import LibraryTokenizer, Tokenizer

KEY = "data.chat_template"
OPEN, CLOSE = "\U0010fffc", "\U0010fffd"
"""The marks: the last characters for private use, which a text has only between marks of its own."""
MARKED = re.compile(f"{OPEN}(.+?){CLOSE}", re.DOTALL)
NO_MARKS = {ord(OPEN): None, ord(CLOSE): None}
"""Removes a mark whose other one the template has cut off."""

CALL = "<tool_call>"
"""How a call begins that environments read; a template that writes it describes the tools itself."""
IN_WORDS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""What Qwen 2.5 and 3 are told of tools: https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/tokenizer_config.json."""


@contextmanager
def template_errors(key: str = KEY) -> Iterator[None]:
    """Turn what a template or its files refuse into a RunFileError of a config key."""
    try:
        yield
    except ChatTemplateError as error:
        raise RunFileError(f"{key}: {error}") from None


def load_chat(data: QuestionData, tokenizer: Tokenizer) -> "Chat | None":
    """Return the turns that `data` asks for, None for plain text. Raises RunFileError."""
    if data.chat_template == "none":
        return None
    if not isinstance(tokenizer, LibraryTokenizer):
        raise RunFileError(f"{KEY}: needs the model's tokenizer.json, not data.tokenizer={data.tokenizer}")
    if (form := BUILT_IN.get(data.chat_template)) is None:
        if (chat := own_chat(data.tokenizer, tokenizer, data.chat_template_kwargs)) is None:
            raise RunFileError(f"{KEY}: there is no template beside {data.tokenizer}; copy it there, or set none")
        return chat
    for name in form.special:
        loading.special_id(tokenizer, name, KEY)
    bos = data.bos or form.bos
    if bos:
        loading.special_id(tokenizer, bos, "data.bos" if data.bos else KEY)
    return Chat(ChatTemplate.built_in(data.chat_template, data.bos), tokenizer, bos)


def own_chat(
    tokenizer_file: str,
    tokenizer: LibraryTokenizer,
    variables: Mapping[str, Any] | None = None,
    *,
    only_tuned: bool = False,
) -> "Chat | None":
    """Return the turns of the template beside a tokenizer, None if there is none. Raises RunFileError.

    variables: values of some that the template reads; only_tuned: neither that of a base model, which does not stop at
    the end of its turns; the folder's name may tell.
    """
    files = TokenizerFiles(loading.read_beside(tokenizer_file), epath.Path(tokenizer_file).parent.name)
    with template_errors():
        if files.template is None or (only_tuned and not files.is_tuned):
            return None
        return Chat(files.template.with_variables(variables), tokenizer, files.tokens.get("bos_token", ""))


def stop_ids(tokenizer_file: str) -> tuple[int, ...]:
    """Return the ids at which the model ends a response, as the files beside its tokenizer say. Raises RunFileError."""
    with template_errors("data.tokenizer"):
        return TokenizerFiles(loading.read_beside(tokenizer_file)).stop_ids


class Chat:
    """The turns of a conversation as text with marks, and as tokens.

    Every method raises RunFileError for a conversation that the template refuses.

    Attributes:
        bos: the token that begins every conversation, if any.
        end: the token that ends the model's turn, None if the template has none.
    """

    def __init__(self, template: ChatTemplate, tokenizer: LibraryTokenizer, bos: str) -> None:
        """Take a template. bos: the name of the token that may begin a conversation; empty if none does."""
        self.template, self._tokenizer = template, tokenizer
        special = tokenizer.special_tokens
        self._names = {i: name for name, i in special.items()}
        with template_errors():
            name = template.end_of_turn(special)
            begins = bos in special and template.probe([ChatMessage("user", "?")]).startswith(bos)
        self.end = None if name is None else special[name]
        self._end = None if name is None else re.compile(f"(?<!{OPEN}){re.escape(name)}")
        names = sorted(special, key=len, reverse=True)
        self._hostile = re.compile("|".join(map(re.escape, [*names, OPEN, CLOSE])))
        self.bos = [special[bos]] if begins else []

    def write(self, turns: Sequence[ChatMessage]) -> str:
        """Return the prompt of a conversation, up to the start of the model's next turn."""
        with template_errors():
            return self._render(self._marked(turns), ask=True)

    def write_response(self, turns: Sequence[ChatMessage], asked: str, response: str) -> str:
        """Return the model's turn after a prompt, with its end, as the template writes it in a conversation.

        asked: what `write` returns of the turns. A template that begins the answer in another way than it asks for it,
        as with thoughts that it then leaves out, has no word in the matter.
        """
        [said] = self._marked([ChatMessage("assistant", response)])
        with template_errors():
            whole = self._render([*self._marked(turns), said], ask=False)
        if not whole.startswith(asked):
            return said.content.strip() + (self._names[self.end] if self.end is not None else "")
        written = whole[len(asked) :]
        end = self._end.search(written) if self._end is not None else None
        return written[: end.end()] if end is not None else written

    def write_next(self, turns: Sequence[ChatMessage], *, ended: bool) -> str:
        """Return what follows the model's turn: its end, unless it wrote that, other turns, the start of its next."""
        with template_errors():
            after = self.template.after_turn(tools_in_words(self._marked(turns)))
        end = self._end.search(after) if ended and self._end is not None else None
        return after if end is None else after[end.end() :]

    def shown(self, written: str) -> str:
        """Return a prompt as text, without marks and the token that begins it."""
        begin = self._names[self.bos[0]] if self.bos else ""
        return MARKED.sub(r"\1", written).removeprefix(begin)

    def encode(self, written: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts with marks."""
        parts = [MARKED.split(text) for text in written]  # every second one was between marks
        written_by_template = [part.translate(NO_MARKS) for split in parts for part in split[::2]]
        special = iter(self._tokenizer.encode_special(written_by_template))
        plain = iter(self._tokenizer.encode([part for split in parts for part in split[1::2]]))
        return [
            [i for place in range(len(split)) for i in (next(plain).tolist() if place % 2 else next(special))]
            for split in parts
        ]

    def _render(self, turns: Sequence[ChatMessage], *, ask: bool) -> str:
        if turns and turns[0].role == TOOLS and TOOLS in self.template.source and CALL in self.template.source:
            return self.template.render(turns[1:], json.loads(turns[0].content), ask=ask)
        return self.template.render(tools_in_words(turns), ask=ask)

    def _marked(self, turns: Sequence[ChatMessage]) -> list[ChatMessage]:
        return [
            turn._replace(content=self._hostile.sub(lambda found: f"{OPEN}{found[0]}{CLOSE}", turn.content))
            for turn in turns
        ]


def tools_in_words(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return turns without one of tools, of which the system's message tells."""
    if not turns or turns[0].role != TOOLS:
        return list(turns)
    tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in json.loads(turns[0].content))
    told, rest = IN_WORDS.format(tools=tools), list(turns[1:])
    if rest and rest[0].role == "system":
        told = f"{rest.pop(0).content}\n\n{told}"
    return [ChatMessage("system", told), *rest]
