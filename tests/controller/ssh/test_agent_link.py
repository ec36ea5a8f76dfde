"""A worker may answer anything, since programs can replace the agent there: whatever is wrong is its error."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.agent.formats import dump
from controller.agent.protocol import OBSERVE, STATE, WATCH
from controller.here import link as here
from controller.here.link import LocalLink
from controller.ssh import agent_link, connection
from controller.ssh.agent_bundle import build_bundle
from controller.ssh.agent_link import AgentLink
from controller.ssh.connect import ConnectionParams, WorkerError
from controller.ssh.connection import Connection

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
