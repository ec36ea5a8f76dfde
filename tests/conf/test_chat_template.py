"""Chat templates: what transformers renders, what a template may not do, and which tokens end a response."""

import json
from typing import Any

import pytest

from conf.chat_template import BUILT_IN, ChatMessage, ChatTemplate, ChatTemplateError, TokenizerFiles
from tests.fakes.chat_templates import NEWER, OWN
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "trainer" / "fixtures"
CASES = json.loads((FIXTURES / "own_templates.json").read_text())
HI = [ChatMessage("user", "hi")]


@pytest.mark.parametrize("name", [*OWN, *NEWER])
def test_a_models_own_template_writes_what_transformers_does(name: str) -> None:
    """With and without system text, tools and calls, one and several turns (fixtures/make_chats.py)."""
    cases = [case for case in CASES if case["template"] == name]
    assert len(cases) >= (12 if name in NEWER else 24)
    for case in cases:
        template = ChatTemplate((OWN | NEWER)[name], case["tokens"])
        if case["rendered"].startswith("refused: "):
            with pytest.raises(ChatTemplateError) as refused:
                template.render(case["messages"], case["tools"] or (), ask=case["ask"])
            assert str(refused.value).endswith(case["rendered"].removeprefix("refused: "))
        else:
            assert template.render(case["messages"], case["tools"] or (), ask=case["ask"]) == case["rendered"]


@pytest.mark.parametrize("case", json.loads((FIXTURES / "conversations.json").read_text()))
def test_a_built_in_form_is_the_familys_own_template(case: dict[str, Any]) -> None:
    if not case["tools"]:
        template = ChatTemplate.built_in(case["template"], None)
        assert template.render(case["messages"]) == case["rendered"]
    assert template_end(case["template"]) == BUILT_IN[case["template"]].special[-1]


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_what_is_not_given_is_none_as_in_transformers(name: str) -> None:
    assert ChatTemplate(f"{{{{ {name} is none }}}}", {}).render(HI) == "True"


THINKING = (
    "{% macro begin() %}<think>{{ '</think>' if enable_thinking is defined and not enable_thinking }}{% endmacro %}"
    "{{ bos_token }}{{ messages[0].content }}{{ begin() }}{{ style }}"
    "{% for _ in range(0) %}{{ strftime_now() }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("variables", "written"),
    [
        (None, "<s>hi<think>"),
        ({"enable_thinking": True}, "<s>hi<think>"),
        ({"enable_thinking": False, "style": '"x" {{ 1 }}'}, '<s>hi<think></think>"x" {{ 1 }}'),
        ({"style": 1.5}, "<s>hi<think>1.5"),
        ({"style": '%}{{ 7 * 7 }}\\\n\u2028{# "'}, '<s>hi<think>%}{{ 7 * 7 }}\\\n\u2028{# "'),
    ],
)
def test_variables_are_part_of_the_template(variables: Any, written: str) -> None:
    """So its source, which an export writes, says the same to who renders it without them."""
    template = ChatTemplate(THINKING, {"bos_token": "<s>"}).with_variables(variables)
    assert template.render(HI) == ChatTemplate(template.source, {"bos_token": "<s>"}).render(HI) == written


@pytest.mark.parametrize("name", ["enable_thought", "messages", "bos_token", "range"])
def test_a_variable_that_a_template_does_not_read_is_refused(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"it reads no variable {name}; it reads enable_thinking, style"):
        ChatTemplate(THINKING, {}).with_variables({name: False})


def template_end(name: str) -> str | None:
    return ChatTemplate.built_in(name, None).end_of_turn(["<eos>", "<start_of_turn>", *BUILT_IN[name].special])


