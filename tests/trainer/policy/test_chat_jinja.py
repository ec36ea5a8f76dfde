"""Chat templates of exports write the prompts of the run, piece by piece."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from conf.schema.training.data import Data
from tests.groups import load_group
from trainer.data import chat
from trainer.data.chat import CHAT_TEMPLATES, ChatMessage
from trainer.policy.chat_jinja import chat_template

ODD = "Say \"why\" {x} \\ and\n'how' {{ y }} é😀"
TURNS = [ChatMessage("user", f" {ODD} "), ChatMessage("assistant", "So."), ChatMessage("user", "And?")]


def rendered(data: Any, turns: list[ChatMessage]) -> str:
    """What transformers writes: its settings of Jinja are these."""
    sandbox = pytest.importorskip("jinja2.sandbox")
    template = chat_template(data)
    assert template is not None
    engine = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    return engine.from_string(template).render(messages=messages, add_generation_prompt=True)


def questions(**changes: Any) -> Any:
    group = load_group("data/arithmetic")
    prompt = group["prompt"] | changes.pop("prompt", {})
    return TypeAdapter(Data).validate_python(group | changes | {"prompt": prompt})


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
@pytest.mark.parametrize("system", [None, ODD])
@pytest.mark.parametrize("turns", [TURNS, TURNS[:1], [ChatMessage("system", "Be kind."), *TURNS]])
def test_turns_are_written_as_in_training(name: str, system: str | None, turns: list[ChatMessage]) -> None:
    data = questions(chat_template=name, bos=None, prompt={"system": system})
    whole = turns if system is None or turns[0].role == "system" else [ChatMessage("system", system), *turns]
    form = CHAT_TEMPLATES[name]
    assert rendered(data, turns) == (form.bos or "") + chat.render(chat.format_turns(form, whole))


def test_a_question_without_turns_has_the_wording_of_the_training() -> None:
    shots = [{"question": "1+1", "answer": "2"}, {"question": "{3}", "answer": "\n"}]
    prompt = {"system": ODD, "question": "{{Q}}: {question}\n", "between": "\n\n", "shots": shots}
    data = questions(prompt=prompt)
    assert rendered(data, TURNS[:1]) == "<bos>" + chat.render(chat.plain_prompt(data.prompt, TURNS[0].content))


def test_a_fine_tuned_model_is_asked_as_in_its_rows_and_plain_text_has_no_template() -> None:
    assert chat_template(TypeAdapter(Data).validate_python(load_group("data/text") | {"path": "x"})) is None
    data = TypeAdapter(Data).validate_python(load_group("data/sft_gsm8k"))
    assert rendered(data, TURNS) == "<bos>Question: And?\nAnswer:"
