"""The program that starts a sampler again."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.schema.training.run_yaml import RunFile
from trainer.distributed.preemption import PREEMPTED_EXIT_CODE
from trainer.rl.remote import supervisor

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
        monkeypatch.setattr(supervisor.subprocess, "Popen", made.start)
        monkeypatch.setattr(supervisor.time, "monotonic", lambda: made.now)
        return made

    yield make
    signal.signal(signal.SIGTERM, before)


def test_three_exceptions_in_a_row_end_a_sampler_and_kills_do_not(live) -> None:
    lives = live((9, 1), (9, 1), (9, -9), (9, 1), (9, 1), (9, 1), (9, 0))
    assert supervisor.supervise(RUN_FILE) == 1
    assert lives.started == 6


def test_exceptions_that_are_hours_apart_are_not_in_a_row(live) -> None:
    lives = live((7200, 1), (7200, 1), (7200, 1), (7200, 1), (7200, 0))
    assert supervisor.supervise(RUN_FILE) == 0
    assert lives.started == 5


def test_a_pod_of_samplers_that_finds_no_trainer_ends(live) -> None:
    lives = live((3600, supervisor.NO_TRAINER_EXIT_CODE))
    assert supervisor.supervise(RUN_FILE) == supervisor.NO_TRAINER_EXIT_CODE
    assert lives.started == 1


def test_all_workers_of_a_pod_of_samplers_sample(monkeypatch) -> None:
    monkeypatch.setenv("SLIPWAY_SAMPLER_POD", "1")
    assert supervisor.is_sampler(cast(RunFile, SimpleNamespace(sampler_workers=0)))
    monkeypatch.delenv("SLIPWAY_SAMPLER_POD")
    assert not supervisor.is_sampler(cast(RunFile, SimpleNamespace(sampler_workers=0)))


def test_a_request_to_stop_that_comes_while_a_sampler_is_started_ends_it(live) -> None:
    lives = live()
    lives.before_start = lambda: os.kill(os.getpid(), signal.SIGTERM)
    assert supervisor.supervise(RUN_FILE) == PREEMPTED_EXIT_CODE
    assert lives.terminated
