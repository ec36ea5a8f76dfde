"""The calculator: what it reads, what it answers, and which questions are held out."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from conf.chat_template import BUILT_IN
from conf.schema.training.data import ArithmeticData
from tests.groups import load_group
from tests.paths import ROOT
from tests.trainer.data.test_prompting import file as file
from trainer.data.prompting import Problem, PromptEncoder
from trainer.environments.calculator import Calculator, products
from trainer.environments.verifiers_env import as_turns, content_text, parse_calls
from trainer.environments.word_game import WordGame, marks, words


def play(*responses: str, answer: str = "3901") -> tuple[list[str], float, dict[str, float]]:
    game = Calculator(digits=4)
    game.reset({"answer": answer})
    said = [game.step(response)[0] for response in responses]
    return said, game.reward(), game.metrics()


def test_it_computes_and_the_policy_must_write_the_answer() -> None:
    assert play("47*83=", "3901") == (["3901", ""], 1, {"calls": 1, "unreadable_calls": 0})
    assert play("47*83=")[1] == 0  # what the calculator says is no answer
    assert play("3901")[1:] == (1, {"calls": 0, "unreadable_calls": 0})
    assert play("2*3=", "7-9=", "1+1=", "02", answer="2") == (
        ["0006", "-002", "0002", ""],
        1,
        {"calls": 3, "unreadable_calls": 0},
    )


@pytest.mark.parametrize("call", ["47*=", "=", "4/2=", "__import__('os')=", "9**9=", "1" * 13 + "*1=", "٣*٣="])
def test_what_it_cannot_read_is_counted(call: str) -> None:
    assert play(call, "3901") == (["?", ""], 1, {"calls": 1, "unreadable_calls": 1})


@pytest.mark.parametrize("said", ["", "39", "3901 3901", "-3901", "٣٩٠١", "3901=3901x"])
def test_a_wrong_answer_gets_nothing(said: str) -> None:
    assert play("47*83=", said)[1] == 0


def test_no_pair_of_numbers_is_in_training_and_test() -> None:
    train, test = ({frozenset(row["question"][:-1].split("*")) for row in products(path)} for path in ("train", "test"))
    assert not train & test
    assert len(test) / (len(train) + len(test)) == pytest.approx(0.2, abs=1e-3)
    row = next(iter(products("train")))
    assert row["solution"] == f"{row['question'][:-1]}={row['answer']}"
    assert int(row["answer"]) == eval(row["question"][:-1])


def test_a_letter_is_misplaced_as_often_as_the_word_has_it_elsewhere() -> None:
    told = {("abc", "abc"): "+++", ("cab", "abc"): "~~~", ("add", "abc"): "+--", ("aab", "abb"): "+-+"}
    told |= {("bba", "abc"): "-+~"}  # one b is right, so the other is nowhere else
    told |= {("aa", "ab"): "+-", ("a", "ab"): "+", ("abcd", "ab"): "++", ("", "ab"): ""}
    assert {pair: marks(*pair) for pair in told} == told


def test_a_game_ends_with_the_word() -> None:
    game = WordGame()
    assert game.reset({"answer": "ab"}) == ""
    assert [game.step(guess) for guess in ("ba!", "ba!", "abc")] == [("~~ ", False), ("~~ ", False), ("++ ", False)]
    assert game.reward() == 0
    assert game.step("ab!") == ("++ ", True)
    assert game.reward() == 1
    assert game.metrics() == {"repeated_guesses": 0.25, "unreadable_guesses": 0.25}


def test_every_word_is_asked_and_the_worked_guesses_end_with_it() -> None:
    rows = [*words("train", letters="abc")]
    assert {row["answer"] for row in rows} == {a + b for a in "abc" for b in "abc"}
    assert all(row["solution"].split("!")[-2] == row["answer"] for row in rows)
    assert {row["solution"].count("!") for row in rows} == {1, 2, 3}
    assert rows != [*words("test", letters="abc")]


RENDERED = json.loads((ROOT / "tests" / "trainer" / "fixtures" / "conversations.json").read_text())


@pytest.mark.parametrize("case", RENDERED, ids=lambda case: f"{case['template']}-{len(case['messages'])}")
def test_turn_by_turn_a_conversation_is_what_the_models_own_template_renders(case: dict[str, Any], file: Path) -> None:
    """Prompt, turns of the policy with their end, and observations make the tokens of the whole conversation."""
    own = {"tokenizer": str(file), "chat_template": case["template"], "bos": None, "eos": None}
    encoder = PromptEncoder(ArithmeticData(**load_group("data/arithmetic") | own))
    messages = case["messages"]
    starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompt = as_turns(messages[: starts[0]], case["tools"])
    (question,) = encoder.encode([Problem("unused", "", "", messages=prompt)])
    tokens = [*question.prompt_tokens]
    for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
        [(_, written)] = as_turns(messages[start : start + 1])
        tokens += [*encoder.encode_text(written), encoder.stop_tokens[0]]
        tokens += encoder.encode_observation("unused", tokens[-1], as_turns(messages[start + 1 : end]))
    library = Tokenizer.from_file(str(file))
    assert library.decode(tokens, skip_special_tokens=False) == case["rendered"]
    assert tokens == library.encode(case["rendered"], add_special_tokens=False).ids


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_text_between_turns_is_a_turn_of_the_user(name: str, file: Path) -> None:
    own = {"tokenizer": str(file), "chat_template": name, "bos": None, "eos": None}
    encoder = PromptEncoder(ArithmeticData(**load_group("data/arithmetic") | own))
    for last in (encoder.stop_tokens[0], 5):
        assert encoder.encode_observation("higher", last) == encoder.encode_observation("", last, [("user", "higher")])


def test_without_a_template_the_texts_of_messages_are_joined() -> None:
    group = load_group("data/arithmetic")
    encoder = PromptEncoder(ArithmeticData(**group | {"prompt": group["prompt"] | {"between": "\n"}}))
    (question,) = encoder.encode([Problem("unused", "", "", messages=[("system", "Sums."), ("user", "1+1?")])])
    assert question.prompt == encoder.decode(question.prompt_tokens) == "Sums.\n1+1?"
    assert encoder.decode(encoder.encode_observation("2", 0, [("user", "2")])) == "2"


def test_calls_are_read_with_the_text_before_them_and_what_is_no_call_stays_a_text() -> None:
    one, two = '{"name": "add", "arguments": {"a": 1}}', ' {"arguments": {"b": "é"}, "name": "say"}\n'
    text, calls = parse_calls(f"So: <tool_call>\n{one}</tool_call>\n<tool_call>{two}</tool_call>")
    assert (text, [tuple(call) for call in calls]) == ("So: ", [("add", '{"a": 1}'), ("say", '{"b": "é"}')])
    assert parse_calls(f"<tool_call>{one}")[1] == calls[:1]  # cut off after the call
    for response in (
        *("", "42", "</tool_call>", "<tool_call></tool_call>", "<tool_call>[]</tool_call>", "<tool_call>{a"),
        *('<tool_call>{"name": "a"}</tool_call>', '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>x</tool_call>',
    ):
        assert parse_calls(response) == (response, [])


def test_a_message_may_have_parts_of_text_and_nothing_else() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert content_text({"content": parts}) == "ab"
    with pytest.raises(ValueError, match="parts other than text"):
        content_text({"content": [*parts, {"type": "image_url", "image_url": {"url": "x"}}]})
