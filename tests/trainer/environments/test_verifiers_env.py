"""What Slipway itself does with a rollout that is a coroutine. The library verifiers is judged in test_verifiers.py."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from conf.formats import RunFileError
from conf.schema.training.loop_parts import Environment
from tests.groups import load_group
from trainer.environments import verifiers_env
from trainer.environments.failure import FailureError
from trainer.environments.pool import EnvironmentPool
from trainer.environments.verifiers_env import COLUMN, VerifiersEpisode
from trainer.environments.verifiers_rows import questions, to_question

Ask = Callable[[list[Any], list[Any]], Awaitable[Any]]
PROMPT = [{"role": "user", "content": "2*3?"}]
ROW = {COLUMN: json.dumps({"prompt": PROMPT, "answer": "6"})}


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    opened = asyncio.new_event_loop()
    yield opened
    opened.close()


def episode(loop: Any, rollout: Callable[[Any, Ask], Any]) -> VerifiersEpisode:
    """An episode of a coroutine function of the row and of what asks the policy."""

    async def run_rollout(row: Any, client: Any, **kwargs: Any) -> Mapping[str, Any]:
        return {"reward": 0.5, "metrics": {}, **await rollout(row, client.ask)}

    return VerifiersEpisode(SimpleNamespace(run_rollout=run_rollout), lambda ask: SimpleNamespace(ask=ask), loop)


async def two_turns(row: Any, ask: Ask) -> Any:
    messages = [*row["prompt"]]
    first = await ask(messages, [])
    if first is None:
        return {"reward": 0.25}
    messages = [*messages, first, {"role": "user", "content": "sure?"}]
    second = await ask(messages, [])
    return {"metrics": {"cut": second is None}}


def test_rollouts_of_a_process_wait_for_the_policy_and_do_not_mix(loop: Any) -> None:
    one, two = episode(loop, two_turns), episode(loop, two_turns)
    assert one.reset(ROW) == [("user", "2*3?")]
    two.reset({COLUMN: json.dumps({"prompt": [{"role": "user", "content": "other"}]})})
    assert two.step("a") == one.step("6") == ([("user", "sure?")], False)
    assert one.step("yes") == ("", True)
    assert (one.reward(), one.metrics()) == (0.5, {"cut": 0})
    assert two.step("d")[1]


def test_a_rollout_without_room_ends_with_its_reward(loop: Any) -> None:
    first, second = episode(loop, two_turns), episode(loop, two_turns)
    first.reset(ROW)
    assert first.reward() == 0.25
    second.reset(ROW)
    second.step("6")
    assert (second.reward(), second.metrics()) == (0.5, {"cut": 1})


def test_calls_of_tools_are_passed_as_such_and_their_results_shown(loop: Any) -> None:
    given = list[Any]()

    async def tools(row: Any, ask: Ask) -> Any:
        given.append(await ask(row["prompt"], [{"type": "function", "function": {"name": "double"}}]))
        result = {"role": "tool", "tool_call_id": given[0]["tool_calls"][0]["id"], "content": "8"}
        given.append(await ask([*row["prompt"], given[0], result], []))
        return {}

    played = episode(loop, tools)
    assert played.reset(ROW) == [("tools", '[{"type": "function", "function": {"name": "double"}}]'), ("user", "2*3?")]
    said = played.step('<tool_call>{"name": "double", "arguments": {"a": 4}}</tool_call>')
    assert said == ([("user", "<tool_response>\n8\n</tool_response>")], False)
    assert played.step("8")[1]
    function = {"name": "double", "arguments": '{"a": 4}'}
    assert given[0]["tool_calls"] == [{"id": "call_0_0", "type": "function", "function": function}]
    assert given[1] == {"role": "assistant", "content": "8"}


@pytest.mark.parametrize(
    "edit",
    [
        lambda prompt, said: [said],  # forgets the question
        lambda prompt, said: [{"role": "user", "content": "2*4?"}, said],
        lambda prompt, said: [*prompt, {**said, "content": "7"}],
        lambda prompt, said: prompt,
    ],
)
def test_a_history_that_the_policy_has_not_seen_is_a_failure(loop: Any, edit: Any) -> None:
    async def edits(row: Any, ask: Ask) -> Any:
        said = await ask(row["prompt"], [])
        await ask(edit(row["prompt"], said), [])
        return {}

    played = episode(loop, edits)
    played.reset({**ROW, "prompt_messages": [["user", "2*3?"]]})
    with pytest.raises(FailureError) as caught:
        played.step("6")
    assert caught.value.args[0] == "history"
    played.close()
    other = episode(loop, edits)
    with pytest.raises(FailureError) as caught:  # the prompt of a question is the same for all its episodes
        other.reset({**ROW, "prompt_messages": [["user", "2*4?"]]})
    assert caught.value.args[0] == "history"
    other.close()


def test_what_a_rollout_raises_or_reports_fails_the_episode(loop: Any) -> None:
    async def raises(row: Any, ask: Ask) -> Any:
        raise OSError("no board")

    async def reports(row: Any, ask: Ask) -> Any:
        await ask(row["prompt"], [])
        return {"error": {"error_chain_repr": "ToolCallError() -> KeyError('a')"}}

    async def empty(row: Any, ask: Ask) -> Any:
        return await reports(row, ask) | {"error": {"error_chain_repr": "EmptyModelResponseError('no content')"}}

    with pytest.raises(OSError, match="no board"):
        episode(loop, raises).reset(ROW)
    played = episode(loop, reports)
    played.reset(ROW)
    assert played.step("6") == ("", True)
    with pytest.raises(RuntimeError, match=r"ToolCallError\(\) -> KeyError"):
        played.reward()
    played = episode(loop, empty)
    played.reset(ROW)
    played.step("")
    assert played.reward() == 0.5
    with pytest.raises(ValueError, match="set data=verifiers"):
        episode(loop, empty).reset({"question": "1"})


def test_a_closed_rollout_is_cancelled(loop: Any) -> None:
    ended = list[str]()

    async def waits(row: Any, ask: Ask) -> Any:
        try:
            await ask(row["prompt"], [])
        finally:
            ended.append("cleanup")

    played = episode(loop, waits)
    played.reset(ROW)
    played.close()
    assert ended == ["cleanup"]


def test_a_row_has_the_whole_row_of_the_data_set() -> None:
    row = {"prompt": [{"role": "system", "content": "Sums."}, *PROMPT], "answer": 6, "info": {"a": 1}, "example_id": 3}
    found = to_question(row)
    assert (found["question"], found["answer"]) == ("Sums.\n2*3?", "6")
    assert json.loads(found[COLUMN]) == row
    assert "solution" not in found
    assert to_question({"prompt": "2*3?", "solution": "6"})["solution"] == "6"
    for missing in ({}, {"answer": None}, {"answer": float("nan")}):
        assert to_question({"prompt": "2*3?", **missing})["answer"] == ""


def test_a_missing_library_or_module_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    own = load_group("loop/grpo")["environment"] | {"name": "verifiers:no_such_game"}
    found = {"verifiers": None, "no_such_game": None}
    monkeypatch.setattr(verifiers_env.importlib.util, "find_spec", found.__getitem__)
    for used in (lambda: EnvironmentPool(Environment(**own)), lambda: [*questions("train", environment=own["name"])]):
        with pytest.raises(RunFileError, match=r"loop\.environment\.name: the package verifiers is not .*requirements"):
            used()
    found["verifiers"] = "there"
    monkeypatch.setattr(verifiers_env, "version", lambda name: "0.3.1")
    with pytest.raises(RunFileError, match=r"loop\.environment\.name: there is no module no_such_game"):
        EnvironmentPool(Environment(**own))
    with pytest.raises(RunFileError, match=r"data\.path: the data sets of verifiers are train and test, not x"):
        [*questions("x", environment=own["name"])]


def test_a_taskset_without_a_box_is_refused_at_the_start_unless_it_has_another_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = load_group("loop/grpo")["environment"] | {"name": "verifiers:json"}
    monkeypatch.setattr(verifiers_env.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(verifiers_env, "version", lambda name: "0.4.0")
    monkeypatch.setattr(verifiers_env, "why_not", lambda: "no namespaces")
    with pytest.raises(RunFileError, match=r"loop\.environment\.sandbox: no namespaces, or name another runtime"):
        EnvironmentPool(Environment(**own))
    with pytest.raises(RunFileError, match=r"loop\.environment\.sandbox: no namespaces"):
        EnvironmentPool(Environment(**own | {"options": {"agent": {"runtime": {"type": "subprocess"}}}}))
    EnvironmentPool(Environment(**own | {"options": {"agent": {"runtime": {"type": "docker"}}}})).close()
    monkeypatch.setattr(verifiers_env, "why_not", lambda: "")
    EnvironmentPool(Environment(**own)).close()
