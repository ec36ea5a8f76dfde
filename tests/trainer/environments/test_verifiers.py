"""Environments of the library verifiers, where it is installed: equal to its own rollouts against an OpenAI server."""

import asyncio
import json
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from conf.formats import RunFileError
from conf.schema.training.loop_parts import Environment
from controller.checks.preflight import preflight
from controller.config.compose import compose
from tests.groups import load_group
from tests.paths import ROOT
from trainer.environments.pool import EnvironmentPool, Step
from trainer.environments.verifiers_env import VerifiersEpisode, load_environment, load_episodes
from trainer.environments.verifiers_rows import questions, to_question

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    vf = pytest.importorskip("verifiers")
    openai = pytest.importorskip("openai")
    pytest.importorskip("datasets")
if not hasattr(vf, "ToolEnv"):
    pytest.skip("this version of verifiers has other environments", allow_module_level=True)

pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("default")]
GAMES = "games_of_verifiers"


@pytest.fixture(autouse=True)
def games(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module is importable, and the signal handlers are as before afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def settings(kind: str, **changes: Any) -> Environment:
    own = {"name": f"verifiers:{GAMES}", "options": {"kind": kind}, "workers": 1, "timeout_seconds": 60.0}
    return Environment(**load_group("loop/grpo")["environment"] | own | changes)


@pytest.fixture
def new_episode() -> Iterator[Callable[..., VerifiersEpisode]]:
    """A function that makes one episode of a kind; at the end all are closed, with their event loops."""
    made = list[VerifiersEpisode]()

    def make(kind: str, **changes: Any) -> VerifiersEpisode:
        made.append(load_episodes(settings(kind, **changes))())
        return made[-1]

    yield make
    for episode in made:
        episode.close()
        episode._loop.run_until_complete(episode._loop.shutdown_default_executor())
        episode._loop.close()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(text: str | None, *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """A message of an OpenAI server."""
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})


async def witnessed(kind: str, replies: list[dict[str, Any]]) -> tuple[dict[str, Any], list[Any]]:
    """The output of `Environment.generate` with a server that gives these replies, and the requests that it got."""
    requests = list[Any]()

    async def complete(request: web.Request) -> web.Response:
        requests.append(await request.json())
        message = replies[len(requests) - 1]
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        base = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response(base)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        client = vf.OpenAIChatCompletionsClient(
            openai.AsyncOpenAI(api_key="none", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0)
        )
        environment = load_environment(GAMES, {"kind": kind})
        rows = environment.get_dataset(n=1).to_list()
        results = await environment.generate(rows, client, "m", state_columns=["reward"], on_progress=lambda *_: None)
        await client.close()
    finally:
        await runner.cleanup()
    return results["outputs"][0], requests


def plain(messages: Any) -> list[Any]:
    """Messages without the ids of calls, which servers choose."""
    found = json.loads(json.dumps(messages, default=lambda m: m.model_dump(exclude_none=True)))
    return [(m["role"], m.get("content") or "", [strip_id(c) for c in m.get("tool_calls") or []]) for m in found]


def strip_id(call: Any) -> Any:
    call = json.loads(call) if isinstance(call, str) else call
    function = call.get("function", call)
    return function["name"], json.loads(function["arguments"])


@pytest.mark.parametrize(
    ("kind", "responses", "replies", "reward"),
    [
        ("single", ["42"], [said("42")], 1.25),
        ("single", ["41"], [said("41")], 0.25),
        ("guess", ["40", "50", "42"], [said("40"), said("50"), said("42")], 1 + 0.25 / 6),
        ("guess", ["1", "2", "3", "4"], [said("1"), said("2"), said("3"), said("4")], 0.25 / 7),
        (
            "tool",
            [f"Let me see. {call('multiply', a=6, b=7)}", "42"],
            [said("Let me see. ", ("multiply", {"a": 6, "b": 7})), said("42")],
            1 + 0.25 / 3,
        ),
        (
            "tool",
            [call("multiply", a=6, b=7) + "\n" + call("multiply", a=1, c=2), call("divide", a=1), "<tool_call>{a"],
            [
                said(None, ("multiply", {"a": 6, "b": 7}), ("multiply", {"a": 1, "c": 2})),
                said(None, ("divide", {"a": 1})),
                said("<tool_call>{a"),
            ],
            0.25 / 6,
        ),
        ("ledger", [call("add", amount=2), "42"], [said(None, ("add", {"amount": 2})), said("42")], 1 + 0.25 / 3),
    ],
)
def test_an_environment_does_what_it_does_in_its_library(
    new_episode: Any, kind: str, responses: list[str], replies: list[Any], reward: float
) -> None:
    output, requests = asyncio.run(witnessed(kind, replies))
    episode = new_episode(kind)
    row = next(iter(questions("train", environment=f"verifiers:{GAMES}", options={"kind": kind})))
    prompt, done, turns = episode.reset(row), False, 0
    for response in responses:
        assert not done
        (_, done), turns = episode.step(response), turns + 1
    own = episode._output()
    assert done
    assert turns == len(requests) == output["metrics"]["num_turns"]
    assert episode.reward() == pytest.approx(output["reward"]) == pytest.approx(reward)
    assert episode.metrics() == pytest.approx(output["metrics"])
    assert plain(own["completion"]) == plain(output["completion"])
    assert plain(own["prompt"]) == plain(output["prompt"]) == plain(requests[0]["messages"])
    assert [text for role, text in prompt if role == "user"] == [requests[0]["messages"][-1]["content"]]
    tools = requests[0].get("tools") or []
    assert all(json.dumps(tool, ensure_ascii=False) in prompt[0][1] for tool in tools)


