"""Messages between trainer and samplers: only who has the token is heard."""

import hashlib
import json
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import pytest

from tests.controller.localcloud.harness import wait_for
from trainer.checkpoint.storage import RunStorage
from trainer.rl.remote.identity import attempt_mark
from trainer.rl.remote.journal import DrawnSample
from trainer.rl.remote.leases import Leases
from trainer.rl.remote.server import RolloutServer
from trainer.rl.remote.wire import Channel, WireError

TAKE = {"kind": "take", "held": []}


class Tampering:
    """A connection whose next message is altered on its way."""

    def __init__(self, real: socket.socket) -> None:
        self.real, self.change = real, lambda content: content

    def sendall(self, content: bytes) -> None:
        self.real.sendall(self.change(content))

    def __getattr__(self, name: str):
        return getattr(self.real, name)


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[Channel, Channel, Tampering]]]:
    """Makes both ends of a connection, and closes them after the test."""
    with ExitStack() as stack:

        def make(client: str = "secret", server: str = "secret") -> tuple[Channel, Channel, Tampering]:
            with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
                near = Tampering(stack.enter_context(socket.create_connection(listener.getsockname())))
                far = stack.enter_context(listener.accept()[0])
                one = pool.submit(Channel, cast(Any, near), client, server=False)
                other = pool.submit(Channel, far, server, server=True)
                return one.result(), other.result(), near

        yield make


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, str]], RolloutServer]]:
    with ExitStack() as stack:

        def make(facts: dict[str, str]) -> RolloutServer:
            server = RolloutServer(Leases(group_size=1, seconds=100.0), facts, "secret")
            stack.callback(server.close, 0)
            return server

        yield make


def test_messages_and_arrays_arrive_as_they_were_sent(pair) -> None:
    client, server, _ = pair()
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b/c": np.array([], np.float32)}
    for number in range(3):
        client.send({"number": number, "text": "ä"}, dict(arrays))
        message, found = server.receive()
        assert message == {"number": number, "text": "ä"}
        assert found.keys() == arrays.keys()
        for name in arrays:
            np.testing.assert_array_equal(found[name], arrays[name])
            assert found[name].dtype == arrays[name].dtype
        server.send({"answer": number})
        assert client.receive()[0] == {"answer": number}


def test_another_token_is_not_heard(pair) -> None:
    client, server, _ = pair(client="guess")
    client.send(TAKE)
    with pytest.raises(WireError, match="without the token"):
        server.receive()


@pytest.mark.parametrize("how", ["altered", "repeated"])
def test_an_altered_or_repeated_message_is_not_heard(pair, how) -> None:
    client, server, line = pair()
    sent: list[bytes] = []
    if how == "altered":
        line.change = lambda content: content if len(content) == 8 else bytes([*content[:-1], content[-1] ^ 1])
    else:
        line.change = lambda content: sent.append(content) or content
    client.send(TAKE)
    if how == "repeated":
        server.receive()
        line.real.sendall(b"".join(sent))
    with pytest.raises(WireError, match="without the token"):
        server.receive()


@pytest.mark.parametrize("changed", range(3))
def test_an_altered_array_is_never_used(pair, changed) -> None:
    """Whichever of the arrays is altered: none of them is returned."""
    client, server, line = pair()
    arrays = {name: np.full(100, ord(name), np.uint8) for name in "abc"}
    one = bytes(arrays["abc"[changed]])
    line.change = lambda content: bytes([0]) + one[1:] if bytes(content) == one else content
    client.send({"kind": "weights"}, arrays)
    with pytest.raises(WireError, match="without the token"):
        server.receive()


def test_a_stranger_cannot_make_the_trainer_allocate(pair) -> None:
    _, server, line = pair()
    line.real.sendall((1 << 40).to_bytes(8, "big"))
    with pytest.raises(WireError, match="bytes"):
        server.receive()


def connect(server: RolloutServer, facts: dict[str, str]) -> tuple[Channel, dict]:
    channel = Channel.connect("127.0.0.1", server.port, "secret")
    return channel, channel.ask({"name": "one", "facts": facts})[0]


def deliver(channel: Channel, rollout: int, row: int, sample: DrawnSample) -> bool:
    names = ("tokens", "logprobs", "versions", "scores", *(["routes"] if sample.routes is not None else []))
    arrays = {f"{row}/{name}": getattr(sample, name) for name in names}
    message = {"kind": "samples", "rollout": rollout, "first": 0, "rows": [row], "finished": [sample.finished]}
    return channel.ask(message, arrays)[0]["go_on"]


def test_a_sampler_that_hangs_up_loses_its_task_at_once_and_is_not_missed(serve, tmp_path) -> None:
    server = serve({"code": "a"})
    server.publish(3, {"0": np.arange(4, dtype=np.uint8)})
    server.open(0, 2, 2, version=3)
    first, answer = connect(server, {"code": "a"})
    assert answer == {"different": []}
    message, arrays = first.ask({"kind": "weights", "version": 2})
    assert (message, arrays["0"].tolist()) == ({"version": 3}, [0, 1, 2, 3])
    task = first.ask(TAKE)[0]["task"]
    assert task == {"rollout": 0, "first": 0, "count": 2, "version": 3}
    parts = [[np.zeros(n, kind) for kind in (np.int32, np.float32, np.int32)] for n in (2, 3)]
    routes = np.arange(30, dtype=np.uint8).reshape(5, 3, 2)
    one, two = (DrawnSample(*part, np.ones(4), True, own) for part, own in zip(parts, (None, routes), strict=True))
    assert deliver(first, 0, 1, two)
    assert server.wait(0, 0.0) is None
    first.close()
    second, _ = connect(server, {"code": "a"})
    assert second.ask(TAKE)[0]["task"] == task  # waits until the trainer has noticed
    deliver(second, 0, 1, one)
    assert deliver(second, 0, 0, one) in (True, False)
    found = server.wait(0, 10.0)
    assert found is not None
    assert [len(sample.tokens) for sample in found] == [2, 3]
    assert found[0].routes is None
    np.testing.assert_array_equal(found[1].routes, routes)
    assert server.summary() == "2 samples, 1 more dropped, 1 tasks given to another sampler"
    server.announce(RunStorage(str(tmp_path)), "127.0.0.1")
    server.close(75)
    assert second.ask(TAKE)[0] == {"task": None, "exit_code": 75}
    second.close()
    told = json.loads((tmp_path / "samplers.json").read_text())
    mark = {"attempt": attempt_mark("secret"), "number": 0}
    assert told == {"host": "127.0.0.1", "port": server.port, **mark, "exit_code": 75}
    assert "secret" not in told["attempt"]


