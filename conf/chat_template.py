"""Chat templates: how the turns of a conversation become the text of a prompt.

A model's own template is a program in Jinja beside its tokenizer. It is rendered with the settings of transformers
(`utils/chat_template_utils.py` of version 5.24), but without a clock and without chance, since a prompt is a function
of its messages: a template that has a date of its own for that case writes it, another one is refused. A sandbox keeps
it from files and from the attributes of Python's objects. Models without a template have a choice of `BUILT_IN`.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
TOOL_USE = "tool_use"
"""The name of the template that transformers takes for a conversation with tools, where a model has several."""
STOP_FILES = ("generation_config.json", "config.json")
"""Files of a model that name the ids at which transformers and vLLM end a response."""
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a template may write, as tokenizer_config.json names them."""
CLOCK = "strftime_now"
"""The function by which a template asks transformers for today's date."""
NO_CLOCK = "{% set strftime_now = no_clock %}\n"
"""Written before a template, it hides the function from it there too: `no_clock` is undefined."""
GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that a rendering gives a template."""
TUNED = re.compile(r"(?:^|[-_.])(?:it|instruct|chat)(?:[-_.]|$)", re.IGNORECASE)
"""In the name of a model, its maker's word that it was tuned on a chat."""
MODELS_TURN = "\N{LEFT WHITE SQUARE BRACKET}turn\N{RIGHT WHITE SQUARE BRACKET}"
"""A text of the model's turn that is found again in the rendering."""


class ChatMessage(NamedTuple):
    """One chat message. role: system, user or assistant."""

    role: str
    content: str


class ChatTemplateError(ValueError):
    """A template or the files around it cannot be used."""


class NoDateError(ChatTemplateError):
    """A template asks for today's date."""


class BuiltIn(NamedTuple):
    """The turns of a family of models. special: the tokens that it writes, with the one that ends a turn."""

    bos: str
    special: tuple[str, ...]
    body: str


