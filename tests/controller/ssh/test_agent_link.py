"""The agent: what it holds and needs; and a worker may answer anything, since programs can replace it there."""

import ast
import errno
import io
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import controller.agent
from controller import here as here
from controller.agent.__main__ import archive_of, remove_old_agents, unpack
from controller.agent.fs import dump
from controller.agent.protocol import OBSERVE, STATE, WATCH
from controller.here import LocalLink
from controller.ssh import agent_link, connection
from controller.ssh.agent_link import AgentLink, ConnectionParams, WorkerError, build_bundle
from controller.ssh.connection import Connection

PACKAGE = Path(controller.agent.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
FOR_ANOTHER_PYTHON = {"chip_check.py": {"jax", "numpy"}}
"""Programs that the agent runs with the Python of the run's venv, and what they import there."""


def observe(archive: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, archive, "observe"]
    environment = {"HOME": str(archive.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment)


def test_it_holds_the_whole_package_and_the_same_agent_gives_the_same_bytes_and_name() -> None:
    assert build_bundle() == build_bundle()
    assert build_bundle().name == f"agent-{build_bundle().sha256[:12]}.pyz"
    names = zipfile.ZipFile(io.BytesIO(build_bundle().content)).namelist()
    files = [f"slipway_agent/{path.relative_to(PACKAGE).as_posix()}" for path in SOURCES]
    assert sorted(names) == ["__main__.py", *files]


def test_it_is_unpacked_once_by_whoever_is_first_and_keeps_its_bytecode(tmp_path: Path) -> None:
    (archive := tmp_path / build_bundle().name).write_bytes(build_bundle().content)
    for process in [observe(archive) for _ in range(6)]:
        assert b'"boot_id"' in process.communicate()[0]
    assert {path.name for path in tmp_path.iterdir()} == {archive.name, archive.stem, ".slipway"}  # with the heartbeat
    assert list(archive.with_suffix("").glob("slipway_agent/__pycache__/dispatch.*.pyc"))
    assert not [path for path in archive.with_suffix("").rglob("*") if path.stat().st_mode & 0o077]


def test_the_shell_runs_what_was_unpacked_and_otherwise_the_archive(tmp_path: Path) -> None:
    """Also in a home whose name has a space; its processes are known by the name of the archive either way."""
    bundle, home = build_bundle(), tmp_path / "a home"
    (folder := home / ".slipway").mkdir(parents=True)
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def shell(command: str) -> subprocess.CompletedProcess[bytes]:
        argv, environment = ["/bin/sh", "-c", bundle.shell(command)], {"HOME": str(home), "PATH": python}
        return subprocess.run(argv, input=b'{"format": 1}', capture_output=True, env=environment)

    assert shell("watchdog_state").returncode == 2
    (archive := folder / bundle.name).write_bytes(bundle.content)
    for _ in range(2):
        done = shell("watchdog_state")
        assert (done.returncode, b'"running": false' in done.stdout) == (0, True), done.stderr
        (archive.with_suffix("") / "__main__.py").read_bytes()
        archive.write_bytes(b"not a zip file")  # and yet it runs the second time
    unpacked = archive.with_suffix("") / "__main__.py"
    assert archive_of(unpacked) == archive_of(archive) == archive


def test_it_runs_where_it_cannot_be_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (archive := tmp_path / build_bundle().name).write_bytes(build_bundle().content)
    monkeypatch.setattr(zipfile.ZipFile, "extractall", full)
    assert unpack(archive) == archive
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    assert unpack(archive) == archive
    assert [path.name for path in tmp_path.iterdir()] == [archive.name]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_it_needs_nothing_but_python_3_10(source: Path) -> None:
    """Neither newer syntax nor anything outside the standard library; newer functions only a 3.10 would find."""
    tree = ast.parse(source.read_text(), feature_version=(3, 10))
    there = sys.stdlib_module_names | FOR_ANOTHER_PYTHON.get(source.name, set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= there
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert (node.module or "").partition(".")[0] in there


def test_agents_of_other_versions_are_removed_once_nothing_uses_them(tmp_path: Path) -> None:
    ours, proc, long_ago = tmp_path / "agent-new.pyz", tmp_path / "proc", 1.0
    for version, time in {"new": long_ago, "old": long_ago, "busy": long_ago, "recent": None}.items():
        (tmp_path / f"agent-{version}.pyz").touch()
        (tmp_path / f"agent-{version}").mkdir()
        (tmp_path / f"agent-{version}" / "main.py").touch()
        for path in (tmp_path / f"agent-{version}.pyz", tmp_path / f"agent-{version}") if time else ():
            os.utime(path, (time, time))
    (tmp_path / ".agent-old.pyz.0a1b").touch()
    os.utime(tmp_path / ".agent-old.pyz.0a1b", (long_ago, long_ago))
    (tmp_path / "heartbeat").touch()
    os.utime(tmp_path / "heartbeat", (long_ago, long_ago))
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cmdline").write_bytes(b"python3\0/home/me/.slipway/agent-busy.pyz\0supervise\0")
    remove_old_agents(ours, tmp_path / "no-proc")
    assert (tmp_path / "agent-old").exists()
    remove_old_agents(ours, proc)
    left = {path.name for path in tmp_path.iterdir()} - {"proc"}
    kept = {f"agent-{version}{suffix}" for version in ("new", "busy", "recent") for suffix in ("", ".pyz")}
    assert left == kept | {"heartbeat"}


STATE_OF_1: dict[str, Any] = {
    "run_id": "r", "attempt": 1, "state": "exited", "code": 0, "signal": None, "started": 1, "ended": 2.5,
    "error": None, "oom_kills": 0, "free_gb": 1.0, "upload": "done", "upload_error": None, "notice": None,
    "log_size": 3, "log_tail": "end", "summary": {"loss": 1.0},
}  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


class Said(AgentLink):
    """A link whose agent has said this."""

    closed = False

    def __init__(self, *chunks: bytes, endless: Iterable[bytes] = ()) -> None:
        super().__init__(3, "10.0.0.3")
        self.chunks, self.taken = itertools.chain(chunks, endless), 0

    def _agent_output(self, command: str, payload: Mapping[str, Any], seconds: float) -> Iterator[bytes]:
        for chunk in self.chunks:
            self.taken += len(chunk)
            yield chunk

    def follow(self, shell: str, out: Callable[[bytes], object], err: Callable[[bytes], object]) -> int:
        raise NotImplementedError

    def close(self) -> None: ...


def test_what_the_agent_says_is_what_it_declares() -> None:
    said = dump(STATE_OF_1)
    assert Said(said[:7], said[7:]).call(STATE, {"run_id": "r"}) == STATE_OF_1
    lines = dump({"log": "a", "offset": 1}) + b"\n" + dump({"end": STATE_OF_1}) + b"\n"
    for size in (1, 5, len(lines)):
        pieces = [lines[i : i + size] for i in range(0, len(lines), size)]
        assert [*Said(*pieces).stream(WATCH, {"run_id": "r"})] == [{"log": "a", "offset": 1}, {"end": STATE_OF_1}]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        *(({"attempt": value}, "the answer.attempt is ") for value in ("1", None, 1.5, True, [1], {})),
        ({"log_tail": b"".hex}, "the answer.log_tail is dict"),
        ({"free_gb": "lots"}, "the answer.free_gb is str"),
        *(({"free_gb": value}, "the answer.free_gb is no finite number") for value in (10**400, math.nan, -math.inf)),
        ({"summary": [1]}, "the answer.summary is list"),
        ({"summary": {"a": json.loads("[" * 100 + "]" * 100)}}, "the answer.summary.a is nested too deeply"),
        ({"state": None}, "the answer.state is NoneType"),
    ],
)
def test_an_answer_of_other_types_names_the_part(change: dict[str, Any], problem: str) -> None:
    answer = {**STATE_OF_1, **{key: {} if callable(value) else value for key, value in change.items()}}
    with pytest.raises(WorkerError, match=rf"worker 3 .*`state` answered .*{problem}") as caught:
        Said(dump(answer)).call(STATE, {"run_id": "r"})
    assert caught.value.kind == "agent"
    with pytest.raises(WorkerError, match=r"`watch` answered .*the answer.end"):
        [*Said(dump({"end": answer}) + b"\n").stream(WATCH, {"run_id": "r"})]


def test_an_answer_that_lacks_something_names_it() -> None:
    for key in STATE_OF_1:
        with pytest.raises(WorkerError, match=f"the answer has no {key}"):
            Said(dump({k: v for k, v in STATE_OF_1.items() if k != key})).call(STATE, {"run_id": "r"})
    with pytest.raises(WorkerError, match=r"`observe` answered .*the answer has no active"):
        Said(dump({})).call(OBSERVE, {})


@settings(max_examples=20)
@given(st.one_of(JSON.map(lambda value: json.dumps(value).encode()), st.binary()))
def test_any_bytes_are_an_answer_or_an_error_of_that_worker(said: bytes) -> None:
    for command in (STATE, OBSERVE):
        with pytest.raises(WorkerError, match="worker 3"):
            Said(said).call(command, {})
    with pytest.raises(WorkerError, match="worker 3"):
        [*Said(said + b"\n").stream(WATCH, {})]


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from([*STATE_OF_1, "log", "metrics", "offset", "heartbeat", "end", "exited"]), JSON))
def test_lines_of_other_types_never_get_through(line: dict[str, Any]) -> None:
    try:
        [found] = Said(json.dumps({"format": 1, **line}).encode() + b"\n").stream(WATCH, {})
    except WorkerError:
        return
    assert isinstance(found.get("log", ""), str)
    assert isinstance(found.get("offset", 0), int)
    assert isinstance(found.get("metrics", {}), dict)
    json.dumps(found, ensure_ascii=False).encode()


