"""Environments of verifiers 0.4: a taskset, and agents whose harnesses are programs that call a model.

The library passes their requests on to a provider by HTTP. Here that is the policy: in the words of OpenAI's chat
completions, a request goes to the episode and waits for its answer. A task of the taskset is a row of data; its rollout
has the same interface as one of an Environment of 0.3, so that `VerifiersEpisode` plays both. Harnesses run in boxes
(trainer/sandbox).
"""

import importlib.util
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from conf.formats import RunFileError
from conf.schema.training.loop_parts import Sandbox
from trainer.environments import verifiers_box
from trainer.environments.failure import FailureError

Ask = Callable[[list[dict[str, Any]], list[dict[str, Any]]], Awaitable[dict[str, Any] | None]]
"""Asks the policy, with messages and tools; None: no room is left."""
KEY = "loop.environment.options"
MODEL, URL = "policy", "http://policy.invalid/v1"
SESSION = "X-Session-ID"
"""Header of a request with the id of the trace that it belongs to."""
SHIPPED = "verifiers.v1.tasksets"


def is_shipped(module: str) -> bool:
    """Return whether the library has a taskset of this name itself."""
    return importlib.util.find_spec(SHIPPED) is not None and importlib.util.find_spec(f"{SHIPPED}.{module}") is not None


