"""What is recorded of a request and what the last scan refuses to keep; a limit interrupts once, in its block."""

import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httplib2
import pytest

from controller.core.errors import ConfigError
from controller.core.json_documents import FormatError
from controller.core.this_process import Clock
from controller.run.options import RunOptions
from controller.witness import drill
from controller.witness.drill import TimeLimit, ended_in_order, shielded
from controller.witness.recording import (
    README,
    REQUESTS,
    RecordedConnection,
    Recording,
    RequestLine,
    Stage,
    load,
    without_repeats,
)
from controller.witness.stand_ins import StandIns
from tests.golden import golden

LINE = RequestLine.from_json(golden("witness_request"))
STAGE = Stage("preempt", 30.0, 9.5, "ok", "", ["the node is gone"])


class Wire:
    """A connection that answers what it is told."""

    def __init__(self, status: int = 200, content: bytes = b"{}", **headers: str) -> None:
        self.status, self.content, self.headers = status, content, headers
        self.follow_redirects = True

    def request(self, uri: str, **options: Any) -> tuple[httplib2.Response, bytes]:
        return httplib2.Response({"status": str(self.status), **self.headers}), self.content


@pytest.fixture
def made(tmp_path: Path) -> Recording:
    stand_ins = StandIns()
    stand_ins.add("project", "lab-anna-412345")
    return Recording(tmp_path / "recorded", Clock(), stand_ins)


def send(made: Recording, wire: Any, uri: str, **options: Any) -> RequestLine:
    http = RecordedConnection(wire, made, "tpu.x.get", "https://tpu.googleapis.com/")
    assert http.follow_redirects
    http.request(uri, **options)
    return made.requests[-1]


def test_documents_are_what_their_golden_files_say() -> None:
    assert (LINE.number, LINE.answer_bytes, LINE.to_json()) == (3, 27, golden("witness_request"))
    assert STAGE.to_json() == golden("witness_stage")
    with pytest.raises(FormatError):
        RequestLine.from_json(golden("witness_request") | {"format": 2})


def test_a_request_is_recorded_without_its_token(made: Recording) -> None:
    headers = {"Authorization": "Bearer ya29.secretsecret", "content-type": "application/json", "X-Other": "x"}
    wire = Wire(403, b'{"error": {"code": 403}}', **{"retry-after": "7", "set-cookie": "c"})
    uri = "https://tpu.googleapis.com/v2/projects/lab-anna-412345?a=1&a=2&upload_id=SECRET&alt=json"
    line = send(made, wire, uri, method="POST", body='{"n": 1}', headers=headers)
    assert (line.method, line.path) == ("POST", "v2/projects/lab-anna-412345")
    assert line.query == {"a": "1,2", "alt": "json"}
    assert line.headers == {"content-type": "application/json"}
    assert (line.body, line.body_bytes, line.status) == ({"n": 1}, 8, 403)
    assert line.answer == {"error": {"code": 403}}
    assert line.answer_headers == {"retry-after": "7"}


def test_the_content_of_objects_is_not_recorded(made: Recording) -> None:
    line = send(made, Wire(200, b'{"secret": 1}'), "https://tpu.googleapis.com/o?alt=media")
    assert (line.answer, line.answer_bytes) == (None, 13)
    body = (
        b'--b\r\nContent-Type: application/json\r\nMIME-Version: 1.0\r\n\r\n{"name": "x"}\r\n'
        b"--b\r\nContent-Type: application/octet-stream\r\n\r\nprivate\r\n--b--"
    )
    uploaded = {"content-type": 'multipart/related; boundary="b"'}
    line = send(made, Wire(), "https://tpu.googleapis.com/upload", method="POST", body=body, headers=uploaded)
    assert line.body == {"name": "x"}
    assert line.body_bytes == len(body)


def test_files_are_private_and_scrubbed(made: Recording) -> None:
    send(made, Wire(200, b'{"mail": "anna@lab.edu", "n": "lab-anna-412345"}'), "https://tpu.googleapis.com/v2")
    made.begin("tpu_api: plan")
    made.note("near anna@lab.edu")
    made.begin("tpu_api: up")
    made.end("failed", "refused for anna@lab.edu at 34.1.2.3")
    made.facts["cloud"] = "local"
    assert made.save("\nno difference\n") == []
    assert {file.stat().st_mode & 0o777 for file in made.folder.iterdir()} == {0o600}
    assert sorted(file.name for file in made.folder.iterdir()) == [README, REQUESTS]
    everything = "".join(file.read_text() for file in made.folder.iterdir())
    assert "anna@lab.edu" not in everything
    assert "lab-anna" not in everything
    told = (made.folder / README).read_text()
    assert "| tpu_api: up | failed |" in told
    assert "refused for person-1@example.com at 192.0.2.1" in told
    assert told.endswith("no difference\n")
    about, [line] = load(made.folder / REQUESTS)
    assert line.answer == {"mail": "person-1@example.com", "n": "project-1"}
    assert about["answers_by"] == "the emulated cloud, NOT Google"
    assert [(stage["name"], stage["outcome"]) for stage in about["stages"]] == [
        ("tpu_api: plan", "ok"), ("tpu_api: up", "failed"),
    ]  # fmt: skip