def test_halves_of_surrogate_pairs_do_not_get_through() -> None:
    [line] = Said(b'{"format": 1, "log": "a\\ud83d", "metrics": {"\\udc00": "\\ud83d\\ude00"}}\n').stream(WATCH, {})
    assert line == {"log": "a?", "metrics": {"?": "\U0001f600"}}
    with pytest.raises(WorkerError) as caught:
        Said(b'{"format": 1, "error": "\\ud800", "detail": 5}').call(STATE, {})
    assert (caught.value.message, caught.value.detail) == ("?", "5")


@pytest.mark.parametrize("number", [0, 1, 15])
def test_every_command_tells_the_worker_its_number(number: int) -> None:
    sent: list[Mapping[str, Any]] = []

    class Heard(Said):
        def _agent_output(self, command: str, payload: Mapping[str, Any], seconds: float) -> Iterator[bytes]:
            sent.append(payload)
            yield b'{"format": 1}'

    link = Heard(b"")
    link._number = number
    with suppress(WorkerError):
        link.call(STATE, {"run_id": "r"})
    assert [*link.stream(WATCH, {"run_id": "r"})] == []
    assert sent == [{"run_id": "r", "worker": number}] * 2


def test_gigabytes_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerError) as caught:
        Said(dump({"error": "e" * 10**6, "detail": "d" * 10**6 + "the end"})).call(STATE, {})
    assert len(caught.value.message) == len(caught.value.detail) == agent_link.MAX_WORDS
    assert caught.value.detail.endswith("the end")
    with pytest.raises(WorkerError, match="did not return JSON") as caught:
        Said(b"x" * 10**6).call(STATE, {})
    assert len(caught.value.detail) == agent_link.MAX_WORDS
    monkeypatch.setattr(agent_link, "MAX_ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr(agent_link, "MAX_LINE_BYTES", 1 << 20)
    endless = Said(endless=itertools.repeat(b"x" * 65_536))
    with pytest.raises(WorkerError, match="`state` answered more than 1 MiB"):
        endless.call(STATE, {})
    with pytest.raises(WorkerError, match="`watch` sent a line of more than 1 MiB"):
        [*endless.stream(WATCH, {})]
    assert endless.taken < 3 << 20


def test_an_answer_that_drips_is_a_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for module in (connection, here):  # a second passes at each look
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    dripping: Any = SimpleNamespace(settimeout=lambda seconds: None, recv=lambda size: b".")
    params = ConnectionParams("pod", "me", tmp_path / "key", ["10.0.0.3"], lambda: [])
    over_ssh = Connection(params, 0, cast(Any, None), build_bundle())
    with pytest.raises(WorkerError, match="not finished after 60 s") as caught:
        [*over_ssh.chunks(dripping, 60.0)]
    assert caught.value.kind == "timeout"
    waiting: Queue[bytes | None] = Queue()
    for _ in range(100):
        waiting.put(b".")
    local = LocalLink(tmp_path, ["python"], {}, build_bundle())
    with pytest.raises(WorkerError, match="`observe` has not finished after 60 s"):
        [*local._timed(waiting, "observe", 60.0)]
    assert len([*itertools.islice(over_ssh.chunks(dripping, math.inf), 1000)]) == 1000
