"""Environments of the library verifiers (https://github.com/PrimeIntellect-ai/verifiers), unchanged.

There a rollout is a coroutine that calls the client of a model. Here that client is the episode itself: a call waits
until the policy has written its turn, so `reset` and `step` run the coroutine up to its next call, and the rubric's
reward is that of the episode. The library is imported in worker processes only, since its environments replace the
signal handlers of the process.

Tools speak the words of Hermes and Qwen: a call is JSON between `<tool_call>` and `</tool_call>`, and the results of
all calls of a turn are one turn of the user, as in the chat template of Qwen 2.5 and 3
(https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/tokenizer_config.json). Calls are read as by vLLM's parser `hermes`
(https://docs.vllm.ai/en/latest/features/tool_calling.html).
"""

import asyncio
import importlib.util
import json
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

from conf.environment import TOOLS, Messages
from conf.formats import RunFileError
from conf.schema.training.loop_parts import Environment
from trainer.environments import verifiers_tasks
from trainer.environments.failure import FailureError
from trainer.sandbox.box import why_not

COLUMN = "verifiers"
"""Column of a question's row with the row of the environment's own data set, as JSON."""
CLASSES = ("SingleTurnEnv", "MultiTurnEnv", "ToolEnv")
KEY = "loop.environment.name"

CALL_BEGIN = "<tool_call>"
TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def check_installed(module: str) -> None:
    """Raise RunFileError if the library or the environment's module is not installed."""
    if importlib.util.find_spec("verifiers") is None:
        told = "the package verifiers is not installed; name it in the file of env.requirements"
        raise RunFileError(f"{KEY}: {told}, or pip install 'slipway-tpu[verifiers]' on this machine")
    if importlib.util.find_spec(module) is None and not (has_tasksets() and verifiers_tasks.is_shipped(module)):
        told = f"there is no module {module}, neither installed nor in the folders of code.modules"
        raise RunFileError(f"{KEY}: {told}")


def has_tasksets() -> bool:
    """Return whether environments of the library are tasksets, as in 0.4, and no classes, as before."""
    return version("verifiers").split(".")[:2] == ["0", "4"]


def check_box(settings: Environment) -> None:
    """Raise RunFileError if programs of the environment need a box, and this machine has none."""
    agents = [agent for agent in settings.options.values() if isinstance(agent, Mapping)]
    runtimes = [agent["runtime"].get("type") for agent in agents if isinstance(agent.get("runtime"), Mapping)]
    if has_tasksets() and not {*runtimes} - {"subprocess"} and (reason := why_not()):
        choice = "or name another runtime of verifiers, such as options={agent: {runtime: {type: docker}}}"
        raise RunFileError(f"loop.environment.sandbox: {reason}, {choice}")


def load_environment(module: str, options: Mapping[str, Any]) -> Any:
    """Return the Environment of `module.load_environment(**options)`, or what plays a taskset as one.

    Raises RunFileError if it cannot be used. Any other exception is the environment's own.
    """
    check_installed(module)
    if has_tasksets():
        return verifiers_tasks.TasksetEnvironment(module, options)
    import verifiers as vf  # pyright: ignore[reportMissingImports]

    if not all(hasattr(vf, name) for name in CLASSES):
        raise RunFileError(f"{KEY}: verifiers {vf.__version__} is unknown here; install verifiers>=0.1.14,<0.5")
    found = vf.load_environment(module, **options)
    for told in (signal.SIGINT, signal.SIGTERM):  # its handlers would end the process before the trainer does
        signal.signal(told, signal.SIG_IGN)
    if not isinstance(found, vf.Environment):
        raise RunFileError(f"{KEY}: load_environment of {module} returned no verifiers.Environment but {found!r:.100}")
    if found.requires_group_rollouts:
        raise RunFileError(f"{KEY}: the rubric of {module} scores groups of rollouts; only single ones are scored")
    return found


def load_episodes(settings: Environment) -> "Callable[[], VerifiersEpisode]":
    """Return a function that makes one episode; see `load_environment`."""
    assert settings.verifiers_module is not None
    environment = load_environment(settings.verifiers_module, settings.options)
    loop = asyncio.new_event_loop()
    if isinstance(environment, verifiers_tasks.TasksetEnvironment):
        loop.run_until_complete(environment.start(settings.sandbox, settings.max_output_mib))
        return partial(VerifiersEpisode, environment, lambda ask: ask, loop)
    return partial(VerifiersEpisode, environment, _client_class(), loop)


