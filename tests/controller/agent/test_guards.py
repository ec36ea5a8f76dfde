"""Who ends a pod when others are dead: every subset of its guards is killed, in every phase, under every clock.

The watchdog, the supervisor's heartbeat and the dead man's switch are the real ones, in virtual time: of several
threads one runs, until it sleeps. Only the requests to Google, the program and the controller are played.
"""

import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.schema.run_sections import Cleanup
from controller.agent import fs, supervisor, watchdog
from controller.agent.fs import locked, write_json
from controller.resources import dead_mans_switch
from controller.run.attempt import GRACE_SECONDS

CREATED, REACHED, BUDGET, SAVED, RECORDED = -200.0, -160.0, 600.0, 610.0, 625.0
"""When the VM boots, when SSH answers, when the controller ends the program, which was launched at 0, when the program
has saved, and when its end is on record; in seconds."""
IDLE, SILENT = 150.0, 7200.0
"""How long an unused pod stays, and one without a sign of life."""
LIMIT = BUDGET + GRACE_SECONDS
"""When the watchdog deletes the pod; the controller is a little faster."""
LATE = 120.0
"""How much later than the run's budget, or a pod's idle time, the pod may be gone."""
NEVER = float("inf")
GUARDS = ("controller", "supervisor", "watchdog", "switch", "program")
PHASES = {
    "creating": CREATED + 10.0,
    "setting up": -100.0,
    "running": 301.0,
    "saving": BUDGET + 5.0,
    "ending": SAVED + 5.0,
}
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
        self.home, self.clock, self.now = home, clock, CREATED
        self.deleted: list[tuple[float, str]] = []
        self._wakes: dict[str, float] = {}
        self._turns: dict[str, threading.Event] = {}
        self._killed = set[str]()
        self._threads: dict[str, threading.Thread] = {}
        self._yielded = threading.Event()
        self.launched = self.program_ended = NEVER
        (home / ".slipway").mkdir(parents=True)
        patch.setenv("HOME", str(home))
        patch.setenv("SLIPWAY_BOOT_ID", "boot-1")
        patch.setattr(watchdog.sys, "argv", ["agent.pyz"])
        patch.setattr(watchdog, "boot_time", lambda: self.now)
        patch.setattr(watchdog, "wall_time", self.time_of_day)
        patch.setattr(watchdog, "time", SimpleNamespace(sleep=self.sleep))
        patch.setattr(watchdog, "in_use", self.in_use)
        patch.setattr(watchdog, "_delete_pod", lambda order, why: self.delete(f"watchdog: {why}"))
        patch.setattr(watchdog, "_spawn_if_dead", lambda agent: self.start("watchdog", watchdog.run_watchdog))
        patch.setattr(fs, "boot_time", lambda: self.now)

    def time_of_day(self) -> float:
        return 1e9 + self.now + self.clock(self.now)

    def in_use(self) -> bool:
        """The program runs, or the controller is logged in."""
        return self.launched <= self.now < self.program_ended or (self.alive("controller") and self.now >= REACHED)

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
            self.program_ended = (
                min(self.program_ended, max(self.now, self.launched)) if self.launched < NEVER else NEVER
            )
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


