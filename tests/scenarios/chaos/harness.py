"""One schedule of misfortune against the whole of Slipway, and everything that must be true afterwards."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import psutil

from controller import emulator
from controller.cli import main
from controller.config.compose import compose
from controller.emulator import Emulator
from controller.localcloud.vms.processes import MARKER
from controller.resources.pod.capacity_log import capacity_file
from tests.controller.conftest import comparable_state
from tests.paths import ROOT
from tests.planes import pods
from tests.scenarios.chaos.fault_schedule import Spec
from tests.scenarios.chaos.hurried import use_fast_clock

LOCAL = ("cloud=local",)
MAX_ATTEMPTS = 12
"""How often `up` may give up, as documented, and be told to go on."""
FINAL_EXIT_CODES = frozenset({2, 5, 6})
"""Google refuses or cannot be reached when it begins; a budget is spent."""
EXPECTED_REFUSALS = re.compile("An internal error|UNREACHABLE|Too many requests|currently unavailable|Scripted fault")
"""What the schedule has Google say; any other reason to refuse is a mistake of ours."""
SIGKILL_EXIT_CODE = -9
CAPACITY_FILE = capacity_file(Path()).name


@dataclass
class ChaosResult:
    """How a schedule went: the exit code of each `up`, what it said, and what the run left in the bucket."""

    exit_codes: list[int]
    output: str
    results: dict[str, bytes]
    state: dict[str, Any]
    faults: list[Spec]


@dataclass
class ChaosHarness:
    """Where schedules are tried: a state folder, a repository to stand in, and an emulated cloud that stays awake."""

    folder: Path
    overrides: Sequence[str]
    keep_patterns: Sequence[str]
    """Parts of the names of objects that must be the same as in an undisturbed run."""
    run_emulator_verb: Callable[..., tuple[int, str]]
    last_request: int = 0
    _cloud: Emulator | None = None

    def __post_init__(self) -> None:
        self._repository = self.folder / "repository"
        self._repository.mkdir()
        shutil.copy(Path(__file__).with_name("counter.py"), self._repository)
        self._cloud_running = contextlib.ExitStack()
        self._cloud_running.enter_context(emulator.mark_in_use(self.state))  # so that no `up` puts it to sleep

    @property
    def state(self) -> Path:
        return emulator.state_folder(str(self.folder / "home"))

    def close(self) -> None:
        """Whatever runs there ends."""
        self._cloud_running.close()
        self.run_emulator_verb(["wipe"], self.state)

    def run_slipway(self, verb: str, *more: str, jump: int = 0, apart: bool = False) -> tuple[int, str]:
        """Exit code, and stdout and stderr together; `apart`: in a process of its own, which may be killed."""
        words, said = [verb, *more, *self.overrides, *LOCAL], io.StringIO()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLIPWAY_HOME": str(self.folder / "home")}
        if apart:
            script = self.folder / "slipway"  # the fault kills only a process of that name
            script.write_text("import runpy\nrunpy.run_module('tests.scenarios.chaos.hurried', run_name='__main__')\n")
            command = [sys.executable, str(script), str(jump), *words]
            where: Any = {"cwd": self._repository, "env": environment}
            done = subprocess.run(command, **where, capture_output=True, text=True, timeout=300, check=False)
            return done.returncode, done.stdout + done.stderr
        with (
            use_fast_clock(jump),
            mock.patch("controller.connect.ensure_running", return_value=self.cloud()),
            mock.patch.dict(os.environ, environment),
            contextlib.chdir(self._repository),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            code = main.run(words)
        return code, said.getvalue()

    def cloud(self) -> Emulator:
        """It is started once, and again should it have ended."""
        if self._cloud is None or not (self._cloud.state / "endpoint.json").exists():
            self._cloud = self._start_cloud()
        return self._cloud

    def _start_cloud(self) -> Emulator:
        config = compose(["program=command", "program.command=[ls]", *LOCAL])[0]
        assert config is not None
        with mock.patch.object(emulator, "run_emulator_verb", self.run_emulator_verb):
            return emulator.ensure_running(config.cloud, str(self.folder / "home"))  # pyright: ignore[reportArgumentType]

    @cached_property
    def run_undisturbed(self) -> ChaosResult:
        """With what schedules are compared."""
        return self.run(())

    def run(self, faults: Sequence[Spec], jump: int = 0) -> ChaosResult:
        """The schedule, to its end; the cloud is as empty afterwards as before, or this fails."""
        for memory in (self.folder / "home").rglob(CAPACITY_FILE):
            memory.unlink()  # where earlier schedules found capacity would decide which plane is asked first
        cloud, apart = self.cloud(), any(fault["kind"] == "controller_killed" for fault in faults)
        codes, said = [], ""
        # A script is told once per run: `up` may start anew, and nothing strikes twice.
        cloud.post("faults", {"key": json.dumps(faults), "faults": list(faults)})
        while not codes or codes[-1] != 0:
            code, words = self.run_slipway("up", jump=jump, apart=apart)
            codes.append(code)
            said += f"\n=== up: {code}\n{words}"
            assert code in {0, SIGKILL_EXIT_CODE, *FINAL_EXIT_CODES}, said
            assert code != 2 or EXPECTED_REFUSALS.search(words), said
            assert len(codes) <= MAX_ATTEMPTS, said
        state = cloud.get("state")
        cloud.delete("faults")  # what still lasts is not to meet us as well
        results = {
            name: self.read_object(cloud, bucket, name) for bucket, all_ in state["objects"].items() for name in all_
        }
        requests = [r for r in cloud.requests() if r["seq"] > self.last_request]
        self.last_request = max((r["seq"] for r in requests), default=self.last_request)
        met = [{**fault["spec"], "struck": fault["struck"]} for fault in state["fault"].values()]
        assert not state["mistake"], f"{state['mistake']}\n{said}"
        assert live_processes(cloud.state) == [], said
        assert pods(state) == {}, said
        assert_one_attempt_at_a_time(requests, said)
        code, words = self.run_slipway("down", "--all", "--yes")
        assert code == 0, said + words
        return ChaosResult(codes, said, results, comparable_state(cloud.get("state")), met)

    def final_results(self, ended: ChaosResult) -> dict[str, bytes]:
        """The final parameters."""
        return {
            name: content for name, content in ended.results.items() if any(part in name for part in self.keep_patterns)
        }

    @staticmethod
    def read_object(cloud: Emulator, bucket: str, name: str) -> bytes:
        url = f"{cloud.url}/t/{cloud.token}/storage/v1/b/{bucket}/o/{quote(name, safe='')}?alt=media"
        with urllib.request.urlopen(url) as answer:
            return answer.read()


def live_processes(cloud: Path) -> list[str]:
    """The processes of all workers of an emulated cloud."""
    ours = f"{cloud}:"
    return [
        " ".join(p.info["cmdline"] or [])
        for p in psutil.process_iter(["environ", "cmdline", "status"])
        if (p.info["environ"] or {}).get(MARKER, "").startswith(ours) and p.info["status"] != psutil.STATUS_ZOMBIE
    ]


def assert_one_attempt_at_a_time(requests: Sequence[dict[str, Any]], said: str) -> None:
    """By what the programs wrote: nothing of an attempt comes after a later one has begun."""
    beats = re.compile(r"/beats/\d+-(\d+)-\d+$")
    found = [beats.search((r["body"] or {}).get("name", "")) for r in requests if isinstance(r["body"], dict)]
    attempts = [int(match[1]) for match in found if match]
    assert attempts == sorted(attempts), f"{attempts}\n{said}"