def _client_class() -> type:
    import verifiers as vf  # pyright: ignore[reportMissingImports]
    from openai.types.chat import ChatCompletion  # pyright: ignore[reportMissingImports]
    from verifiers.errors import OverlongPromptError  # pyright: ignore[reportMissingImports]

    class PolicyClient(vf.OpenAIChatCompletionsClient):
        """A client whose `client` is a coroutine function of messages and tools; None means that no room is left."""

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
        ) -> ChatCompletion:
            del sampling_args, kwargs
            message = await self.client(json.loads(json.dumps(prompt)), json.loads(json.dumps(tools or [])))
            if message is None:
                raise OverlongPromptError("loop.max_new_tokens or loop.environment.max_turns is used up")
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            choice = {"index": 0, "finish_reason": reason, "message": message}
            whole = {"id": "policy", "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}
            return ChatCompletion.model_validate(whole)

        async def close(self) -> None:
            """There is no connection."""

    return PolicyClient


class VerifiersEpisode:
    """One rollout; see `conf.environment.Environment`."""

    def __init__(self, environment: Any, client: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> None:
        self._environment, self._client, self._loop = environment, client(self._ask), loop
        self._task: asyncio.Task[Mapping[str, Any]] | None = None
        self._requests = asyncio.Queue[tuple[list[dict[str, Any]], list[dict[str, Any]]]]()
        self._waiting = list[asyncio.Future[dict[str, Any] | None]]()
        self._seen = list[dict[str, Any]]()
        self._has_tools, self._turns = False, 0

    def reset(self, row: Mapping[str, Any]) -> Messages:
        """Begin the rollout; return the prompt, with the tools. Raises FailureError if another reset had another."""
        if COLUMN not in row:
            raise ValueError(f"the question's row has no column {COLUMN}; set data=verifiers")
        rollout = self._environment.run_rollout(
            json.loads(row[COLUMN]),
            self._client,
            model="policy",
            sampling_args={},
            state_columns=["reward"],
        )
        self._task = self._loop.create_task(rollout)
        request = self._run()
        if request is None:
            raise ValueError(f"the rollout ended before the policy's first turn: {self._output().get('error')}")
        self._seen, tools = request
        self._has_tools = bool(tools)
        turns = as_turns(self._seen, tools)
        if (before := row.get("prompt_messages")) is not None and [*map(tuple, before)] != turns:
            raise FailureError("history", "the prompt differs between rollouts of the same question")
        return turns

    def step(self, response: str) -> tuple[str | Messages, bool]:
        """Continue the rollout. Raises FailureError if it does not go on from what the policy has read and written."""
        content, calls = parse_calls(response) if self._has_tools else (response, [])
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{self._turns}_{i}", "type": "function", "function": call._asdict()}
                for i, call in enumerate(calls)
            ]
        self._turns += 1
        self._seen.append(message)
        self._waiting.pop(0).set_result(message)
        request = self._run()
        if request is None:
            return "", True
        messages, _ = request
        count = len(self._seen)
        if [*map(_comparable, messages[:count])] != [*map(_comparable, self._seen)]:
            told = "the environment changed messages that the policy has read or written, so its tokens would be others"
            raise FailureError("history", told)
        self._seen = messages
        return as_turns(messages[count:]), False

    def reward(self) -> float:
        """Return the rubric's reward; a rollout that still waits for the policy is told that the context is full."""
        while self._waiting:
            self._waiting.pop(0).set_result(None)
            self._run()
        output = self._output()
        error = output.get("error")
        if error is not None and "EmptyModelResponseError" not in str(error):  # an empty response is the policy's fault
            chain = error.get("error_chain_repr", error) if isinstance(error, Mapping) else error
            raise RuntimeError(f"the rollout failed: {chain}")
        return float(output["reward"])

    def metrics(self) -> dict[str, float]:
        """Return the rubric's functions by name, without their weights."""
        return {name: float(value) for name, value in (self._output().get("metrics") or {}).items()}

    def close(self) -> None:
        """End the rollout, with the environment's own cleanup."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            self._loop.run_until_complete(asyncio.wait({self._task}))

    async def _ask(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any] | None:
        answer = self._loop.create_future()
        self._waiting.append(answer)
        self._requests.put_nowait(([*messages], tools))
        return await answer

    def _run(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | None:
        """Run the rollout until it asks the policy; None if it has ended. Raises what it has raised."""
        return self._loop.run_until_complete(self._next_request())

    async def _next_request(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | None:
        assert self._task is not None
        asked = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        self._output()
        return None

    def _output(self) -> Mapping[str, Any]:
        assert self._task is not None
        return self._task.result()


def _comparable(message: Mapping[str, Any]) -> tuple[str, str, Sequence[Any]]:
    """Return what the policy reads or writes of a message."""
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    return message["role"], content_text(message), calls


class Call(NamedTuple):
    """One call of a tool. arguments: a JSON object, as text."""

    name: str
    arguments: str


def parse_calls(response: str) -> tuple[str, list[Call]]:
    """Return the text before the first call, and the calls; the whole response and no calls if one is unreadable."""
    calls = list[Call]()
    for found in TOOL_CALL.findall(response):
        try:
            call = json.loads(found)
            calls.append(Call(call["name"], json.dumps(call["arguments"], ensure_ascii=False)))
        except (ValueError, KeyError, TypeError, RecursionError):
            return response, []
        if not isinstance(call["name"], str):
            return response, []
    return (response.partition(CALL_BEGIN)[0] if calls else response), calls


def as_turns(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[tuple[str, str]]:
    """Return role and text of each turn of a conversation.

    Args:
        messages: in the format of OpenAI's chat completions, with text alone.
        tools: in the same format; they are the first turn.
    """
    turns, previous = list[tuple[str, str]](), ""
    for message in messages:
        role, text = message["role"], content_text(message)
        if role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if previous == "tool":
                text = f"{turns.pop()[1]}\n{text}"
        for call in message.get("tool_calls") or ():
            written = f'{{"name": "{call["function"]["name"]}", "arguments": {call["function"]["arguments"]}}}'
            text = "\n".join([*([text] if text else []), f"{CALL_BEGIN}\n{written}\n</tool_call>"])
        turns.append(("user" if role == "tool" else "system" if role == "developer" else role, text))
        previous = role
    if tools:
        turns.insert(0, (TOOLS, json.dumps(tools, ensure_ascii=False)))
    return turns


def content_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message. Raises ValueError if it has anything else, such as an image."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise ValueError("a message has parts other than text, which the policy cannot read")
    return "".join(part["text"] for part in content)
