"""The watchdog on a worker: when it deletes the pod, what it asks of whom, and that there is one of it."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from controller.agent.watchdog import deletion_reason, keep_watchdog, ssh_sessions
from controller.agent.worker_processes import is_alive
from tests.controller.agent.conftest import AgentWorker, ProgramRun, wait_for
from tests.fakes.loopback import Loopback

QUEUED, NODE = "projects/p/locations/z/queuedResources/pod?force=true", "projects/p/locations/z/nodes/pod"


class Apis(Loopback, BaseHTTPRequestHandler):
    """The metadata server and the two APIs that the watchdog asks; `refuse` is the status of a DELETE."""

    asked: list[tuple[str, str, str | None]]
    refuse: dict[str, int]

    def do_GET(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        self._say(200, {"access_token": "ya29.pod"})

    def do_POST(self) -> None:
        self.asked.append(("POST", self.path, self.headers["Authorization"]))
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._say(200, {"permissions": ["tpu.nodes.delete"]})

    def do_DELETE(self) -> None:
        self.asked.append(("DELETE", self.path, self.headers["Authorization"]))
        self._say(self.refuse.get(self.path.removeprefix("/v2/"), 200), {})

    def _say(self, status: int, body: dict[str, Any]) -> None:
        self.answer(status, json.dumps(body).encode())


@dataclass
class Asked:
    """What the watchdog has asked of whom, and what is refused."""

    url: str = ""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    refuse: dict[str, int] = field(default_factory=lambda: {QUEUED: 404})

    def deleted(self) -> list[str]:
        return [path.removeprefix("/v2/") for verb, path, _ in self.asked if verb == "DELETE"]


@pytest.fixture
def apis(worker: AgentWorker) -> Iterator[Asked]:
    made = Asked()
    with Apis.serving(asked=made.asked, refuse=made.refuse) as made.url:
        worker.extra_environment["GCE_METADATA_HOST"] = made.url.removeprefix("http://").rstrip("/")
        yield made
        record = worker.root / "watchdog-pid.json"
        if record.exists() and is_alive(json.loads(record.read_bytes())):
            os.killpg(json.loads(record.read_bytes())["pid"], signal.SIGKILL)


def order(apis: Asked, **changed: Any) -> dict[str, Any]:
    deletes = [f"{apis.url}v2/{path}" for path in (QUEUED, NODE)]
    given = {"project": "p", "deletes": deletes, "delete_permission": "tpu.nodes.delete", "projects_api": apis.url}
    return {**given, "bucket": "b", "note_object": "pods/pod/ends/1.json", **changed}


def test_a_pod_that_nobody_uses_deletes_itself_and_says_why(worker: AgentWorker, apis: Asked) -> None:
    state = worker.call("set_watchdog", **order(apis, idle_seconds=0.4))
    assert state == {"running": True, "idle_seconds": 0.4, "seconds_left": None, "refused": None, "allowed": True}
    wait_for(lambda: NODE in apis.deleted())
    assert apis.deleted()[:2] == [QUEUED, NODE]
    assert {token for _, _, token in apis.asked} == {"Bearer ya29.pod"}
    note = json.loads(worker.bucket.objects["pods/pod/ends/1.json"])
    assert note["reason"].startswith("no program and no SSH session for 0.00")


def test_a_pod_whose_time_is_up_deletes_itself_though_a_program_runs(run: ProgramRun, apis: Asked) -> None:
    run.start("import time; time.sleep(600)")
    run.worker.call("set_watchdog", **order(apis, seconds_left=0.0))
    wait_for(lambda: NODE in apis.deleted())
    assert apis.deleted()[:2] == [QUEUED, NODE]


def test_a_pod_with_a_program_is_not_idle(run: ProgramRun, apis: Asked) -> None:
    run.start("import time, pathlib; p = pathlib.Path('../go')\nwhile not p.exists(): time.sleep(0.05)")
    run.worker.call("set_watchdog", **order(apis, idle_seconds=0.2))
    heartbeat = run.worker.root / "heartbeat"  # the dead man's switch of the pod looks at it
    for _ in range(6):  # looks, a quarter of the idle time apart
        heartbeat.unlink(missing_ok=True)
        wait_for(heartbeat.exists)
    assert apis.deleted() == []
    (run.folder / "go").touch()
    wait_for(lambda: NODE in apis.deleted())


def test_there_is_one_and_it_takes_new_orders(worker: AgentWorker, apis: Asked) -> None:
    assert not (worker.root / "heartbeat").exists()
    assert worker.call("watchdog_state")["running"] is False
    assert (worker.root / "heartbeat").exists(), "every command writes it"
    worker.call("set_watchdog", **order(apis, idle_seconds=3600.0))
    first = (worker.root / "watchdog-pid.json").read_bytes()
    state = worker.call("set_watchdog", **order(apis, seconds_left=7200.0))
    assert (worker.root / "watchdog-pid.json").read_bytes() == first
    assert state["idle_seconds"] is None
    assert 7100 < state["seconds_left"] <= 7200
    worker.boot_id = "boot-2"
    assert worker.call("watchdog_state")["running"] is False


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # it outlives the process that started it
def test_a_killed_one_is_started_again_by_whoever_looks_after_it(
    worker: AgentWorker, apis: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.call("set_watchdog", **order(apis, idle_seconds=3600.0, seconds_left=3600.0))
    first = json.loads((worker.root / "watchdog-pid.json").read_bytes())
    for name, value in worker.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", [str(worker.agent.with_name("agent-of-another-version.pyz")), "supervise"])
    keep_watchdog()
    assert json.loads((worker.root / "watchdog-pid.json").read_bytes()) == first, "it lives"
    os.kill(first["pid"], signal.SIGKILL)
    wait_for(lambda: not is_alive(first))
    keep_watchdog()
    again = json.loads((worker.root / "watchdog-pid.json").read_bytes())
    assert again["pid"] != first["pid"]
    assert again["agent"] == first["agent"]
    state = worker.call("watchdog_state")
    assert (state["running"], state["idle_seconds"]) == (True, 3600.0)
    assert 3500 < state["seconds_left"] <= 3600


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"format": 1}', '{"format": 2}', '{"format": 1, "boot_id": "boot-1"}']
)
def test_damaged_orders_end_no_supervisor(text: str, worker: AgentWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker.environment.items():
        monkeypatch.setenv(name, value)
    (worker.root / "watchdog.json").write_text(text)
    keep_watchdog()
    assert not (worker.root / "watchdog-pid.json").exists(), "nothing is started by them"


@pytest.mark.parametrize("name", ["watchdog.json", "watchdog-pid.json"])
def test_a_damaged_file_looks_like_a_dead_one_which_new_orders_start(
    name: str, worker: AgentWorker, apis: Asked
) -> None:
    (worker.root / name).write_text("{")
    assert worker.call("watchdog_state")["running"] is False
    assert worker.call("set_watchdog", **order(apis, idle_seconds=3600.0))["running"] is True


@pytest.mark.parametrize("off", [7200.0, -7200.0])
def test_a_wrong_clock_ends_nothing_and_prolongs_nothing(off: float, worker: AgentWorker, apis: Asked) -> None:
    clock = worker.home / "clock"
    worker.extra_environment["SLIPWAY_CLOCK"] = str(clock)
    clock.write_text("0")
    worker.call("set_watchdog", **order(apis, idle_seconds=600.0, seconds_left=1800.0))
    clock.write_text(str(off))
    state = worker.call("watchdog_state")
    assert 1700 < state["seconds_left"] <= 1800
    assert apis.deleted() == []
    limits = json.loads((worker.root / "watchdog.json").read_bytes())
    assert limits["boot_id"] == worker.boot_id
    assert limits["until"] == pytest.approx(limits["asked"] + 1800.0)


def test_a_refusal_is_on_record(worker: AgentWorker, apis: Asked) -> None:
    apis.refuse[NODE] = 403
    worker.call("set_watchdog", **order(apis, seconds_left=0.0))
    refused = wait_for(lambda: worker.call("watchdog_state")["refused"])
    assert refused.startswith("HTTP 403")
    assert worker.call("set_watchdog", **order(apis, seconds_left=3600.0))["refused"] is None, "these are new orders"


def test_when_it_is_time() -> None:
    order: dict[str, Any] = {"idle_seconds": 60.0, "until": 1000.0}
    assert deletion_reason(order, 900.0, used=850.0) == ""
    assert deletion_reason(order, 920.0, used=850.0) == "no program and no SSH session for 1 minutes"
    assert deletion_reason(order, 1000.0, used=999.0) == "the run's budget is spent"
    assert deletion_reason({"idle_seconds": None, "until": None}, 1e9, used=0.0) == ""


def test_a_login_is_use(tmp_path: Path) -> None:
    titles = {1: "/sbin/init", 7: "sshd: /usr/sbin/sshd -D", 8: "sshd: me@pts/0", 9: "sshd-session: me@notty"}
    for pid, title in titles.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(title.encode() + b"\0")
    assert sorted(ssh_sessions(tmp_path)) == ["sshd-session: me@notty", "sshd: me@pts/0"]