class Recorded:
    """The event of the supervisor: the end of its program is on record."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod

    def wait(self, seconds: float) -> bool:
        at = self._pod.program_ended + RECORDED - SAVED
        self._pod.sleep(min(seconds, max(0.0, at - self._pod.now)))
        return self._pod.now >= at


def give_orders(left: float | None, now: float) -> None:
    order: dict[str, Any] = {"idle_seconds": IDLE, "until": left and now + left, "seconds_left": left, "asked": now}
    with locked("watchdog"):
        write_json(
            watchdog.agent_root() / "watchdog.json",
            {**order, "boot_id": "boot-1", "agent": "agent.pyz", "bucket": None, "deletes": [], "note_object": ""},
        )
        watchdog._spawn_if_dead("agent.pyz")


def drive(pod: Pod) -> None:
    """The controller: each of its commands is a heartbeat, and it asks after the watchdog as `WatchdogWatch` does."""
    pod.sleep(REACHED - pod.now)
    give_orders(None, pod.now)
    while pod.now < 0:
        fs.write_heartbeat()
        pod.sleep(min(30.0, -pod.now))
    give_orders(LIMIT, pod.now)
    pod.launched = pod.now
    pod.start("supervisor", lambda: supervisor.keep_heartbeat(Recorded(pod)))  # type: ignore[arg-type]
    while pod.now < RECORDED:
        fs.write_heartbeat()
        watchdog.keep_watchdog()
        pod.sleep(min(30.0, (BUDGET if pod.now < BUDGET else RECORDED) - pod.now))
        if pod.now >= BUDGET:  # it is told to end, and saves
            pod.program_ended = min(pod.program_ended, SAVED)
    pod.delete("controller")


def begin(pod: Pod) -> None:
    """A VM has booted for a run."""
    homes, known = [str(pod.home)], dict[str, tuple[float, float]]()
    pod.start("controller", lambda: drive(pod))
    pod.start(
        "switch",
        lambda: dead_mans_switch.watch(
            SILENT,
            lambda: dead_mans_switch.last_sign(homes, str(pod.home / "proc")),
            lambda: pod.delete("switch"),
            lambda: pod.now,
            pod.sleep,
            lambda begun: dead_mans_switch.read_limits(homes, "boot-1", begun, known),
        ),
    )


def limit_of(phase: str, killed: set[str]) -> float:
    """When the pod is to be gone, within LATE; NEVER if nobody is left who knows of it."""
    at, left = PHASES[phase], {"supervisor", "watchdog", "switch"} - killed
    if "controller" not in killed:
        return RECORDED
    if phase == "creating":
        return CREATED + SILENT if "switch" in left else NEVER
    if phase == "setting up":
        return at + IDLE if left - {"supervisor"} else NEVER
    is_silent = "program" in killed or left == {"switch"}  # which sees heartbeats and not the program
    ended = at if is_silent else SAVED if phase != "running" else NEVER
    return min(LIMIT, ended + IDLE) if left else NEVER


KILLED = [each for size in range(len(GUARDS) + 1) for each in itertools.combinations(GUARDS, size)]


CASES = [
    pytest.param(phase, clock, marks=() if clock == "right" or phase == "running" else pytest.mark.deep)
    for phase, clock in itertools.product(PHASES, CLOCKS)
]


@pytest.mark.parametrize(("phase", "clock"), CASES)
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
            pod.run(SILENT + 1000.0)
            for name in GUARDS:
                pod.kill(name)
            limit, what = limit_of(phase, {*killed}), (killed, phase, clock, pod.deleted)
            if limit == NEVER:
                assert pod.deleted == [], "what the page says of all dead at once"
                continue
            assert pod.deleted, what
            latest = (BUDGET if limit == LIMIT else limit) + LATE
            assert limit - watchdog.MAX_POLL_SECONDS <= pod.deleted[0][0] <= latest, what


def test_no_guard_takes_a_pod_for_idle_before_it_can_have_seen_a_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least idle time that a config may have, and nobody left but the supervisor of a program and the switch."""
    [least] = [bound.ge for bound in Cleanup.model_fields["idle_minutes"].metadata if hasattr(bound, "ge")]
    monkeypatch.setattr(f"{__name__}.IDLE", 60 * least)
    pod = Pod(tmp_path, monkeypatch, CLOCKS["right"])
    begin(pod)
    pod.run(1.0)
    monkeypatch.setattr(watchdog, "_spawn_if_dead", lambda agent: None)
    for name in ("controller", "watchdog"):
        pod.kill(name)
    pod.run(LIMIT - 1.0)
    assert pod.deleted == []
    pod.run(SILENT)
    for name in GUARDS:
        pod.kill(name)
    [(when, who)] = pod.deleted
    assert LIMIT <= when <= LIMIT + LATE
    assert who == "switch"


def test_what_is_left_survives_a_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each boot has its own clock: only the seconds that are left go from one to the next."""
    pod = Pod(tmp_path, monkeypatch, CLOCKS["right"])
    begin(pod)
    pod.run(1.0)
    for name in ("controller", "supervisor"):
        pod.kill(name)
    pod.run(400.0)
    for name in GUARDS:
        pod.kill(name)
    assert pod.deleted == []
    order = json.loads((tmp_path / ".slipway" / "watchdog.json").read_bytes())
    assert LIMIT - 400.0 <= order["seconds_left"] <= LIMIT - 400.0 + 75.0
    until, idle = dead_mans_switch.read_limits([str(tmp_path)], "boot-2", 5.0, {})
    assert (until, idle) == (5.0 + order["seconds_left"], IDLE)


def test_the_supervisor_looks_until_the_end_is_on_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A watchdog that is killed during the upload of the log is started again too."""
    seen = list[str]()

    def keep(over: threading.Event) -> None:
        over.wait(60)
        seen.append("the last look")

    done: dict[str, Callable[..., Any]] = {
        "attempt_folder": lambda run_id, attempt: tmp_path / f"attempt-{attempt}",
        "finalize_attempt": lambda folder, how, before_masking: seen.append("on record") or {},
        "keep_heartbeat": keep,
        "_spawn_program": lambda *_: os.posix_spawn("/bin/true", ["true"], {}),
        "fence": lambda *_: threading.Event(),
        "process_identity": dict,
    }
    for name in ("venv_state", "check_out", "write_shell_file", "watch_notices", "send_signal", "kill_leftovers"):
        done[name] = lambda *_: "done"
    for name in ("run_environment", "secret_environment"):
        done[name] = lambda *_: {}
    for name, act in done.items():
        monkeypatch.setattr(supervisor, name, act)
    monkeypatch.setattr(supervisor.signal, "signal", lambda *_: None)
    order = dict.fromkeys(("code", "venv", "notice", "bucket", "log_object", "exit_object", "exit_hook", "argv"), "")
    order |= {
        "run_id": "r",
        "attempt": 1,
        "successor": "",
        "env": {},
        "defaults": {},
        "fence_seconds": 1.0,
        "trackers": [],
    }  # type: ignore[dict-item]
    supervisor.supervise(order, os.open(os.devnull, os.O_RDONLY))
    assert seen == ["on record", "the last look"]


def test_a_full_disk_ends_no_watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = Pod(tmp_path, monkeypatch, CLOCKS["right"])
    begin(pod)
    pod.run(1.0)
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
