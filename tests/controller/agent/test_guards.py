"""Who ends a pod when others are dead: every subset of its guards is killed, in every phase, under every clock.

The watchdog, the supervisor's heartbeat and the dead man's switch are the real ones, in virtual time: of several
threads one runs, until it sleeps. Only the requests to Google, the program and the controller are played.
"""

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.agent import fs, supervisor, watchdog
from controller.agent.fs import write_json
from controller.resources.pod import dead_mans_switch

BUDGET, IDLE = 600.0, 150.0
"""Seconds until the controller ends the run, and until an unused pod deletes itself."""
LIMIT = BUDGET + 60.0
"""When the watchdog deletes the pod; the controller is a little faster."""
LATE = 120.0
"""How much later than its limit a pod may be gone."""
NEVER = float("inf")
GUARDS = ("controller", "supervisor", "watchdog", "switch", "program")
PHASES = {"at the launch": 1.0, "in the middle": 301.0, "just before the end": BUDGET - 1.0}
CLOCKS: dict[str, Callable[[float], float]] = {
    "right": lambda now: 0.0,
    "set forward": lambda now: 7200.0 if now > 100 else 0.0,
    "set back": lambda now: -7200.0 if now > 100 else 0.0,
    "slewing": lambda now: -now / 2,
    "stopped": lambda now: -now,
}
"""How far the time of day is off."""


class KilledError(BaseException):
    """The process has been killed."""


class Pod:
    """Its processes, as threads that take turns."""

    def __init__(self, home: Path, patch: pytest.MonkeyPatch, clock: Callable[[float], float]) -> None:
        self.home, self.clock, self.now = home, clock, 0.0
        self.deleted: list[tuple[float, str]] = []
        self._wakes: dict[str, float] = {}
        self._turns: dict[str, threading.Event] = {}
        self._killed = set[str]()
        self._threads: dict[str, threading.Thread] = {}
        self._yielded = threading.Event()
        self.program_ended = NEVER
        (home / ".slipway").mkdir(parents=True)
        patch.setenv("HOME", str(home))
        patch.setenv("SLIPWAY_BOOT_ID", "boot-1")
        patch.setattr(watchdog.sys, "argv", ["agent.pyz"])
        patch.setattr(watchdog, "boot_time", lambda: self.now)
        patch.setattr(watchdog, "wall_time", self.time_of_day)
        patch.setattr(watchdog, "time", SimpleNamespace(sleep=self.sleep))
        patch.setattr(watchdog, "in_use", lambda: self.now < self.program_ended)
        patch.setattr(watchdog, "_delete_pod", lambda order, why: self.delete(f"watchdog: {why}"))
        patch.setattr(watchdog, "_spawn_if_dead", lambda agent: self.start("watchdog", watchdog.run_watchdog))
        patch.setattr(fs, "boot_time", lambda: self.now)

    def time_of_day(self) -> float:
        return 1e9 + self.now + self.clock(self.now)

    def delete(self, who: str) -> None:
        self.deleted.append((self.now, who))

    def alive(self, name: str) -> bool:
        return name in self._threads and name not in self._killed

    def start(self, name: str, act: Callable[[], object]) -> None:
        """Start a process unless it runs; its turn comes next."""
        if self.alive(name):
            return

        def run() -> None:
            self._turns[name].wait()
            try:
                act()
            except KilledError:
                pass
            finally:
                self._killed.add(name)
                self._yielded.set()

        self._killed.discard(name)
        self._turns[name], self._wakes[name] = threading.Event(), self.now
        self._threads[name] = threading.Thread(target=run, name=name, daemon=True)
        self._threads[name].start()

    def sleep(self, seconds: float) -> None:
        name = threading.current_thread().name
        self._wakes[name], self._turns[name] = self.now + seconds, threading.Event()
        turn = self._turns[name]
        self._yielded.set()
        turn.wait()
        if name in self._killed:
            raise KilledError

    def _turn(self, name: str) -> None:
        self._yielded.clear()
        self._turns[name].set()
        self._yielded.wait()

    def kill(self, name: str) -> None:
        if name == "program":
            self.program_ended = min(self.program_ended, self.now)
        elif self.alive(name):
            self._killed.add(name)
            self._turn(name)
            self._wakes.pop(name, None)

    def run(self, until: float) -> None:
        """Let time pass until then, or until the pod is deleted."""
        while not self.deleted:
            waiting = {name: at for name, at in self._wakes.items() if self.alive(name)}
            if not waiting or min(waiting.values()) > until:
                break
            name = min(waiting, key=lambda each: (waiting[each], each))
            self.now = max(self.now, waiting[name])
            del self._wakes[name]
            self._turn(name)
        if not self.deleted:
            self.now = until