def test_a_sampler_of_other_code_gets_no_task(serve) -> None:
    server = serve({"code": "a", "config": "c"})
    channel, answer = connect(server, {"code": "b", "config": "c"})
    assert answer == {"different": ["code"]}
    with pytest.raises(ConnectionError):
        channel.ask(TAKE)
    channel.close()


@pytest.mark.parametrize(
    "head",
    [b"no json", b"[]", b"{}", b'{"message": {}, "arrays": 7}', b'{"message": {}, "arrays": [["a", "|O", [1]]]}',
     b'{"message": {}, "arrays": [["a", "<f4", [1099511627776]]]}', b'{"message": {}, "arrays": [["a", "?!", [1]]]}',
     b'{"message": {}, "arrays": [["a", "<f4", [-1]]]}'],
)  # fmt: skip
def test_a_message_that_is_none_ends_the_connection_by_name(pair, head) -> None:
    client, server, line = pair()
    line.real.sendall(len(head).to_bytes(8, "big"))
    client._send_part([memoryview(head)])
    with pytest.raises(WireError, match="cannot be read"):
        server.receive()


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kind": "no such"},
        {"kind": "samples", "rollout": [], "first": 0, "rows": 7, "finished": 7},
        {"kind": []},
        {"kind": "take", "held": [7]},
    ],
)
def test_a_sampler_with_a_bug_loses_its_connection_and_its_task(serve, message, caplog) -> None:
    server = serve({})
    server.open(0, 1, 1, version=0)
    first, _ = connect(server, {})
    task = first.ask(TAKE)[0]["task"]
    with pytest.raises(ConnectionError):
        first.ask(message)
    first.close()
    second, _ = connect(server, {})
    assert second.ask(TAKE)[0]["task"] == task
    second.close()
    assert "was closed" in caplog.text


def test_the_end_of_a_run_in_an_outage_is_no_error_and_the_address_of_a_later_attempt_stays(
    serve, tmp_path, monkeypatch
) -> None:
    answers, address = [True, False, True, True], tmp_path / "samplers.json"
    cut_off, replaced = serve({}), serve({})
    cut_off.announce(RunStorage(str(tmp_path), lambda: answers.pop(0)), "127.0.0.1")
    address.unlink()
    cut_off.close(1)
    assert not list(tmp_path.iterdir())
    replaced.announce(RunStorage(str(tmp_path)), "127.0.0.1")
    monkeypatch.setenv("SLIPWAY_SUCCESSOR", "runs/run/launches/0002.json")
    (tmp_path / "launches").mkdir()
    (tmp_path / "launches/0002.json").write_text("{}")
    address.write_text("of the later attempt")
    replaced.close(1)
    assert address.read_text() == "of the later attempt"


def test_of_weights_that_are_withdrawn_only_what_a_sampler_lacks_stays(serve) -> None:
    server = serve({})
    sampler, _ = connect(server, {})
    arrays = {str(i): np.full(16 << 20, i, np.uint8) for i in range(4)}  # more than the connection buffers
    kept = [weakref.ref(array) for array in arrays.values()]
    server.publish(0, arrays)
    del arrays
    sampler.send({"kind": "weights", "version": -1})
    head = sampler._read(int.from_bytes(sampler._read(8), "big") + hashlib.sha256().digest_size)
    first = sampler._read(16 << 20)
    assert b'"version": 0' in head
    server.withdraw()
    wait_for(lambda: kept[0]() is None, "what has arrived is gone", 60)
    assert kept[3]() is not None
    assert first + sampler._read(3 * (16 << 20)) == b"".join(bytes([i]) * (16 << 20) for i in range(4))
    wait_for(lambda: not any(one() is not None for one in kept), "all is gone", 60)
    sampler.close()


def test_weights_that_are_published_during_a_transfer_never_get_its_version(serve) -> None:
    """Every version's arrays hold its number: none arrives with another one, in part or as a whole."""
    server, stop = serve({}), threading.Event()

    def publish(version: int) -> None:
        server.withdraw()
        server.publish(version, {str(i): np.full(300_000, version, np.int32) for i in range(4)})

    def fetch(_: int) -> list[int]:
        channel, seen = connect(server, {})[0], [-1]
        while not stop.is_set() or seen[-1] < 40:
            message, arrays = channel.ask({"kind": "weights", "version": seen[-1]})
            if arrays:
                assert message["version"] > seen[-1]
                assert {int(value) for array in arrays.values() for value in (array.min(), array.max())} == {
                    message["version"]
                }
                seen.append(message["version"])
        channel.close()
        return seen

    with ThreadPoolExecutor() as pool:
        fetched = [pool.submit(fetch, i) for i in range(3)]
        for version in range(41):
            publish(version)
        stop.set()
        assert all(one.result(120)[-1] == 40 for one in fetched)
