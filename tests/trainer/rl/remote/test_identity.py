"""The program that starts a sampler again."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.formats import POD_VARIABLE, SECRET_VARIABLE, TOKEN_VARIABLE, RunFileError, attempt_token
from conf.schema.training.run_yaml import RunFile
from trainer.distributed.preemption import PREEMPTED_EXIT_CODE
from trainer.rl.remote import identity
from trainer.rl.remote.identity import SamplerKey, attempt_mark, own_name, own_token
from trainer.rl.remote.wire import WireError

RUN_FILE = Path("run.yaml")


class Lives:
    """Stands for `subprocess.Popen` and the clock: each start is the next life, with its seconds and its exit code."""

    def __init__(self, *lives: tuple[float, int]) -> None:
        self.lives, self.now, self.started, self.terminated = list(lives), 0.0, 0, False
        self.before_start = lambda: None

    def start(self, *_: Any, **__: Any) -> "Lives":
        self.before_start()
        self.started += 1
        return self

    def wait(self) -> int:
        if self.terminated:
            return -signal.SIGTERM
        seconds, code = self.lives.pop(0)
        self.now += seconds
        return code

    def terminate(self) -> None:
        self.terminated = True


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = signal.getsignal(signal.SIGTERM)

    def make(*lives: tuple[float, int]) -> Lives:
        made = Lives(*lives)
        monkeypatch.setattr(identity.subprocess, "Popen", made.start)
        monkeypatch.setattr(identity.time, "monotonic", lambda: made.now)
        return made

    yield make
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("ends", "code", "starts"),
    [
        ([(9, 1), (9, 1), (9, -9), (9, 1), (9, 1), (9, 1), (9, 0)], 1, 6),  # three exceptions in a row; a kill is none
        ([(7200, 1), (7200, 1), (7200, 1), (7200, 1), (7200, 0)], 0, 5),  # hours apart
        ([(3600, identity.NO_TRAINER_EXIT_CODE)], identity.NO_TRAINER_EXIT_CODE, 1),  # of a pod of samplers
    ],
)
def test_three_exceptions_in_a_row_end_a_sampler_and_so_does_a_missing_trainer(live, ends, code, starts) -> None:
    lives = live(*ends)
    assert identity.supervise(RUN_FILE) == code
    assert lives.started == starts


def test_all_workers_of_a_pod_of_samplers_sample(monkeypatch) -> None:
    monkeypatch.setenv("SLIPWAY_SAMPLER_POD", "1")
    assert identity.is_sampler(cast(RunFile, SimpleNamespace(sampler_workers=0)))
    monkeypatch.delenv("SLIPWAY_SAMPLER_POD")
    assert not identity.is_sampler(cast(RunFile, SimpleNamespace(sampler_workers=0)))


def test_a_request_to_stop_that_comes_while_a_sampler_is_started_ends_it(live) -> None:
    lives = live()
    lives.before_start = lambda: os.kill(os.getpid(), signal.SIGTERM)
    assert identity.supervise(RUN_FILE) == PREEMPTED_EXIT_CODE
    assert lives.terminated


@pytest.fixture(autouse=True)
def nobody(monkeypatch) -> None:
    for name in (POD_VARIABLE, SECRET_VARIABLE, TOKEN_VARIABLE, "SLIPWAY_WORKER", "TPU_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)


def test_a_worker_of_the_pod_knows_one_attempt(monkeypatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "token")
    monkeypatch.setenv("SLIPWAY_WORKER", "3")
    key = SamplerKey.own()
    assert (own_name(), own_token(), key.outlives_attempts) == ("worker 3", "token", False)
    assert key.token_for({"attempt": attempt_mark("token")}) == "token"
    with pytest.raises(WireError):
        key.token_for({"attempt": attempt_mark("another")})


def test_a_pod_of_samplers_derives_the_token_of_each_attempt(monkeypatch) -> None:
    monkeypatch.setenv(POD_VARIABLE, "2")
    monkeypatch.setenv(SECRET_VARIABLE, "of the run")
    key = SamplerKey.own()
    assert (own_name(), key.outlives_attempts) == ("sampler pod 2", True)
    tokens = [attempt_token("of the run", number) for number in (1, 2)]
    assert len({*tokens, "of the run"}) == 3
    for number, token in enumerate(tokens, 1):
        assert key.token_for({"attempt": attempt_mark(token), "number": number}) == token
    with pytest.raises(WireError):
        key.token_for({"attempt": attempt_mark(tokens[0]), "number": 2})
    with pytest.raises(WireError, match="has ended"):
        key.token_for({"attempt": attempt_mark(tokens[0]), "number": 1, "exit_code": 75})


def test_without_a_secret_the_message_names_the_variable(monkeypatch) -> None:
    with pytest.raises(RunFileError, match=TOKEN_VARIABLE):
        SamplerKey.own()
    monkeypatch.setenv(POD_VARIABLE, "1")
    monkeypatch.setenv(TOKEN_VARIABLE, "token")
    with pytest.raises(RunFileError, match=SECRET_VARIABLE):
        SamplerKey.own()
    monkeypatch.delenv(POD_VARIABLE)
    with pytest.raises(RunFileError, match="SLIPWAY_WORKER"):
        own_name()