def begin(pod: Pod) -> None:
    """A program runs, and everybody looks after it."""
    order: dict[str, Any] = {"idle_seconds": IDLE, "until": LIMIT, "seconds_left": LIMIT, "boot_id": "boot-1"}
    write_json(watchdog.agent_root() / "watchdog.json", {**order, "asked": 0.0, "agent": "agent.pyz", "bucket": None})
    homes = [str(pod.home)]

    class Ended:
        """The event of the supervisor: its program has ended."""

        def wait(self, seconds: float) -> bool:
            pod.sleep(min(seconds, max(0.0, pod.program_ended - pod.now)))
            return pod.now >= pod.program_ended

    def drive() -> None:
        while pod.now < BUDGET:
            pod.sleep(30.0)
            fs.write_heartbeat()  # each command of the agent does so
            watchdog.keep_watchdog()  # as `WatchdogWatch` has it
        pod.delete("controller")

    pod.start("watchdog", watchdog.run_watchdog)
    pod.start("supervisor", lambda: supervisor.keep_heartbeat(Ended()))  # type: ignore[arg-type]
    pod.start("controller", drive)
    pod.start(
        "switch",
        lambda: dead_mans_switch.watch(
            7200.0,
            lambda: dead_mans_switch.last_sign(homes, str(pod.home / "proc")),
            lambda: pod.delete("switch"),
            lambda: pod.now,
            pod.sleep,
            lambda begun: dead_mans_switch.read_limits(homes, "boot-1", begun),
        ),
    )


KILLED = [each for size in range(len(GUARDS) + 1) for each in itertools.combinations(GUARDS, size)]


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("phase", PHASES)
def test_whoever_dies_the_pod_is_gone_in_time(
    phase: str, clock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, killed in enumerate(KILLED):
        with monkeypatch.context() as patch:
            pod = Pod(tmp_path / str(number), patch, CLOCKS[clock])
            begin(pod)
            pod.run(PHASES[phase])
            for name in killed:
                pod.kill(name)
            pod.run(LIMIT + 10_000.0)
            for name in GUARDS:
                pod.kill(name)
            what = (killed, phase, clock, pod.deleted)
            if {"controller", "supervisor", "watchdog", "switch"} <= {*killed}:
                assert pod.deleted == [], "what the page says of all dead at once"
                continue
            assert pod.deleted, what
            when = pod.deleted[0][0]
            assert when <= LIMIT + LATE, what
            if {"program", "controller"} <= {*killed}:
                assert when <= PHASES[phase] + IDLE + LATE, what
            elif "program" in killed:
                assert when >= min(BUDGET, PHASES[phase] + IDLE - 30.0), what
            elif not {"controller", "supervisor", "watchdog"} <= {*killed}:
                assert when >= BUDGET, what
            else:
                assert when >= min(BUDGET, PHASES[phase] + IDLE), what


def test_what_is_left_survives_a_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each boot has its own clock: only the seconds that are left go from one to the next."""
    pod = Pod(tmp_path, monkeypatch, CLOCKS["right"])
    begin(pod)
    for name in ("controller", "supervisor"):
        pod.kill(name)
    pod.run(400.0)
    for name in GUARDS:
        pod.kill(name)
    assert pod.deleted == []
    order = json.loads((tmp_path / ".slipway" / "watchdog.json").read_bytes())
    assert LIMIT - 400.0 <= order["seconds_left"] <= LIMIT - 400.0 + 75.0
    until, idle = dead_mans_switch.read_limits([str(tmp_path)], "boot-2", 5.0)
    assert (until, idle) == (5.0 + order["seconds_left"], IDLE)


def test_a_full_disk_ends_no_watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = Pod(tmp_path, monkeypatch, CLOCKS["right"])
    begin(pod)
    for name in ("controller", "supervisor", "switch"):
        pod.kill(name)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watchdog, "write_json", full)
    pod.run(LIMIT + LATE)
    pod.kill("watchdog")
    [(when, who)] = pod.deleted
    assert LIMIT <= when <= LIMIT + 15.0
    assert who == "watchdog: the run's budget is spent"
