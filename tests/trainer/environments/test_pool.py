"""Environments in worker processes: every failure has a name, and costs only its own episode."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conf.formats import RunFileError
from conf.schema.training.loop_parts import Environment
from tests.groups import load_group
from trainer.environments.pool import EnvironmentPool, Step
from trainer.environments.worker import EpisodeServer

MINE = '''
import os, sys, time

class Game:
    """Does what its responses say, and counts them."""

    def __init__(self, *, limit=3):
        self.limit, self.heard = limit, []

    def reset(self, row):
        return f"{row['question']} {row['seed']}"

    def step(self, response):
        self.heard.append(response)
        match response:
            case "raise":
                raise ValueError("mine\\nof two lines")
            case "exit":
                raise SystemExit(0)
            case "hang":
                while True: pass
            case "sleep":
                time.sleep(600)
            case "print":
                while True: print("x" * 2**20)
            case "say":
                return "x" * 2**23, False
            case "memory":
                return str(len(bytearray(2**40))), False
            case "die":
                os.kill(os.getpid(), 9)
            case "nothing":
                return None
            case "ask":
                return sys.stdin.read(), False
        return f"{os.getpid()} {len(self.heard)}", len(self.heard) == self.limit

    def reward(self):
        return float("nan") if "nan" in self.heard else len(self.heard) / self.limit

    def metrics(self):
        return {"heard": len(self.heard)}

class Deaf:
    def reset(self, row): return ""
    def reward(self): return 1.0
'''
ROW = {"question": "?", "seed": 5}


def settings(**changes: Any) -> Environment:
    given = {"name": "my_env:Game", "timeout_seconds": 1.0, "max_output_mib": 4.0, "workers": 1}
    return Environment(**load_group("loop/grpo")["environment"] | given | changes)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "my_env.py").write_text(MINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    sys.modules.pop("my_env", None)


@pytest.fixture(scope="module")
def pool(modules: Path) -> Iterator[EnvironmentPool]:
    with EnvironmentPool(settings()) as opened:
        yield opened


def step(pool: EnvironmentPool, number: int, *responses: str, final: bool = False) -> Step:
    return pool.submit("draw.", number, ROW, [*responses], final=final).result()


def test_an_episode_goes_on_in_its_process_until_it_is_done(pool: EnvironmentPool) -> None:
    assert step(pool, 0) == Step("? 5")
    first, second = step(pool, 0, "a"), step(pool, 0, "a", "b")
    assert (first.done, first.reward, first.text.split()[1], second.text.split()[1]) == (False, None, "1", "2")
    other = step(pool, 1, "a", final=True)
    assert (other.done, other.reward, other.metrics) == (False, pytest.approx(1 / 3), {"heard": 1.0})
    last = step(pool, 0, "a", "b", "c")
    assert (last.done, last.reward) == (True, 1)
    assert first.text.split()[0] == last.text.split()[0]


@pytest.mark.parametrize(
    ("response", "cause", "reason"),
    [
        ("raise", "error", "ValueError: mine"),
        ("hang", "timeout", "1 s of CPU time or 60 s in all"),
        ("print", "output", "more than 4 MiB"),
        ("say", "output", "8,388,608 characters"),
        ("memory", "memory", "max_memory_gib"),
        ("nan", "not_finite", "the reward is nan"),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in (
                ("exit", "error", "SystemExit: 0"),
                ("nothing", "error", "step must return (text, done), not None"),
                ("die", "died", "ended with code -9"),
            )
        ),
    ],
)
def test_a_failure_is_named_and_costs_no_other_episode(
    pool: EnvironmentPool, response: str, cause: str, reason: str
) -> None:
    """An episode in the same process goes on after it: if the process died, from its responses."""
    step(pool, 2, "a")
    failed = step(pool, 3, response, final=True)
    assert (failed.failure, failed.reward, failed.done) == (cause, None, False)
    assert reason in failed.reason
    after = step(pool, 2, "a", "b")
    assert (after.failure, after.text.split()[1]) == ("", "2")


@pytest.mark.deep
def test_an_environment_that_waits_has_a_limit_and_no_input_and_the_first_failure_of_each_cause_is_printed(
    modules: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with EnvironmentPool(settings(wall_seconds=0.5)) as pool:
        assert step(pool, 0, "sleep").failure == "timeout"
        assert step(pool, 0, "ask").text == ""
        for number, response in enumerate(("raise", "raise", "nan")):
            step(pool, number, response, final=True)
    said, begin = capfd.readouterr().err.splitlines(), "environment my_env:Game: an episode failed"
    assert said[1:] == [
        f"{begin} (error): ValueError: mine of two lines; others are counted as environment_error",
        f"{begin} (not_finite): the reward is nan; others are counted as environment_not_finite",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "my_env:Missing"}, r"loop\.environment\.name: environment my_env:Missing: the module has no Missing"),
        ({"name": "my_env:Deaf"}, r"loop\.environment\.name: environment my_env:Deaf has no method step"),
        ({"options": {"speed": 1}}, r"environment my_env:Game takes \(\*, limit=3\), but is called as \(speed=…\)"),
        ({"name": "my_nowhere:Game"}, r"cannot import my_nowhere"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_at_once(modules: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RunFileError, match=message):
        EnvironmentPool(settings(**changes))


class Saying:
    """Begins with the messages that it was made with."""

    def __init__(self, messages: Any) -> None:
        self._messages = messages

    def reset(self, row: Any) -> Any:
        return self._messages

    def step(self, response: str) -> tuple[str, bool]:
        return "", True

    def reward(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([("user",)], r"messages must be pairs of role and text, not \[\('user',\)\]"),
        (
            [("critic", "x")],
            "the role of a message is system, user, assistant or, of the first one, tools, not",
        ),
        ([("user", "x"), ("tools", "[]")], "the role of a message is .*, not 'tools'"),
        ([("tools", "{")], "a message of tools must be a JSON list of functions, not '{'"),
        ([("tools", "{}")], "a message of tools must be a JSON list of functions, not '{}'"),
        ([("tools", "[]"), ("user", "x")], ""),
        ([("system", "s"), ("user", "x"), ("assistant", "y"), ("user", "z")], ""),
    ],
)
def test_a_message_that_no_template_could_write_is_named(messages: Any, words: str) -> None:
    server = EpisodeServer(settings(timeout_seconds=60.0), lambda: Saying(messages))
    reply = server.answer({"id": "a", "row": {}, "responses": [], "final": False})
    if words:
        assert reply["failure"] == "error"
        assert re.match(words, reply["reason"])
    else:
        assert [tuple(turn) for turn in reply["messages"]] == messages