def test_a_beginning_of_ones_own_replaces_the_forms() -> None:
    assert ChatTemplate.built_in("qwen", '<"b">').render(HI).startswith('<"b"><|im_start|>user')
    assert ChatTemplate.built_in("gemma", "<s>").render(HI).startswith("<s><start_of_turn>user")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "it is no template of Jinja: line 1: "),
        ("a\n{% nothing %}", "it is no template of Jinja: line 2: Encountered unknown tag 'nothing'"),
        ("{% include '/etc/hostname' %}", "it cannot write this conversation: no loader"),
        ("{{ ''.__class__.__mro__ }}", "it cannot write this conversation: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "it cannot write this conversation: access to attribute 'append'"),
        ("{{ [1, 2] | random }}", "No filter named 'random'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        (
            "{{ strftime_now('%d %b %Y') }}",
            r"it asks for today's date \(strftime_now\), and a run has",
        ),
        ("{{ raise_exception('only pairs') }}", "it cannot write this conversation: only pairs"),
        ("{{ 1 // 0 }}", "it cannot write this conversation: integer division"),
        ("{{ messages[0].content + none }}", "it cannot write this conversation: "),
    ],
)
def test_what_a_template_may_not_do_is_said(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(source, {}).render(HI)


@pytest.mark.parametrize(
    ("template", "after", "end"),
    [
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}", "</s>[user]hi</s>", "</s>"),
        ("{% for m in messages %}{{ m.content | trim }} </s><s>{% endfor %}", " </s><s>hi </s><s>", "</s>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "\nuser: hi\n", None),
    ],
)
def test_what_follows_the_models_turn_and_its_end_are_found(template: str, after: str, end: str | None) -> None:
    made = ChatTemplate(template, {})
    assert made.after_turn(HI) == after
    assert made.end_of_turn({"<s>", "</s>", "", "<unk>"}) == end


def test_a_template_that_writes_the_date_for_want_of_a_system_text_is_usable_with_one() -> None:
    granite = ChatTemplate(NEWER["granite3"], {})
    assert granite.end_of_turn(["<|end_of_text|>", "<|start_of_role|>"]) == "<|end_of_text|>"
    assert granite.after_turn(HI).startswith("<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>hi<|end_of_text|>")
    with pytest.raises(
        ChatTemplateError, match=r"copy of chat_template\.jinja, or, if it has one only then, add a sys"
    ):
        granite.render(HI)
    always = ChatTemplate("{{ strftime_now('%d') }}", {})
    with pytest.raises(ChatTemplateError, match=r"copy of chat_template\.jinja$"):
        always.end_of_turn(["<eos>"])


def test_a_template_without_the_models_turns_asks_one_question() -> None:
    template = ChatTemplate("{{ messages[-1].content }}</s>", {})
    assert template.end_of_turn(["</s>"]) is None
    with pytest.raises(ChatTemplateError, match="it leaves out what the model has said"):
        template.after_turn(HI)


def beside(**files: Any) -> TokenizerFiles:
    """Files by name, with `_` for the dot; what is no text becomes JSON."""
    known = {name.replace("__", "."): v if isinstance(v, str) else json.dumps(v) for name, v in files.items()}
    return TokenizerFiles(lambda name: known[name].encode() if name in known else None)


TURNS = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
NAMED = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TURNS}]


@pytest.mark.parametrize(
    ("files", "written"),
    [
        ({"tokenizer_config__json": {"chat_template": TURNS, "bos_token": "<s>"}}, "<s>hi<|end|>"),
        ({"tokenizer_config__json": {"chat_template": "stale"}, "chat_template__jinja": TURNS}, "hi<|end|>"),
        ({"tokenizer_config__json": {"chat_template": NAMED, "bos_token": {"content": "<s>"}}}, "<s>hi<|end|>"),
        ({"tokenizer_config__json": {"chat_template": TURNS, "bos_token": None}}, "hi<|end|>"),
        ({"chat_template__jinja": TURNS, "special_tokens_map__json": {"bos_token": "<b>"}}, "<b>hi<|end|>"),
    ],
)
def test_the_template_is_the_files_then_the_keys_and_of_several_the_default(files: Any, written: str) -> None:
    template = beside(**files).template
    assert template is not None
    assert template.render(HI) == written


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"tokenizer_config__json": {"chat_template": NAMED[:1]}},
            "has the templates tool_use, and none called",
        ),
        ({"tokenizer_config__json": {"chat_template": {"a": 1}}}, "neither a text nor a list of named ones"),
        ({"tokenizer_config__json": "{"}, "tokenizer_config.json is not valid JSON"),
        ({"tokenizer_config__json": [1]}, "tokenizer_config.json holds no mapping"),
    ],
)
def test_files_that_say_nothing_sensible_are_named(files: Any, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        _ = beside(**files).template
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja is not UTF-8 text"):
        _ = TokenizerFiles(lambda _: b"\xff").template


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        (None, None, ()),
        ({"eos_token_id": 1}, {"eos_token_id": [1, 107]}, (1, 107)),
        ({"eos_token_id": [128001, 128008, 128009]}, {"eos_token_id": 128001}, (128001, 128008, 128009)),
        ({"eos_token_id": [1, 106, 50]}, {"text_config": {"eos_token_id": 1}}, (1, 106, 50)),  # Gemma 4's
        ({"top_k": 1}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": 106}}, (106,)),
    ],
)
def test_stops_are_those_of_both_files(generation: Any, config: Any, ids: tuple[int, ...]) -> None:
    files = {"generation_config__json": generation, "config__json": config}
    assert beside(**{name: value for name, value in files.items() if value is not None}).stop_ids == ids


