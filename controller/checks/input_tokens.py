"""Tokens: the tokenizer suits the model and the data, and prompts are in the turns that the model was tuned on."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from conf.formats import BYTE_TOKENS
from conf.schema.assets import parse_source
from conf.schema.config import Config
from conf.schema.training.data import Corpus, QuestionData, TextData
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.loop_parts import stop_problem
from controller.checks.input_files import paths_here
from controller.config.pretrained_model import HUB, MISSING_TOKENIZER, HubFileError, hub_tokenizer
from controller.config.run_yaml import ASSET
from controller.context import Context
from controller.core.finding import Issue, check
from controller.inputs.hub_sources import hub_endpoint, lookup_problem

if TYPE_CHECKING:
    from conf.chat_template import ChatMessage, ChatTemplate, TokenizerFiles

KEY, SYSTEM = "data.chat_template", "data.prompt.system"
MAX_BYTES = 64 << 20
"""Larger files of a tokenizer are left to the trainer."""


@check("chat_template", "error", KEY, SYSTEM, also="note", live=True)
def turns_are_the_models_own(config: Config, context: Context) -> Iterator[Issue]:
    """A model that is asked in other turns than it was tuned on starts from wrong answers, without any error. A note
    shows the prompt of a model's own template, or why a template beside the tokenizer is not used.
    """
    data = config.data
    if config.program.kind != "trainer" or not isinstance(data, QuestionData):
        return
    if data.tokenizer == MISSING_TOKENIZER:
        if data.chat_template != "none":
            needed = f"needs the model's tokenizer.json, not data.tokenizer={MISSING_TOKENIZER}"
            yield Issue(f"{needed}; set that, or {KEY}=none", KEY)
        return
    try:
        if (files := _files(config, data)) is not None:
            yield from _turns_of(data, files)
    except HubFileError as error:
        if data.chat_template == "none":
            return  # `source` reports it
        yield Issue(f"the template beside {data.tokenizer} was not read: {error}", KEY, "note")


def _turns_of(data: QuestionData, files: "TokenizerFiles") -> Iterator[Issue]:
    from conf.chat_template import BUILT_IN, TOOL_USE, ChatTemplate, ChatTemplateError

    try:
        own = files.template
        if data.chat_template == "none":
            yield from _unused(files)
        elif data.chat_template != "own":
            asked = ChatTemplate.built_in(data.chat_template, data.bos)
            if own is not None:
                yield from _differences(data, asked, own)
        elif own is None:
            choices = ", ".join(("none", *BUILT_IN))
            yield Issue(f"there is no template beside {data.tokenizer}; copy it there, or set one of {choices}", KEY)
        else:
            yield from _example(data, own.with_variables(data.chat_template_kwargs), files.stop_ids)
            if files.has_tool_use:
                message = f"the template {TOOL_USE} is not read; environments describe their tools in the default one"
                yield Issue(message, KEY, "note")
    except ChatTemplateError as error:
        severity = "note" if data.chat_template == "none" else "error"
        yield Issue(f"the template beside {data.tokenizer} cannot be used: {error}", KEY, severity)


def _unused(files: "TokenizerFiles") -> Iterator[Issue]:
    if files.template is not None and files.is_tuned:
        yield Issue("the model was tuned on a chat, which `own` writes; its prompts are plain text", KEY, "note")
    elif files.template is not None:
        stops = ", ".join(sorted(files.stop_names)) or "no token"
        message = f"the tokenizer has a chat template, but the model stops at {stops}, as one that was not tuned on it"
        yield Issue(f"{message}; prompts are plain text, and `own` writes its turns", KEY, "note")


def _differences(data: QuestionData, asked: "ChatTemplate", own: "ChatTemplate") -> Iterator[Issue]:
    from conf.chat_template import ChatTemplateError

    for said in (_turns(data)[:-2], _turns(data)):  # the shorter one is easier to compare
        ours = asked.render(said)
        try:
            told = repr(own.render(said))
        except ChatTemplateError as error:
            told = f"refuses it: {error}"
        if told != repr(ours):
            message = f"{data.chat_template} writes {ours!r}, the model's own template {told}; set {KEY}=own"
            yield Issue(message, KEY)
            return


def _example(data: QuestionData, own: "ChatTemplate", stops: tuple[int, ...]) -> Iterator[Issue]:
    from conf.chat_template import CLOCK, ChatTemplateError

    try:
        own.render(_turns(data))
    except ChatTemplateError as error:
        if data.prompt.system is None:
            raise
        own.render(_turns(data)[1:])
        yield Issue(f"the model's own template takes no message of the system: {error}; set null", SYSTEM)
        return
    text, ids = own.render(_turns(data)[:-2]), ", ".join(map(str, stops))
    ends = f"the end of a turn{f', or the tokens {ids} that its files name' if ids else ''}"
    yield Issue(f"the model's own template writes prompts such as {text!r}; responses end at {ends}", KEY, "note")
    if CLOCK in own.source:
        message = "the template asks for today's date; a run and its export have the date that it keeps for want of one"
        yield Issue(message, KEY, "note")


def _turns(data: QuestionData) -> list["ChatMessage"]:
    """Return a conversation of two questions, with the system's message of `data`."""
    from conf.chat_template import ChatMessage

    said = [("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 3?")]
    system = [] if data.prompt.system is None else [("system", data.prompt.system)]
    return [ChatMessage(*turn) for turn in (*system, *said)]