def test_a_file_that_still_holds_a_secret_is_deleted(made: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    made.facts["system"] = "of lab-anna-412345"
    scrub = made.stand_ins.scrub

    def careless(value: Any) -> Any:
        return value if isinstance(value, dict) and "stages" in value else scrub(value)

    monkeypatch.setattr(made.stand_ins, "scrub", careless)
    [refused] = made.save()
    assert refused == f"{REQUESTS} was deleted: it still held what project-1 stands for"
    assert [file.name for file in made.folder.iterdir()] == [README]


def test_of_equal_answers_in_a_row_the_first_and_the_last_are_kept() -> None:
    def got(number: int, path: str, answer: Any, method: str = "GET") -> RequestLine:
        values: Any = {**LINE.to_json(), "number": number, "path": path, "answer": answer, "method": method}
        return RequestLine.from_json(values)

    polls = [got(n, "a", {"done": n > 4}) for n in range(7)]
    others = [got(10, "b", 1), got(11, "b", 1), *(got(n, "b", 1, "DELETE") for n in (12, 13, 14))]
    lines = [polls[0], others[0], *polls[1:], *others[1:]]
    assert [line.number for line in without_repeats(lines)] == [0, 10, 4, 5, 6, 11, 12, 13, 14]


def test_requests_are_recorded_only_inside_the_block_and_broken_ones_too(made: Recording) -> None:
    client: Any = SimpleNamespace(
        wrap_connection=lambda http, method_id: http, root=lambda api: f"https://{api}.googleapis.com/"
    )
    wire = Wire()
    with made.recorded(client):
        client.wrap_connection(wire, "tpu.x.get").request("https://tpu.googleapis.com/v2/a")
    client.wrap_connection(wire, "tpu.x.get").request("https://tpu.googleapis.com/v2/b")
    assert [line.path for line in made.requests] == ["v2/a"]

    def broken(*_: object, **__: object) -> Any:
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        send(made, SimpleNamespace(request=broken, follow_redirects=True), "https://tpu.googleapis.com/v2")
    assert (made.requests[-1].status, made.requests[-1].error) == (0, "ConnectionResetError: gone")


def test_the_time_limit_and_stop_interrupt_once_and_not_after_the_block() -> None:
    calls: list[str] = []
    with TimeLimit(3600, lambda: calls.append("x")) as limit:
        limit.stop("first")
        limit.stop("second")
    assert (limit.reason, calls) == ("first", ["x"])
    with TimeLimit(3600, lambda: calls.append("y")) as late:
        pass
    late.stop("too late")
    assert (late.reason, calls) == ("", ["x"])
    interrupted = threading.Event()
    with TimeLimit(0.001, interrupted.set) as limit:
        assert interrupted.wait(240)
    assert limit.reason == "the limit of 1.66667e-05 minutes is reached"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_is_like_ctrl_c(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, getattr(sys, stream))  # puts it back

    def work() -> None:
        with ended_in_order():
            os.kill(os.getpid(), number)
            threading.Event().wait(240)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(number) is before
    if number == signal.SIGHUP:
        assert sys.stdout.name == os.devnull
        sys.stdout.close()


def test_the_clean_up_answers_one_ctrl_c_and_obeys_the_second() -> None:
    said: list[str] = []

    def clean_up() -> None:
        with shielded(said.append):
            signal.raise_signal(signal.SIGINT)
            assert len(said) == 1
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        clean_up()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_plane_without_the_tpu_is_left_out(home: Path) -> None:
    def planes(*words: str, plane: str = "both") -> dict[str, str]:
        found = drill.drill_options(RunOptions(overrides=("cloud=local", *words)), drill.Limits(), plane)
        return {name: options.cloud_config().tpu.accelerator_type for name, options in found.items()}

    assert planes() == {"tpu_api": "v5litepod-1", "compute_engine": "v6e-1"}
    assert planes(plane="compute_engine") == {"compute_engine": "v6e-1"}
    assert planes("tpu=v6e_4") == {"tpu_api": "v6e-4", "compute_engine": "v6e-4"}
    assert planes("tpu=v4_8") == {"tpu_api": "v4-8"}
    with pytest.raises(ConfigError, match="--plane compute_engine: has no v4-8"):
        planes("tpu=v4_8", plane="compute_engine")