class TasksetEnvironment:
    """What plays the tasks of a taskset, with the methods of an Environment of verifiers 0.3 that Slipway calls."""

    def __init__(self, module: str, options: Mapping[str, Any]) -> None:
        """options: the library's config of the environment, and which tasks are `train` and `test`, as its SelectConfig
        says; `test.taskset` is the taskset's config where it differs. Raises RunFileError if they do not fit.
        """
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
        from pydantic import ValidationError

        self._module = module
        own = {name: dict(value) if isinstance(value, Mapping) else value for name, value in options.items()}
        self._splits = {name: own.pop(name, {}) for name in ("train", "test")}
        own["taskset"] = {"id": module, **own.get("taskset", {})}
        try:
            for role, agent in vf.env_config_type(module, own.get("id", "")).model_fields.items():
                # the library's default is a remote sandbox, which is billed
                if isinstance(agent.default, vf.AgentConfig) and "runtime" not in agent.default.model_fields_set:
                    own[role] = {"runtime": {"type": "subprocess"}, **own.get(role, {})}
            self._environment = vf.load_environment(vf.resolve_env_config(own))
            self._selections = {name: vf.SelectConfig(**self._selection(name)) for name in self._splits}
        except (ValidationError, TypeError, ValueError) as error:
            raise RunFileError(f"{KEY}: {module}: {' '.join(str(error).split())}") from None
        self._serving: Any = None
        self._asks = dict[str, tuple[Any, Ask, verifiers_box.EpisodeBoxes]]()
        """What asks the policy, by the id of a trace."""

    async def start(self, sandbox: Sandbox, output_mib: float) -> None:
        """Start what all episodes share, until this process ends; programs of the runtime `subprocess` run in boxes."""
        verifiers_box.use_boxes(sandbox, output_mib)
        self._answer_requests()
        self._serving = self._environment.serving()
        await self._serving.__aenter__()

    def get_dataset(self) -> list[dict[str, Any]]:
        return self._rows("train", self._environment.taskset)

    def build_eval_dataset(self) -> list[dict[str, Any]] | None:
        """Return the rows of the test; None if the options name none."""
        if not self._splits["test"]:
            return None
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

        config = self._environment.config.taskset
        changed = {**config.model_dump(), **self._splits["test"].get("taskset", {})}
        return self._rows("test", vf.load_taskset(type(config).model_validate(changed)))

    def get_eval_dataset(self) -> list[dict[str, Any]]:
        found = self.build_eval_dataset()
        return self.get_dataset() if found is None else found

    async def run_rollout(self, row: Mapping[str, Any], client: Ask, **kwargs: Any) -> dict[str, Any]:
        """Play a task to its end; return reward, metrics, and perhaps an error. client: asks the policy.

        Raises FailureError if a program reached a limit that ended the rollout.
        """
        del kwargs
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

        task_class, boxes = type(self._environment.taskset).task_type(), verifiers_box.EpisodeBoxes()
        task = task_class(task_class.data_type().model_validate(row["task"]), self._environment.config.taskset.task)
        context = vf.ModelContext(model=MODEL, client=vf.EvalClientConfig(base_url=URL, api_key_var="_"))
        verifiers_box.EPISODE.set(boxes)
        traces = list[Any]()

        def begun(trace: Any) -> None:
            traces.append(trace)
            self._asks[trace.id] = trace, client, boxes

        try:
            episode = await self._environment.run_episode(task, context, on_trace=begun)
        finally:
            for trace in traces:
                del self._asks[trace.id]
        learned = [trace for trace in episode.traces if trace.agent.trainable]
        if not episode.ok:
            if boxes.cause:
                raise FailureError(boxes.cause, f"a limit of loop.environment.sandbox ended a box: {boxes.cause}")
            error = next((t.last_error for t in episode.traces if not t.ok and t.last_error), episode.last_error)
            return {"reward": 0.0, "error": f"{error.type}: {error.message}" if error else "it did not end well"}
        if len(learned) != 1:
            raise FailureError("error", f"{len(learned)} agents of an episode learn; only one can")
        metrics = {name: value for name, value in learned[0].metrics.items() if value is not None}
        metrics |= {name: reward.score for name, reward in learned[0].rewards.items() if reward is not None}
        metrics |= {"num_turns": learned[0].num_turns, **boxes.metrics()}
        return {"reward": learned[0].reward, "metrics": metrics}

    def _selection(self, split: str) -> dict[str, Any]:
        return {name: value for name, value in self._splits[split].items() if name != "taskset"}

    def _rows(self, split: str, taskset: Any) -> list[dict[str, Any]]:
        """Return the tasks as rows of data, with what `verifiers_rows` reads of one."""
        chosen = taskset.select(self._selections[split])
        if not chosen.bounded:
            told = f"the taskset {self._module} has no end; set {split}={{limit: NUMBER}}"
            raise RunFileError(f"{KEY}: {told}")
        rows = list[dict[str, Any]]()
        for task in chosen:
            data = task.data.model_dump(mode="json")
            prompt = [{"role": "user", "content": data["prompt"] or ""}]
            prompt = data["prompt"] if isinstance(data["prompt"], list) else prompt
            system = [{"role": "system", "content": data["system_prompt"]}] if data["system_prompt"] else []
            told = {name: data.get(name) for name in ("answer", "solution")}
            rows.append({"prompt": [*system, *prompt], **told, "task": data})
        return rows

    def _answer_requests(self) -> None:
        """Answer the requests to URL of the library's clients from now on."""
        import httpx  # pyright: ignore[reportMissingImports]
        import verifiers.v1.clients.eval as clients  # pyright: ignore[reportMissingImports]

        build, ours = clients.build_async_httpx, httpx.MockTransport(self._complete)
        clients.build_async_httpx = lambda config: (
            httpx.AsyncClient(transport=ours) if config.base_url == URL else build(config)
        )

    async def _complete(self, request: Any) -> Any:
        """Return the response to a request of chat completions."""
        import httpx  # pyright: ignore[reportMissingImports]

        found = self._asks.get(request.headers.get(SESSION, ""))
        if found is None:
            return httpx.Response(409, json={"error": {"message": "the episode has ended"}})
        body, (trace, ask, boxes) = json.loads(request.content), found
        boxes.waits = True
        try:
            message = await ask(body["messages"], body.get("tools") or [])
        finally:
            boxes.waits = False
        if message is None:
            trace.stop("context_length")  # an end with a reward, and no error
            told = "maximum context length: loop.max_new_tokens or loop.environment.max_turns is used up"
            error = {"message": told, "code": "context_length_exceeded", "type": "invalid_request_error"}
            return httpx.Response(400, json={"error": error})
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        whole = {"id": MODEL, "created": 0, "model": MODEL}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            return httpx.Response(200, json=whole | {"object": "chat.completion", "choices": [choice]})
        calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or ())]
        choice = {"index": 0, "delta": message | ({"tool_calls": calls} if calls else {}), "finish_reason": reason}
        chunk = json.dumps(whole | {"object": "chat.completion.chunk", "choices": [choice]})
        events = f"data: {chunk}\n\ndata: [DONE]\n\n"
        return httpx.Response(200, content=events.encode(), headers={"Content-Type": "text/event-stream"})