BUILT_IN = {
    # https://ai.google.dev/gemma/docs/core/prompt-structure; a message of the system begins the user's first turn
    "gemma": BuiltIn(
        "<bos>",
        ("<start_of_turn>", "<end_of_turn>"),
        "{% set system = messages[0].role == 'system' and messages | length > 1 %}"
        "{% for message in (messages[1:] if system else messages) %}"
        r"{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' }}"
        r"{{ messages[0].content + '\n\n' if system and loop.first else '' }}"
        r"{{ message.content | trim + '<end_of_turn>\n' }}"
        "{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    ),
    # https://www.llama.com/docs/model-cards-and-prompt-formats/meta-llama-3; 3.1 to 3.3 begin with dates
    "llama3": BuiltIn(
        "<|begin_of_text|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "{% for message in messages %}"
        r"{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
        "{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ),
    # https://qwen.readthedocs.io/en/latest/getting_started/concepts.html; as Qwen 3, 2.5 begins with a system turn
    "qwen": BuiltIn(
        "",
        ("<|im_start|>", "<|im_end|>"),
        r"{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ),
}


class ChatTemplate:
    """A template in Jinja, with the special tokens that it may name.

    Every method raises ChatTemplateError for what the template refuses or cannot do.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source, self._tokens = source, dict(tokens)
        try:
            self._compiled = _environment().from_string(source)
        except TemplateError as error:
            line = f"line {lineno}: " if (lineno := getattr(error, "lineno", None)) else ""
            raise ChatTemplateError(f"it is no template of Jinja: {line}{error.message}") from None

    @classmethod
    def built_in(cls, name: str, bos: str | None) -> "ChatTemplate":
        """Return one of `BUILT_IN`. bos: in place of its own special token at the beginning."""
        form = BUILT_IN[name]
        begin = form.bos if bos is None else bos
        return cls(literal(begin) + form.body, {})

    def with_variables(self, variables: Mapping[str, bool | float | str] | None) -> "ChatTemplate":
        """Return the template with values of variables that it reads, such as enable_thinking, whoever renders it."""
        if not variables:
            return self
        jinja = _environment()
        read = meta.find_undeclared_variables(jinja.parse(self.source)) - {*GIVEN, *TOKEN_NAMES, *jinja.globals, CLOCK}
        if unknown := [name for name in variables if name not in read]:
            own = ", ".join(sorted(read)) or "none"
            raise ChatTemplateError(f"it reads no variable {unknown[0]}; it reads {own}")
        lines = (f"{{% set {name} = {json.dumps(value, ensure_ascii=False)} %}}" for name, value in variables.items())
        return ChatTemplate("\n".join([*lines, self.source]), self._tokens)

    def render(
        self,
        messages: Sequence[ChatMessage | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        ask: bool = True,
    ) -> str:
        """Return the text of a conversation. ask: it goes on with the start of the model's next turn.

        Messages and tools may be those of OpenAI's chat completions, with the arguments of calls as a mapping.
        """
        said = [message._asdict() if isinstance(message, ChatMessage) else message for message in messages]
        given = dict(zip(GIVEN, (said, list(tools) or None, None, ask), strict=True))
        try:
            return self._compiled.render(self._tokens | given)
        except Exception as error:  # a template is a program: it may fail in any way
            if f"'{CLOCK}' is undefined" in str(error):
                told = f"it asks for today's date ({CLOCK}), and a run has none"
                raise NoDateError(f"{told}; write a date into a copy of {TEMPLATE_FILE}{_instead(said)}") from None
            raise ChatTemplateError(f"it cannot write this conversation: {error}") from None

    def probe(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text of a conversation; of one with a system text, if the template writes the date without one."""
        try:
            return self.render(messages)
        except NoDateError:
            return self.render([ChatMessage("system", "?"), *messages])

    def after_turn(self, messages: Sequence[ChatMessage]) -> str:
        """Return what follows the text of the model's turn: its end, these messages, and the start of its next one."""
        if (after := self._after_turn(messages)) is None:
            raise ChatTemplateError("it leaves out what the model has said")
        return after

    def end_of_turn(self, special: Collection[str]) -> str | None:
        """Return the token that ends the model's turn: the first of `special` after its text; None if there is none."""
        after = self._after_turn([ChatMessage("user", "?")]) or ""
        places = {after.index(name): name for name in sorted(special, key=len) if name and name in after}
        return places[min(places)] if places else None

    def _after_turn(self, messages: Sequence[ChatMessage]) -> str | None:
        said = [ChatMessage("user", "?"), ChatMessage("assistant", MODELS_TURN), *messages]
        _, found, after = self.probe(said).rpartition(MODELS_TURN)
        return after if found else None


class TokenizerFiles:
    """What the files of a model say about its prompts.

    Every attribute raises ChatTemplateError for a file that cannot be read.

    Args:
        read: returns a file beside tokenizer.json, None if there is none.
        name: of the model, or of its folder, if it has one.
    """

    def __init__(self, read: Callable[[str], bytes | None], name: str = "") -> None:
        self._read, self._name = read, name

    @cached_property
    def tokens(self) -> dict[str, str]:
        """The special tokens that a template may write, by their names in `TOKEN_NAMES`."""
        described = self._json("special_tokens_map.json") | self._json(TOKENIZER_CONFIG)
        found = {name: _content(described.get(name)) for name in TOKEN_NAMES}
        return {name: content for name, content in found.items() if content is not None}

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The model's own template: that of a file, else the key's; of several, the one called `default`."""
        source: Any = self._text(TEMPLATE_FILE)
        if source is None:
            source = self._json(TOKENIZER_CONFIG).get("chat_template")
        if isinstance(source, list):
            named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
            source = named.get("default")
            if source is None:
                names = ", ".join(map(str, named))
                raise ChatTemplateError(f"{TOKENIZER_CONFIG} has the templates {names}, and none called default")
        if source is None or isinstance(source, str):
            return ChatTemplate(source, self.tokens) if source else None
        raise ChatTemplateError(f"{TOKENIZER_CONFIG}: chat_template is neither a text nor a list of named ones")

    @cached_property
    def has_tool_use(self) -> bool:
        """Whether the model has a template called `TOOL_USE`, which is not read."""
        if self._text(f"additional_chat_templates/{TOOL_USE}.jinja") is not None:
            return True
        source: Any = self._json(TOKENIZER_CONFIG).get("chat_template") if self._text(TEMPLATE_FILE) is None else None
        return any(isinstance(item, dict) and item.get("name") == TOOL_USE for item in source or ())

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a response, of all `STOP_FILES`."""
        return tuple(dict.fromkeys(i for name in STOP_FILES for i in self._stop_ids(name)))

    @cached_property
    def stop_names(self) -> set[str]:
        """The names of the tokens that end a response, as far as the files name them."""
        decoder = self._json(TOKENIZER_CONFIG).get("added_tokens_decoder") or {}
        known = {str(i): _content(token) for i, token in decoder.items()}
        if any(str(i) not in known for i in self.stop_ids):
            added = self._json("tokenizer.json").get("added_tokens") or []
            known |= {str(token.get("id")): _content(token) for token in added}
        named = {known.get(str(i)) for i in self.stop_ids} | {self.tokens.get("eos_token")}
        return {name for name in named if name is not None}

    @cached_property
    def is_tuned(self) -> bool:
        """Whether the model was tuned on the template: it does not say that it stops elsewhere than its turns end.

        Base models are published with the template of the tuned ones, and stop at the end of a text. So do the files of
        some tuned models, such as gemma-2-9b-it, by mistake; only their names tell the two apart.
        """
        if self.template is None:
            return False
        if not self.stop_ids or TUNED.search(self._name):
            return True
        return self.template.end_of_turn(self.stop_names) is not None

    def _stop_ids(self, name: str) -> Iterator[int]:
        described = self._json(name)
        nested = described.get("text_config")  # of models that also read images
        for section in (described, nested if isinstance(nested, dict) else {}):
            value = section.get("eos_token_id")
            for i in value if isinstance(value, list) else [] if value is None else [value]:
                if isinstance(i, bool) or not isinstance(i, int):
                    raise ChatTemplateError(f"{name}: eos_token_id is {value!r}, neither a number nor a list of them")
                yield i

    def _text(self, name: str) -> str | None:
        found = self._read(name)
        try:
            return None if found is None else found.decode()
        except UnicodeDecodeError:
            raise ChatTemplateError(f"{name} is not UTF-8 text") from None

    def _json(self, name: str) -> dict[str, Any]:
        text = self._text(name)
        try:
            found = json.loads(text) if text is not None else {}
        except ValueError as error:
            raise ChatTemplateError(f"{name} is not valid JSON: {error}") from None
        if not isinstance(found, dict):
            raise ChatTemplateError(f"{name} holds no mapping")
        return found


def literal(text: str) -> str:
    """Return the template that writes exactly this text."""
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""


def _instead(said: Sequence[Mapping[str, Any]]) -> str:
    """Return the other cure of a template that may write the date for want of a system text."""
    return "" if said[0].get("role") == "system" else ", or, if it has one only then, add a system text"


def _content(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, and writes it as it is."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja's own extensions

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    found.filters["tojson"] = _to_json
    found.globals["raise_exception"] = _raise
    del found.filters["random"], found.globals["lipsum"]
    return found


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