@pytest.mark.parametrize("value", ["2", True, [1, None], {"a": 1}, 2.0])
def test_a_stop_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(
        ChatTemplateError, match=r"config\.json: eos_token_id is .*, neither a number nor a list of them"
    ):
        _ = beside(config__json={"eos_token_id": value}).stop_ids


DECODER = {"5": {"content": "<|end|>"}, "6": {"content": "<|text|>"}}
NAMES = {"added_tokens_decoder": DECODER, "chat_template": TURNS}


@pytest.mark.parametrize(
    ("name", "is_tuned"),
    [
        *(("gemma-2-9b-it", True), ("gemma-2-9b-it-bnb-4bit", True), ("Llama-2-7b-chat-hf", True)),
        *(("Qwen2.5-0.5B-Instruct", True), ("it", True), ("my_CHAT.v2", True)),
        *(("", False), ("gemma-2-9b", False), ("Qwen3-0.6B-Base", False), ("unit-kit", False), ("Chatty-1B", False)),
    ],
)
def test_files_that_forget_the_end_of_turn_are_a_tuned_models_by_its_name(name: str, is_tuned: bool) -> None:
    """Those of google/gemma-2-9b-it stop at <eos> only; with no template, a name changes nothing."""
    described = {"chat_template": BUILT_IN["gemma"].body, "eos_token": "<eos>", "bos_token": "<bos>"}
    files = {"tokenizer_config.json": described, "config.json": {"eos_token_id": 1}}
    files["generation_config.json"] = {"eos_token_id": 1}
    read = {file: json.dumps(content).encode() for file, content in files.items()}
    assert TokenizerFiles(read.get, name).is_tuned is is_tuned
    assert not TokenizerFiles({**read, "tokenizer_config.json": b"{}"}.get, name).is_tuned


@pytest.mark.parametrize(
    ("files", "is_tuned"),
    [
        ({"tokenizer_config__json": NAMES | {"eos_token": "<|end|>"}}, True),
        ({"tokenizer_config__json": NAMES | {"eos_token": "<|text|>"}}, True),  # nothing says where the model stops
        ({"tokenizer_config__json": NAMES | {"eos_token": "<|end|>"}, "config__json": {"eos_token_id": 6}}, True),
        ({"tokenizer_config__json": NAMES, "generation_config__json": {"eos_token_id": [6, 5]}}, True),
        ({"tokenizer_config__json": NAMES, "generation_config__json": {"eos_token_id": 6}}, False),
        ({"tokenizer_config__json": NAMES, "config__json": {"eos_token_id": 5}}, True),
        ({"tokenizer_config__json": NAMES, "config__json": {"eos_token_id": [7]}}, False),
        ({"tokenizer_config__json": {"eos_token": "<|end|>"}}, False),
        (
            {
                "chat_template__jinja": TURNS,
                "config__json": {"eos_token_id": 9},
                "tokenizer__json": {"added_tokens": [{"id": 9, "content": "<|end|>"}]},
            },
            True,
        ),
    ],
)
def test_a_model_is_tuned_on_turns_if_it_stops_at_their_end(files: Any, is_tuned: bool) -> None:
    assert beside(**files).is_tuned is is_tuned
