"""A dead watchdog is seen within a minute, started again, and said; a worker that does not answer holds up nothing."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.core.errors import LeaseLostError
from controller.core.this_process import InterruptedSleepError
from controller.run.watchdog_watch import LOOK_SECONDS, WatchdogWatch
from controller.ssh.fleet import WorkerError
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context

DEAD: dict[str, Any] = {"running": False, "idle_seconds": None, "seconds_left": None, "refused": None}
ALIVE: dict[str, Any] = {"running": True, "idle_seconds": 60.0, "seconds_left": 60.0, "refused": None}
SILENT = WorkerError(0, "10.0.0.2", "timeout", "no route")


class Watched:
    """A pod whose worker 0 gives these answers, one for each look; the last one for ever."""

    def __init__(self, *answers: Any, start: Callable[[], bool] | None = None) -> None:
        self.answers, self.notes, self.started = [*answers], list[str](), 0
        self.clock = ManualClock()
        context = make_context(None, clock=self.clock, notes=self.notes)
        fleet = SimpleNamespace(call_all=lambda *_, **__: [self.answer()])
        node = SimpleNamespace(id="node/pod")
        self.watch = WatchdogWatch(context, cast(Any, node), cast(Any, fleet), start or self.start)

    def answer(self) -> Any:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def start(self) -> bool:
        self.started += 1
        return True

    def pass_seconds(self, seconds: int) -> None:
        """Tick each second; a look takes no time."""
        for _ in range(seconds):
            self.clock.elapsed += 1.0
            self.watch.tick()
            if look := self.watch._look:
                look.join()


def test_a_dead_one_is_started_again_within_a_minute_and_said() -> None:
    pod = Watched(ALIVE, DEAD, ALIVE)
    pod.pass_seconds(int(LOOK_SECONDS) + 5)
    assert (pod.started, pod.notes) == (0, [])
    pod.pass_seconds(60)
    assert pod.started == 1
    assert pod.notes == ["warning: the pod's watchdog had died; it is started again"]
    pod.pass_seconds(600)
    assert len(pod.notes) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [(SILENT, ""), (ALIVE, ""), ({**ALIVE, "refused": "HTTP 403: no"}, "Google refuses its watchdog: HTTP 403: no")],
)
def test_what_lasts_is_said_once(answer: Any, said: str) -> None:
    pod = Watched(answer)
    pod.pass_seconds(300)
    assert len(pod.notes) == bool(said)
    assert said in "".join(pod.notes)
    assert pod.started == 0


def test_one_that_does_not_start_is_said_once_and_tried_again() -> None:
    tried = list[int]()

    def fail() -> bool:
        tried.append(1)
        raise SILENT

    pod = Watched(DEAD, start=fail)
    pod.pass_seconds(300)
    assert len(tried) > 4
    [note] = pod.notes
    assert "has died and does not start again, so only this controller, and the dead man's switch" in note
    assert note.endswith(f": {SILENT}")


def test_another_controller_looks_after_it() -> None:
    def lost() -> bool:
        raise LeaseLostError("taken over")

    with pytest.raises(LeaseLostError):
        Watched(DEAD, start=lost).pass_seconds(100)


def test_one_whose_time_is_up_is_not_said_to_be_started() -> None:
    pod = Watched(DEAD, start=lambda: False)
    pod.pass_seconds(300)
    assert pod.notes == []


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_interrupt_during_a_look_ends_it_without_a_word() -> None:
    pod, asked = Watched(ALIVE), list[int]()

    def interrupt(*_: Any, **__: Any) -> None:
        asked.append(1)
        raise InterruptedSleepError

    pod.watch._fleet = cast(Any, SimpleNamespace(call_all=interrupt))
    pod.pass_seconds(int(LOOK_SECONDS) + 5)
    assert (len(asked), pod.notes) == (1, [])


def test_a_look_that_hangs_holds_up_nothing() -> None:
    pod, go_on, looks = Watched(ALIVE), threading.Event(), list[dict[str, Any]]()

    def hang(*_: Any, **__: Any) -> list[dict[str, Any]]:
        looks.append(ALIVE)
        go_on.wait(60.0)
        return looks

    pod.watch._fleet = cast(Any, SimpleNamespace(call_all=hang))
    for _ in range(1000):
        pod.clock.elapsed += 1.0
        pod.watch.tick()
    look = pod.watch._look
    assert look is not None
    assert look.is_alive()
    go_on.set()
    look.join()
    assert len(looks) == 1
