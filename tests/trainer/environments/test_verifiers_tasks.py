"""Environments of verifiers 0.4, where it is installed: tasksets and harnesses as they are, in boxes."""

import asyncio
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conf.formats import RunFileError
from conf.schema.training.loop_parts import Environment
from controller import api
from tests.groups import load_group
from trainer.environments import verifiers_box
from trainer.environments.pool import EnvironmentPool
from trainer.environments.verifiers_env import COLUMN, VerifiersEpisode, has_tasksets, load_environment, load_episodes
from trainer.environments.verifiers_rows import to_question

verifiers = pytest.importorskip("verifiers")
if not has_tasksets():
    pytest.skip("this version of verifiers has no tasksets", allow_module_level=True)

pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("default")]
GAMES = "games_of_tasksets"
NULL = {"agent": {"harness": {"id": "null"}}}
SPLITS = {"test": {"limit": 1, "taskset": {"first": 100}}}


@pytest.fixture(autouse=True)
def games(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules are importable, here and in programs, and the signal handlers are as before afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def settings(name: str = GAMES, options: Any = None, sandbox: Any = None, **changes: Any) -> Environment:
    group = load_group("loop/grpo")["environment"]
    own = {"name": f"verifiers:{name}", "options": options or {}, "workers": 1, "timeout_seconds": 300.0}
    own |= {"wall_seconds": 600.0, "sandbox": group["sandbox"] | {"wall_seconds": 300.0, **(sandbox or {})}}
    return Environment(**group | own | changes)


@pytest.fixture
def new_episode() -> Iterator[Callable[..., VerifiersEpisode]]:
    """A function that makes one episode; at the end all are closed, with their event loops."""
    made = list[VerifiersEpisode]()

    def make(**how: Any) -> VerifiersEpisode:
        made.append(load_episodes(settings(**how))())
        return made[-1]

    yield make
    for episode in made:
        episode.close()
        episode._loop.run_until_complete(episode._loop.shutdown_default_executor())
        episode._loop.close()


@pytest.fixture
def row() -> dict[str, Any]:
    return to_question(load_environment(GAMES, {}).get_dataset()[0])


def test_rows_are_the_tasks_that_the_options_choose() -> None:
    environment = load_environment(GAMES, SPLITS)
    splits = (environment.get_dataset(), environment.build_eval_dataset())
    train, test = ([*map(to_question, rows)] for rows in splits)
    assert [(row["question"], row["answer"]) for row in train] == [
        (f"What is {n}+{n + 1}?", str(2 * n + 1)) for n in range(6, 10)
    ]
    assert [row["answer"] for row in test] == ["201"]
    assert train[0]["solution"].endswith('tee sum.txt"}}</tool_call>13')


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def bash(command: str) -> str:
    return call("bash", command=command)


def test_a_harness_runs_in_a_box_and_its_task_is_scored_there(
    new_episode: Any, row: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-run")
    episode = new_episode()
    prompt = episode.reset(row)
    assert [role for role, _ in prompt] == ["tools", "system", "user"]
    assert {tool["function"]["name"] for tool in json.loads(prompt[0][1])} == {"bash", "edit"}
    look = f"pwd; echo 13 >sum.txt; ls; env | grep -c secret; ls {Path.home()}/.bashrc; cat /proc/1/environ"
    [(role, said)], done = episode.step(bash(look))
    assert (role, done) == ("user", False)
    assert "\n/home/box\nsum.txt\n0\n" in said
    assert said.count("No such file") == said.count("Permission denied") == 1
    assert episode.step("13") == ("", True)
    assert episode.reward() == 1 + 0.25 / 2
    counts = {"sandbox_exit_code": 0.0, "sandbox_killed": 0.0}
    assert episode.metrics() == {"right": 1, "brevity": 0.5, "file_is_there": 1, "num_turns": 2, **counts}


def test_without_room_a_rollout_ends_with_its_reward(new_episode: Any, row: Any) -> None:
    episode = new_episode()
    episode.reset(row)
    episode.step(bash("touch sum.txt"))
    assert episode.reward() == 0.25
    assert (episode.metrics()["file_is_there"], episode.metrics()["num_turns"]) == (1, 1)


def test_tools_are_servers_in_boxes_of_their_own(new_episode: Any, row: Any) -> None:
    episode = new_episode(options={"taskset": {"task": {"tools": {"colocated": False}}}} | NULL)
    prompt = episode.reset(row)
    assert [tool["function"]["name"] for tool in json.loads(prompt[0][1])] == ["add"]
    [(_, said)], _ = episode.step(call("add", a=6, b=7))
    assert "13" in said
    assert episode.step("13")[1]
    assert episode.reward() == 1.125


def test_episodes_in_worker_processes_and_their_failures(row: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with EnvironmentPool(settings(sandbox={"cpu_seconds": 12.0})) as pool:

        def ask(number: int, *responses: str) -> Any:
            return pool.submit("a", number, row, [*responses], final=False).result()

        assert [role for role, _ in ask(0).messages] == ["tools", "system", "user"]
        assert "hello" in ask(0, bash("echo hello")).text
        done = ask(0, bash("echo hello"), "13")
        assert (done.done, done.reward, done.metrics["sandbox_exit_code"]) == (True, 1.125, 1)
        assert ask(1, bash("while :; do :; done")).failure == "timeout"
    assert "an episode failed (timeout): " in capfd.readouterr().err


def test_options_that_do_not_fit_are_one_line(row: Any) -> None:
    del row
    for options, told in (
        ({"taskset": {"second": 1}}, "taskset.second"),
        ({"train": {"most": 1}}, "most"),
        ({"agent": {"harness": {"id": "bush"}}}, "bush"),
    ):
        with pytest.raises((RunFileError, ModuleNotFoundError), match=told) as caught:
            load_environment(GAMES, options)
        assert "\n" not in str(caught.value)
    with pytest.raises(RunFileError, match=r"set train=\{limit: NUMBER\}"):
        load_environment(GAMES, {"taskset": {"forever": True}}).get_dataset()
    assert len(load_environment(GAMES, {"taskset": {"forever": True}, "train": {"limit": 3}}).get_dataset()) == 3


def test_a_harness_that_needs_a_container_is_refused_by_name(new_episode: Any, row: Any) -> None:
    episode = new_episode(options={"agent": {"harness": {"id": "codex"}}})
    with pytest.raises(ValueError, match="needs a container runtime"):
        episode.reset(row)


def test_a_runtime_reads_and_writes_in_its_box_alone(tmp_path: Path) -> None:
    import verifiers.v1 as vf
    from verifiers.v1.runtimes import make_runtime

    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    verifiers_box.use_boxes(settings().sandbox, 1.0)

    async def play() -> None:
        runtime = make_runtime(vf.SubprocessConfig())
        await runtime.start()
        try:
            await runtime.write("a/b.txt", b"text")
            assert await runtime.read("a/b.txt", max_bytes=4) == b"text"
            assert (await runtime.run(["cat", "a/b.txt"], {})).stdout == "text"
            await runtime.run(["ln", "-s", str(secret), "link"], {})
            await runtime.run(["ln", "-s", str(tmp_path / "made"), "other"], {})
            for attempt in (runtime.read("link"), runtime.write("other", b"x"), runtime.read("/tmp/none")):
                with pytest.raises(vf.SandboxError):
                    await attempt
            assert not (tmp_path / "made").exists()
            with pytest.raises(vf.SandboxError, match="over the 3 byte limit"):
                await runtime.read("a/b.txt", max_bytes=3)
            ended = await runtime.run(["sh", "-c", "exit 3"], {})
            assert (ended.exit_code, runtime._episode.exit_code) == (3, 1)
            assert len((await runtime.run(["sh", "-c", "head -c 3000000 /dev/zero"], {})).stdout) == 1 << 20
            assert not runtime.supports_live_processes
            same = await runtime.prepare_uv_script(
                "# /// script\n# dependencies = ['no-such-package']\n# ///\nprint(5)"
            )
            assert (await runtime.run(same, {})).stdout == "5\n"
            flood = await runtime.run(["sh", "-c", "cat /dev/zero"], {})
            assert flood.stderr.endswith("killed: output (loop.environment.sandbox)")
            with pytest.raises(vf.SandboxError, match="the box has ended at its limit of output"):
                await runtime.run(["true"], {})
            assert runtime._episode.killed == 1
        finally:
            await runtime.stop()

    asyncio.run(play())


def test_a_public_taskset_of_the_registry_runs_as_it_is(
    new_episode: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hangman of TextArena, as verifiers 0.4 ships it, in its harness; the words, which NLTK downloads, are ours."""
    pytest.importorskip("textarena")
    folder = tmp_path / "corpora" / "words"
    folder.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / name).write_text("egg\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: True)
    options = {"taskset": {"game": "Hangman-v0"}, "train": {"limit": 2}}
    rows = [*map(to_question, load_environment("textarena", options).get_dataset())]
    assert len(rows) == 2
    assert "You are playing Hangman" in rows[0]["question"]
    assert json.loads(rows[0][COLUMN])["task"]["info"] == {"game": "Hangman-v0", "seed": 0}
    episode = new_episode(name="textarena", options=options)
    prompt = episode.reset(rows[0])
    assert "You are playing Hangman" in prompt[-1][1]
    said, done = episode.step("[e]")
    assert not done
    assert "E" in said[0][1]
    assert episode.step("[g]") == ("", True)
    assert episode.reward() == 1
    assert episode.metrics()["num_turns"] == 2


SUMS = """# @package _global_
defaults:
  - override /cloud: here
  - override /data: verifiers
  - override /model: tiny
  - override /loop: grpo
  - override /optimizer: adamw

cloud: {backend: cpu}
run: {name: sums}
model: {vocab_size: 260, num_layers: 1, dim: 32, mlp_dim: 64, attention_pattern: L, sliding_window: 16}
loop:
  steps: 2
  prompts_per_step: 2
  group_size: 2
  max_prompt_length: 1024
  max_new_tokens: 192
  sampler: {stop: ["</tool_call>"], chunk: 32}
  environment:
    name: "verifiers:games_of_tasksets"
    options: {agent: {harness: {edit: false}}}
    max_turns: 3
    max_turn_tokens: 128
    workers: 2
    timeout_seconds: 300
    wall_seconds: 600
  warm_start_steps: 1
  eval_interval: 2
  eval_prompts: 2
  test_prompts: null
checkpoint: {save_interval: 2}
logging: {log_interval: 1}
"""


def test_grpo_in_a_harness_whose_programs_run_in_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command: an update of a warm start, whose worked answers call the tool, and two of GRPO."""
    (own := tmp_path / "slipway" / "experiment").mkdir(parents=True)
    (own / "sums.yaml").write_text(SUMS)
    for name in (GAMES, "tools_of_tasksets"):
        shutil.copy(Path(__file__).with_name(f"{name}.py"), own.parent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    assert api.up("+experiment=sums")["state"] == "finished"
    [metrics] = (tmp_path / "home" / "here" / "store").rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    updates = [line for line in lines if "loss" in line]
    assert [line["phase"] for line in updates] == ["warm_start", "grpo", "grpo"]
    assert [line["environment_failed"] for line in updates[1:]] == [0.0, 0.0]
    assert min(line["environment_num_turns"] for line in updates[1:]) >= 1
