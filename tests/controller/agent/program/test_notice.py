"""A notice that the VM goes away: heard of the metadata server, passed on to the program, put on record."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.controller.agent.bucket import Loopback
from tests.controller.agent.conftest import ProgramRun, wait_for

LISTENS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(600)
"""
WAITS = "import os, time\nprint('ready', flush=True)\nwhile not os.path.exists('../go'): time.sleep(0.02)"


@dataclass
class MetadataServer:
    """Hands out the keys of an instance; who waits for a change waits."""

    keys: dict[str, str] = field(default_factory=lambda: {"preempted": "FALSE", "maintenance-event": "NONE"})
    changed: threading.Condition = field(default_factory=threading.Condition)
    closed: bool = False

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.keys[key] = value
            self.changed.notify_all()


class Metadata(Loopback, BaseHTTPRequestHandler):
    server_: MetadataServer

    def do_GET(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        key, server = path.removeprefix("/computeMetadata/v1/instance/"), self.server_
        with server.changed:
            server.changed.wait_for(lambda: server.closed or server.keys[key] != query["last_etag"][0])
            content = server.keys[key]
        self.answer(200, content.encode(), ETag=content)


@pytest.fixture
def metadata(run: ProgramRun) -> Iterator[MetadataServer]:
    made = MetadataServer()
    with Metadata.serving(server_=made) as url:
        run.worker.extra_environment["GCE_METADATA_HOST"] = urlsplit(url).netloc
        yield made
        with made.changed:
            made.closed = True
            made.changed.notify_all()


def start(run: ProgramRun, script: str, **more: Any) -> None:
    run.start(script, **more)
    attempt = more.get("attempt", 1)
    wait_for(lambda: "ready" in run.state(attempt)["log_tail"])


def noticed(run: ProgramRun, attempt: int = 1) -> Any:
    path = run.folder / f"attempt-{attempt}/notice.json"
    return path.exists() and json.loads(path.read_bytes())["kind"]


def test_the_program_is_told_of_a_preemption_and_its_end_says_so(run: ProgramRun, metadata: MetadataServer) -> None:
    start(run, LISTENS, notice="SIGTERM")
    metadata.set("preempted", "TRUE")
    ended = run.wait_ended()
    assert (ended["code"], ended["notice"]) == (75, "preemption")
    assert {"notice": "preemption"} in run.worker.watch(run_id="run-1")


def test_a_program_that_did_not_ask_is_not_told(run: ProgramRun, metadata: MetadataServer) -> None:
    start(run, WAITS)
    metadata.set("preempted", "TRUE")
    wait_for(lambda: noticed(run))
    (run.folder / "go").touch()
    assert (run.wait_ended()["code"], run.state()["notice"]) == (0, "preemption")


def test_of_one_maintenance_one_program_hears(run: ProgramRun, metadata: MetadataServer) -> None:
    start(run, LISTENS, notice="SIGTERM")
    metadata.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    assert run.wait_ended()["notice"] == "maintenance"
    start(run, WAITS, notice="SIGTERM", attempt=2)
    metadata.set("maintenance-event", "NONE")
    wait_for(lambda: not (run.worker.root / "maintenance.json").exists())
    assert not noticed(run, 2)
    metadata.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    assert run.wait_ended(2)["notice"] == "maintenance"


def test_a_vm_that_shuts_down_tells_everybody(run: ProgramRun, metadata: MetadataServer) -> None:
    start(run, LISTENS)
    record = json.loads((run.folder / "attempt-1/pid.json").read_bytes())
    os.kill(record["supervisor"]["pid"], signal.SIGTERM)
    ended = run.wait_ended()
    assert (ended["code"], ended["notice"]) == (75, "shutdown")