def _files(config: Config, data: QuestionData) -> "TokenizerFiles | None":
    """Return the files beside the tokenizer; None if they cannot be read from here. Raises HubFileError."""
    folder, _, _ = data.tokenizer.rpartition("/")
    if here := paths_here(config, data.tokenizer):
        from conf.chat_template import TokenizerFiles

        def read(name: str) -> bytes | None:
            found = paths_here(config, f"{folder}/{name}")
            return found[0].read_bytes() if found else None

        return TokenizerFiles(read, here[0].parent.name)
    asset = config.assets.models.get(folder.removeprefix(ASSET)) if folder.startswith(ASSET) else None
    if asset is None or not str(asset.source).startswith(HUB):
        return None
    problem = lookup_problem(hub_endpoint())
    if problem and data.chat_template == "none":
        return None  # a note is not worth the import of the Hub's library
    return hub_tokenizer(parse_source(str(asset.source)), problem)


class Tokenizer(NamedTuple):
    """How many IDs a model needs for a tokenizer, and the names of its added tokens, and of the special ones."""

    ids: int
    added: tuple[str, ...]
    special: tuple[str, ...]


@check(
    "tokenizer",
    "error",
    "model.vocab_size",
    "data.bos",
    "data.eos",
    "data.tokenizer",
    "loop.sampler.stop",
    "loop.sampler.logit_bias",
    "loop.sampler.stop_token_ids",
)
def tokens_are_known(config: Config) -> Iterator[Issue]:
    """Token IDs without a row in the model, a special token that the tokenizer lacks, or a file that is no tokenizer,
    end a billed run.
    """
    data, size = config.data, getattr(config.model, "vocab_size", None)
    if config.program.kind != "trainer" or not isinstance(data, QuestionData | Corpus) or size is None:
        return
    for key, problem in config.loop.sampler.unknown_ids(size) if isinstance(config.loop, GrpoLoop) else ():
        yield Issue(problem, key)
    try:
        found = _tokenizer(config, data)
    except _NoTokenizerError as error:
        yield Issue(f"{error}; name a tokenizer.json of Hugging Face's library", "data.tokenizer")
        return
    if found is None:
        return
    if found.ids > size:
        named = f"data.tokenizer={data.tokenizer}"
        yield Issue(f"{size} is too small for {named}, which has {found.ids} IDs; set {found.ids}", "model.vocab_size")
    if _is_plain(data):
        return
    ends = data.ends if isinstance(data, QuestionData) else filter(None, [data.eos])
    for key, name in (("data.bos", data.bos), *(("data.eos", end) for end in ends)):
        if name is not None and name not in found.added:
            choices = ", ".join(found.added[:12]) or "none"
            yield Issue(f'the tokenizer has no special token {name}; it has {choices}; set one, quoted: {key}="…"', key)
    if isinstance(config.loop, GrpoLoop) and (problem := stop_problem(config.loop.sampler.stop, found.special)):
        yield Issue(problem, "loop.sampler.stop")


def _is_plain(data: QuestionData | Corpus) -> bool:
    """Return whether the data are windows of a text, which has no special tokens."""
    return isinstance(data, TextData) and data.packing == "windows"


def _tokenizer(config: Config, data: QuestionData | Corpus) -> Tokenizer | None:
    """Return what can be told here of the tokenizer; None if it is elsewhere, or the trainer will refuse it."""
    if data.tokenizer == "bytes":
        return Tokenizer(256 + (0 if _is_plain(data) else len(BYTE_TOKENS)), BYTE_TOKENS, BYTE_TOKENS)
    text = data.path if data.tokenizer == "characters" and isinstance(data, TextData) else None
    files = paths_here(config, text or data.tokenizer)
    try:
        if not files or sum(file.stat().st_size for file in files) > MAX_BYTES:
            return None
        if text is not None:
            return Tokenizer(len(set().union(*(file.read_text("utf-8-sig") for file in files))), (), ())
        raw = files[0].read_bytes()
    except (OSError, UnicodeDecodeError):
        return None  # `first_row` or the trainer reports it
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _NoTokenizerError(f"{files[0]} is not JSON: {error}") from None
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict) or "vocab" not in model:
        raise _NoTokenizerError(f"{files[0]} has no model with a vocab, as a tokenizer.json has")
    try:
        return _parse(document)
    except (AttributeError, KeyError, TypeError, IndexError):
        return None  # of a version that this one does not know


class _NoTokenizerError(ValueError):
    """A file is no tokenizer; the message names it."""


def _parse(document: dict[str, Any]) -> Tokenizer:
    """Return what a tokenizer.json tells; no text becomes the special token of an image."""
    added = {token["content"]: token for token in document["added_tokens"]}
    vocabulary = document["model"]["vocab"]  # of Unigram a list of tokens and scores
    ids = {pair[0]: i for i, pair in enumerate(vocabulary)} if isinstance(vocabulary, list) else dict(vocabulary)
    ids |= {name: token["id"] for name, token in added.items()}
    texts = [i for name, i in ids.items() if not ("image" in name and added.get(name, {}).get("special"))]
    special = tuple(name for name, token in added.items() if token.get("special"))
    return Tokenizer(1 + max(texts, default=-1), tuple(added), special)
