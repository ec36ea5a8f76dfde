"""What a running program says and is told: its lines and metrics, notices, its successor, and where it hangs."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from controller.agent import control as module
from controller.agent.attempts import SecretMask
from controller.agent.control import watch
from tests.controller.agent.conftest import ProgramRun, wait_for
from tests.fakes.loopback import Loopback

TALK = """
import os, json
for step in range(3):
    print(f"step {step} ☃")
    with open(os.environ["SLIPWAY_RUN_DIR"] + "/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "loss": float("nan")}) + "\\n")
"""


def text(lines: list[dict]) -> str:
    return "".join(line["log"] for line in lines if "log" in line)


def steps(lines: list[dict]) -> list[int]:
    return [line["metrics"]["step"] for line in lines if "metrics" in line]


def test_a_program_that_has_ended_is_told_from_any_place(run: ProgramRun) -> None:
    run.start(TALK)
    whole = "step 0 ☃\nstep 1 ☃\nstep 2 ☃\n"
    lines = run.worker.watch(run_id="run-1", attempt=1)  # while it runs
    assert (text(lines), steps(lines)) == (whole, [0, 1, 2])
    assert lines[-1]["end"] == run.wait_ended()
    first = next(line for line in lines if "metrics" in line)
    for offset, told in ((0, whole), (11, whole.encode()[11:].decode()), (len(whole.encode()), "")):
        again = run.worker.watch(run_id="run-1", log_offset=offset, metrics_offset=first["offset"])
        assert (text(again), steps(again)) == (told, [1, 2])
    for offset, told in ((-1, "step 2 ☃\n"), (-14, "step 1 ☃\nstep 2 ☃\n"), (-1000, whole)):  # from the end
        lines = run.worker.watch(run_id="run-1", log_offset=offset, metrics_offset=-1)
        assert (text(lines), steps(lines)) == (told, [2])
    metrics = run.folder / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    assert steps(run.worker.watch(run_id="run-1", metrics_offset=5000)) == [1], "they were written anew"
    metrics.write_text('{"step": 1}\nnonsense\n[1]\n' + "[" * 500 + "\n{")
    lines = run.worker.watch(run_id="run-1")
    assert steps(lines) == [1]
    warnings = [line["warning"] for line in lines if "warning" in line]
    assert [w.rpartition(" ")[2].strip() for w in warnings] == ["nonsense", "[1]", "[" * 200]
    assert "no attempt-4" in run.worker.call_error("watch", run_id="run-1", attempt=4)["error"]


def test_it_tells_what_is_there_while_the_program_goes_on(run: ProgramRun) -> None:
    script = "import os, time\nprint('one', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\nprint('two')"
    run.start(script)
    wait_for(lambda: run.state()["log_size"])
    lines = run.worker.watch(run_id="run-1", follow=False)
    assert text(lines) == "one\n"
    assert lines[-1]["end"]["state"] == "running"
    watching = run.worker.start_command("watch", run_id="run-1", log_offset=lines[0]["offset"])
    (run.folder / "work/go").write_text("")
    code, lines = run.worker.finish_command(watching)
    assert (code, text(lines), lines[-1]["end"]["code"]) == (0, "two\n", 0)


def test_who_watches_is_not_told_half_a_character(run: ProgramRun) -> None:
    script = (
        "import os, sys, time\n"
        "for byte in 'é☃🙂'.encode():\n"
        "    os.write(1, bytes([byte]))\n"
        "    time.sleep(0.05)\n"
        "os.write(1, b'\\xf0\\x9f')"
    )
    run.start(script)
    assert text(run.worker.watch(run_id="run-1")) == "é☃🙂\N{REPLACEMENT CHARACTER}"


def test_a_lost_supervisor_ends_the_watch(run: ProgramRun) -> None:
    run.start("import time; time.sleep(600)")
    watching = run.worker.start_command("watch", run_id="run-1")
    for who in ("supervisor", "program"):
        os.kill(json.loads((run.folder / "attempt-1/pid.json").read_bytes())[who]["pid"], signal.SIGKILL)
    code, lines = run.worker.finish_command(watching)
    assert (code, lines[-1]["end"]["error"]) == (0, "supervisor lost")


def test_a_watch_ends_with_who_watches(run: ProgramRun) -> None:
    run.start("import time\nwhile True: print('x' * 10000, flush=True); time.sleep(0.02)")
    watching = run.worker.start_command("watch", run_id="run-1")
    assert watching.stdout
    watching.stdout.read(1)
    watching.stdout.close()
    watching.stdout = None
    assert watching.communicate()[1] == b""
    assert watching.returncode == 0


def test_it_gives_a_sign_of_life(
    run: ProgramRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(run.worker.home))
    monkeypatch.setenv("SLIPWAY_BOOT_ID", run.worker.boot_id)
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.0)
    run.start("import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)")

    def beats(seconds: float) -> None:
        if "heartbeat" in capsys.readouterr().out:
            (run.folder / "work/go").write_text("")

    monkeypatch.setattr(module.time, "sleep", beats)
    watch("run-1")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["end"]["code"] == 0


def test_a_long_log_comes_in_short_lines_and_whole(run: ProgramRun) -> None:
    """A controller holds some lines of every worker in its memory."""
    run.start("print('x' * 99 + chr(0x2603))\nprint('y' * 400_000)")
    run.wait_ended()
    lines = [line["log"] for line in run.worker.watch(run_id="run-1") if "log" in line]
    assert "".join(lines) == "x" * 99 + "☃\n" + "y" * 400_000 + "\n"
    assert max(len(line.encode()) for line in lines) <= 128 << 10


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


NEXT = "runs/run-1/launches/0002.json"
SAVES = """
import os, signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: Path(os.environ["SLIPWAY_RUN_DIR"], "saved").touch())
print("up", flush=True)
while True: time.sleep(0.05)
"""


def test_the_record_of_the_next_attempt_ends_this_one_without_a_last_save(run: ProgramRun) -> None:
    bucket = run.worker.bucket
    where = {"bucket": "b", "log_object": "log", "exit_object": "exit.json"}
    run.start(SAVES, **where, successor=NEXT, fence_seconds=0.05)
    wait_for(lambda: bucket.requests.count(f"GET {NEXT}") > 2)
    bucket.faults = [400, 400]  # a lookup that fails says nothing
    wait_for(lambda: not bucket.faults)
    assert run.state()["state"] == "running"
    bucket.objects[NEXT] = b"{}"
    end = run.wait_ended()
    assert (end["state"], end["signal"], end["error"]) == (
        "exited", "SIGKILL", "a later attempt has replaced this one",
    )  # fmt: skip
    assert not (run.folder / "saved").exists()
    assert b"a later attempt has replaced this one" in bucket.objects["exit.json"]


SLEEPS = "import time\ndef wait_for_ever():\n    print('ready', flush=True)\n    time.sleep(600)\nwait_for_ever()"
DUMPS = f"import faulthandler, signal\nfaulthandler.register(signal.SIGQUIT)\n{SLEEPS}"


def wait_ready(run: ProgramRun) -> None:
    wait_for(lambda: "ready" in run.state()["log_tail"])


def test_who_listens_tells_and_goes_on_also_when_it_is_stopped(run: ProgramRun) -> None:
    run.start(DUMPS)
    wait_ready(run)
    told = run.worker.call("stacks", run_id="run-1")
    assert "in wait_for_ever" in told["text"]
    assert [process["signal"] for process in told["processes"]] == ["SIGQUIT"]
    assert run.state()["state"] == "running"
    os.kill(told["processes"][0]["pid"], signal.SIGSTOP)
    told = run.worker.call("stacks", run_id="run-1")
    assert told["processes"][0]["state"].startswith("T")
    assert "in wait_for_ever" in told["text"]


def test_any_python_tells_while_it_is_aborted(run: ProgramRun) -> None:
    run.start(SLEEPS)
    wait_ready(run)
    told = run.worker.call("stacks", run_id="run-1")
    assert "in wait_for_ever" in told["text"]
    assert run.wait_ended()["signal"] == "SIGABRT"


def test_what_does_not_listen_is_left_alone(run: ProgramRun) -> None:
    assert run.worker.call("stacks", run_id="run-1") == {"processes": [], "text": ""}
    run.start("", argv=["sleep", "600"])
    told = run.worker.call("stacks", run_id="run-1")
    assert [(process["name"], process["signal"]) for process in told["processes"]] == [("sleep", None)]
    assert run.state()["state"] == "running"


SECRET = "hf_abcdefghij"
PRINT = "import os, sys, time; print('token', os.environ['HF_TOKEN'], 'end', flush=True)"


def test_the_program_sees_them_and_nothing_else_does(run: ProgramRun) -> None:
    script = f"import json, os; json.dump(dict(os.environ), open('../seen', 'w')); {PRINT}"
    netrc = "machine api.example.com login me password sesame-open\n"
    order = run.start_payload(
        script + "; print(open(os.environ['NETRC']).read())", bucket="b", log_object="l", exit_object="e"
    )
    run.worker.call("start", **order, secrets={"HF_TOKEN": SECRET, "NETRC": netrc})
    end = run.wait_ended()
    masked = f"token {'*' * len(SECRET)} end\nmachine api.example.com login me password {'*' * 11}\n\n"
    assert (end["code"], end["log_tail"]) == (0, masked)
    assert json.loads((run.folder / "seen").read_text())["HF_TOKEN"] == SECRET
    (run.folder / "seen").unlink()
    assert run.worker.bucket.objects["l"].decode() == masked
    left = [p for p in run.worker.home.rglob("*") if p.is_file() and not p.is_symlink() and p.suffix != ".pyz"]
    assert [p for p in left if SECRET.encode() in p.read_bytes() or b"sesame-open" in p.read_bytes()] == []
    assert not (run.folder / "secrets").exists()
    assert not (run.folder / "netrc").exists()


def test_while_it_lives_they_are_in_one_private_file_and_the_stream_is_masked(run: ProgramRun) -> None:
    line = "json.dumps({'step': 1, 'x': os.environ['HF_TOKEN']})"
    metrics = f"print({line}, file=open('../metrics.jsonl', 'w'), flush=True)"
    run.start(f"import json, os; {metrics}; {PRINT}; time.sleep(600)", secrets={"HF_TOKEN": SECRET})
    log, hidden = run.folder / "attempt-1/log", "*" * len(SECRET)
    wait_for(lambda: log.exists() and b"end" in log.read_bytes())
    assert (run.folder / "secrets").stat().st_mode & 0o777 == 0o600
    said = run.worker.watch(run_id=run.run_id, follow=False)
    assert "".join(line.get("log", "") for line in said) == f"token {hidden} end\n"
    assert [line["metrics"] for line in said if "metrics" in line] == [{"step": 1, "x": hidden}]
    assert SECRET not in run.state()["log_tail"]
    written = (log, run.folder / "metrics.jsonl")
    holding = [p for p in run.folder.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    assert [p for p in holding if p not in written] == [run.folder / "secrets"]
    run.worker.call("stop", run_id=run.run_id, grace_seconds=1)
    assert SECRET.encode() not in log.read_bytes()
    assert not (run.folder / "secrets").exists()


def test_the_files_that_slipway_reads_are_masked_too_and_a_second_start_brings_none_back(run: ProgramRun) -> None:
    script = "import json, os; json.dump({'x': os.environ['HF_TOKEN']}, open('../summary.json', 'w'))"
    run.start(script, secrets={"HF_TOKEN": SECRET})
    assert run.wait_ended()["summary"] == {"x": "*" * len(SECRET)}
    run.start(script, secrets={"HF_TOKEN": SECRET})
    assert not (run.folder / "secrets").exists()


def test_a_setup_sees_them_and_its_output_is_masked(run: ProgramRun) -> None:
    order = {"run_id": run.run_id, "key": "k", "code": run.code, "venv": "image", "secrets": {"HF_TOKEN": SECRET}}
    said = run.worker.call_error("run_setup", commands=[["sh", "-c", "echo $HF_TOKEN; exit 3"]], **order)
    assert SECRET not in json.dumps(said)
    assert "*" * len(SECRET) in said["detail"]
    assert not (run.folder / "secrets").exists()
    assert SECRET not in (run.folder / "setup.log").read_text()


@pytest.mark.parametrize("gap", [0, 1, (1 << 20) - 5, (1 << 20) + 1])
def test_a_mask_covers_every_place_and_moves_nothing(tmp_path: Path, gap: int) -> None:
    mask = SecretMask({"A": SECRET, "B": "line one\nline two", "C": "short"})
    content = b"x" * gap + SECRET.encode() + b"line two short" + SECRET.encode()
    (log := tmp_path / "log").write_bytes(content)
    assert mask.mask_file(log) == len(content)
    found = log.read_bytes()
    assert len(found) == len(content)
    assert SECRET.encode() not in found
    assert found.endswith(b"*" * 8 + b" short" + b"*" * len(SECRET))
    assert mask.apply(content) == found


def test_half_a_secret_waits_for_the_rest(tmp_path: Path) -> None:
    mask = SecretMask({"A": SECRET})
    (log := tmp_path / "log").write_text(f"said {SECRET[:5]}")
    assert mask.mask_file(log) == len("said ")
    assert mask.partial_length(b"said " + SECRET[:1].encode()) == 1
    assert mask.partial_length(b"said") == 0
    assert not SecretMask({"A": "tiny"})


def test_a_line_of_metrics_that_is_too_long_does_not_hold_up_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 40)
    file, long = tmp_path / "metrics.jsonl", b'{"step": 2, "text": "' + b"x" * 100
    for tail, told in (
        (b"", [1]),
        (b'"}', [1]),
        (b'"}\n{"step": 3}\n', [1, "left out", 3]),
        (b'"}\n{"step"', [1, "left out"]),
    ):
        file.write_bytes(b'{"step": 1}\n' + long + tail)
        offset = module._emit_metrics(file, 0, SecretMask({}))
        said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["metrics"]["step"] if "metrics" in line else line["warning"][-8:] for line in said] == told
        assert offset == (said[-1].get("offset") or len(b'{"step": 1}\n' + long) + 3)