def ask(pool: EnvironmentPool, row: Any, *responses: str, number: int = 0, final: bool = False) -> Step:
    return pool.submit(pool.new_draw(), number, row, [*responses], final=final).result()


def test_rows_are_the_data_sets_of_the_environment() -> None:
    rows = [*questions("train", environment=f"verifiers:{GAMES}", options={"kind": "single"})]
    assert [row["answer"] for row in rows] == ["42", "56", "72", "90"]
    assert rows[0]["question"] == "Write a number.\nWhat is 6*7?"
    assert len([*questions("test", environment=f"verifiers:{GAMES}")]) == 1
    with pytest.raises(RunFileError, match=r"loop\.environment\.name: .*no such game"):
        [*questions("train", environment=f"verifiers:{GAMES}", options={"kind": "raises"})]


def test_episodes_in_worker_processes_and_their_failures(capfd: pytest.CaptureFixture[str]) -> None:
    row = next(iter(questions("train", environment=f"verifiers:{GAMES}", options={"kind": "guess"})))
    with EnvironmentPool(settings("guess")) as pool:
        opened = ask(pool, row)
        assert [*map(tuple, opened.messages or [])] == [("user", "What is 6*7?")]
        heard = ask(pool, row, "40")
        assert ([*map(tuple, heard.messages or [])], heard.text, heard.done) == ([("user", "higher")], "higher", False)
        won = ask(pool, row, "40", "42")
        assert (won.done, won.reward, won.metrics["num_turns"]) == (True, 1 + 0.25 / 4, 2)
        cut = ask(pool, row, "40", "41", final=True)  # no room for another turn
        assert (cut.done, cut.failure, cut.metrics["num_turns"]) == (False, "", 2)
        assert cut.reward == 0.25 / 3
        broken = ask(pool, row, "forty")
        assert broken.failure == "error"
        assert "invalid literal" in broken.reason
        empty = ask(pool, row, "")  # which the library takes for an error of the model
        assert (empty.failure, empty.done, empty.metrics["num_turns"]) == ("", True, 0)
    assert "an episode failed (error): " in capfd.readouterr().err


def test_a_rubric_of_groups_is_refused_and_closing_an_episode_runs_the_cleanup(new_episode: Any) -> None:
    row = next(iter(questions("train", environment=f"verifiers:{GAMES}", options={"kind": "guess"})))
    with EnvironmentPool(settings("group")) as pool:
        step = ask(pool, row)
    assert (step.failure, "scores groups" in step.reason) == ("error", True)
    episode = new_episode("guess")
    episode.reset(row)
    episode.close()
    assert episode._task is not None
    assert episode._task.cancelled()


def test_the_example_of_the_docs_trains_and_evaluates_on_its_own_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of the files that the page links has no error, and its game is played in a worker process."""
    for name, folder in (("calculator_env.py", ""), ("calculator_env.yaml", "experiment")):
        (tmp_path / "slipway" / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "docs" / "verifiers" / name, tmp_path / "slipway" / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "slipway")
    config, problems = compose(["+experiment=calculator_env"], extra_dir=tmp_path / "slipway")
    assert not problems
    assert config is not None
    assert [str(f) for f in preflight(config) if f.severity == "error"] == []
    name = "verifiers:calculator_env"
    train, test = ([*questions(path, environment=name)] for path in ("train", "test"))
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    assert (len(train) + len(test), len(test) / 8100) == (8100, pytest.approx(0.2, abs=0.01))
    with EnvironmentPool(settings("", name=name, options={})) as pool:
        assert ask(pool, train[0], train[0]["question"].replace("?", "=")).text == train[0]["answer"]
        assert ask(pool, train[0], *train[0]["solution"].replace("=", "= ").split()).reward == 1


def test_a_public_environment_of_the_registry_runs_as_it_is(new_episode: Any) -> None:
    """Sophistry-bench: one turn about a passage, with claims that cite it. Its canaries are metrics without weight."""
    pytest.importorskip("sophistry_bench_sprint")
    own = {"name": "verifiers:sophistry_bench_sprint", "options": {"n_items": 3}}
    rows = [*map(to_question, load_environment("sophistry_bench_sprint", own["options"]).get_dataset())]
    assert len(rows) == 6
    episode = new_episode("", **own)
    assert [role for role, _ in episode.reset(rows[0])][-1] == "user"
    assert episode.step("I argue for the first answer.") == ("", True)
    assert episode.reward() == episode.metrics()["aggregate_reward"]
    assert {"n_claims_metric", "starts_with_canary_reward", "num_turns"} <= {*episode.metrics()}
