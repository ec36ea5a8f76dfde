"""The built-in tokenizers as files give the same ids as in training."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from conf.chat_template import BUILT_IN, ChatMessage, ChatTemplate
from conf.formats import RunFileError
from conf.schema.training.data import Data
from tests.groups import load_group
from trainer.data.prompting import plain_prompt
from trainer.policy.export import chat_template
from trainer.policy.run_files import byte_library, tokenizer_files
from trainer.tokenizer import loading
from trainer.tokenizer.loading import ByteTokenizer, parse_tokenizer

BYTES = parse_tokenizer(byte_library().to_str().encode(), "bytes")


@given(st.text())
def test_bytes_are_the_bytes_of_the_text(text: str) -> None:
    ours = ByteTokenizer()
    ids = ours.encode([text])[0].tolist()
    assert BYTES.encode([text])[0].tolist() == ids
    assert BYTES.decode([257, *ids, 258]) == ours.decode(ids) == text


def test_bytes_have_the_same_special_tokens() -> None:
    assert BYTES.special_tokens == ByteTokenizer().special_tokens
    assert BYTES.vocab_size == ByteTokenizer.vocab_size
    assert ByteTokenizer().decode([0xFF, 65, loading.PAD, 300]) == "\ufffdA"  # bytes that are no text are marked
    assert BYTES.encode(["<eos>"])[0].tolist() == list(b"<eos>"), "a question cannot end itself"
    windows = dict(tokenizer_files(text_data(Path("text"), packing="windows")))
    assert parse_tokenizer(windows["tokenizer.json"], "bytes").vocab_size == 256  # which have none


def text_data(path: Path, **changes: Any) -> Any:
    return TypeAdapter(Data).validate_python(load_group("data/text") | {"path": str(path)} | changes)


def test_characters_are_those_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a b\nc é\t😀")
    files = dict(tokenizer_files(text_data(tmp_path / "text", tokenizer="characters")))
    made = parse_tokenizer(files["tokenizer.json"], "characters")
    assert made.vocab_size == 8
    assert made.encode(["\t\na"])[0].tolist() == [0, 1, 3]
    assert made.decode(made.encode(["é b\n😀"])[0].tolist()) == "é b\n😀"
    with pytest.raises(RunFileError, match="nowhere"):
        dict(tokenizer_files(text_data(tmp_path / "nowhere", tokenizer="characters")))


def test_a_tokenizer_comes_with_the_files_beside_it(tmp_path: Path) -> None:
    raw = byte_library().to_str().encode()
    (tmp_path / "tokenizer.json").write_bytes(raw)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    files = dict(tokenizer_files(text_data(tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))))
    assert files == {"tokenizer.json": raw, "tokenizer_config.json": b"{}"}
    (tmp_path / "config.json").write_text('{"eos_token_id": [258, 9]}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "top_k": 3}')
    files = dict(tokenizer_files(text_data(tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))))
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": [7, 258, 9], "top_k": 3}
    assert "config.json" not in files
    assert not dict(tokenizer_files(text_data(tmp_path, tokenizer=str(tmp_path / "absent.json"))))


ODD = "Say \"why\" {x} \\ and\n'how' {{ y }} é😀"
TURNS = [ChatMessage("user", f" {ODD} "), ChatMessage("assistant", "So."), ChatMessage("user", "And?")]


def rendered(data: Any, turns: list[ChatMessage], chat: Any = None) -> str:
    """What transformers writes, without the tokens of a tokenizer_config.json."""
    template = chat_template(data, chat)
    assert template is not None
    return ChatTemplate(template, {}).render(turns)


def questions(**changes: Any) -> Any:
    group = load_group("data/arithmetic")
    prompt = group["prompt"] | changes.pop("prompt", {})
    return TypeAdapter(Data).validate_python(group | changes | {"prompt": prompt})


class Turns:
    """The turns of a run, as far as an export asks for them."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template


OWN = ChatTemplate("  {% if true %}\n{% endif %}\n{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}", {})


@pytest.mark.parametrize("name", [*BUILT_IN, "own"])
@pytest.mark.parametrize("system", [None, ODD])
@pytest.mark.parametrize("turns", [TURNS, TURNS[:1], [ChatMessage("system", "Be kind."), *TURNS]])
def test_an_export_has_the_template_that_was_trained_on(name: str, system: str | None, turns: list[Any]) -> None:
    data = questions(chat_template=name, bos=None, prompt={"system": system})
    whole = turns if system is None or turns[0].role == "system" else [ChatMessage("system", system), *turns]
    template = OWN if name == "own" else ChatTemplate.built_in(name, None)
    assert rendered(data, turns, Turns(template)) == template.render(whole)
    if system is None:
        assert chat_template(data, Turns(template)) == template.source, "letter by letter"  # type: ignore[arg-type]


def test_an_exported_template_has_no_clock_either() -> None:
    """Neither here nor in transformers, where today's date is a function of every template."""
    source = "{{ strftime_now('%d') if strftime_now is defined else 'no date' }}\n{{ messages[0].content }}"
    data = questions(chat_template="own", bos=None)
    exported = chat_template(data, Turns(ChatTemplate(source, {})))  # type: ignore[arg-type]
    assert exported is not None
    with_clock = {"strftime_now": str.upper, "messages": [{"content": "x"}]}
    assert ChatTemplate(source, {})._compiled.render(with_clock) == "%D\nx"
    assert ChatTemplate(exported, {})._compiled.render(with_clock) == "no date\nx"


def test_a_question_without_turns_has_the_wording_of_the_training() -> None:
    shots = [{"question": "1+1", "answer": "2"}, {"question": "{3}", "answer": "\n"}]
    prompt = {"system": ODD, "question": "{{Q}}: {question}\n", "between": "\n\n", "shots": shots}
    data = questions(prompt=prompt)
    assert rendered(data, TURNS[:1]) == "<bos>" + plain_prompt(data.prompt, TURNS[0].content)


def test_a_fine_tuned_model_is_asked_as_in_its_rows_and_plain_text_has_no_template() -> None:
    assert chat_template(TypeAdapter(Data).validate_python(load_group("data/text") | {"path": "x"}), None) is None
    data = TypeAdapter(Data).validate_python(load_group("data/sft_gsm8k"))
    assert rendered(data, TURNS) == "<bos>Question: And?\nAnswer:"
