"""The port of the trainer: strangers are few, for a short time, and do not keep samplers out."""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest

from tests.controller.localcloud.harness import wait_for
from trainer.rl.remote import server, wire
from trainer.rl.remote.server import Listener
from trainer.rl.remote.wire import Channel

SECONDS = 60.0
"""Limit of every wait here; what is waited for takes milliseconds on an idle machine."""


def answer(channel: Channel, hello: dict[str, Any], _: str) -> None:
    while True:
        channel.send({"heard": hello})
        hello, _arrays = channel.receive()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("secret", answer)
    yield made
    made.close()


@pytest.fixture
def stranger(listener: Listener) -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as stack:

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", listener.port), SECONDS))

        yield connect


def greet(listener: Listener) -> Channel:
    channel = Channel.connect("127.0.0.1", listener.port, "secret")
    assert channel.ask({"name": "one"})[0] == {"heard": {"name": "one"}}
    return channel


def is_closed(peer: socket.socket) -> bool:
    """Whether the trainer has closed the connection, within SECONDS."""
    with suppress(ConnectionError):
        while peer.recv(1000):  # the trainer's random bytes
            pass
    return True


def test_strangers_make_room_for_a_sampler_and_those_who_have_the_token_stay(listener, stranger, monkeypatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", SECONDS)
    monkeypatch.setattr(server, "MAX_WAITING", 3)
    first = greet(listener)
    waiting = [stranger() for _ in range(3)]
    wait_for(lambda: len(listener._waiting) == 3, "all wait for a message", SECONDS)
    second = greet(listener)
    assert is_closed(waiting[0])
    more = [stranger() for _ in range(7)]
    assert all(is_closed(each) for each in waiting[1:] + more[:4])
    wait_for(lambda: listener.strangers == 7, "those closed are counted", SECONDS)
    assert len(listener._waiting) == 3
    for channel in (first, second):
        assert channel.ask({"name": "again"})[0] == {"heard": {"name": "again"}}
        channel.close()


def test_a_stranger_who_sends_byte_after_byte_is_closed_in_time(listener, stranger, monkeypatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.5)
    slow = stranger()
    slow.settimeout(0.02)  # the interval of its bytes
    sent = 0

    def drip() -> bool:
        nonlocal sent
        try:
            slow.sendall(b"\0")
            sent += 1
            return not slow.recv(1000)
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    wait_for(drip, "it is closed", SECONDS)
    assert sent < wire.MAX_FIRST_BYTES
    wait_for(lambda: listener.strangers == 1, "it is counted", SECONDS)


def test_a_stranger_may_not_announce_a_long_message(listener, stranger, caplog) -> None:
    """Each is counted, and the first one is logged."""
    for number in range(1, 4):
        loud = stranger()
        loud.sendall(bytes(wire.NONCE_BYTES) + (wire.MAX_FIRST_BYTES + 1).to_bytes(8, "big"))
        assert is_closed(loud)
        wait_for(lambda number=number: listener.strangers == number, "it is counted", SECONDS)
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 1
    assert "before it showed the token of this attempt" in lines[0].getMessage()


def test_a_connection_that_fails_does_not_keep_later_ones_out(monkeypatch) -> None:
    real, failed = socket.socket.accept, list[int]()

    def accept(self: socket.socket):
        if not failed:
            failed.append(1)
            raise OSError(24, "Too many open files")
        return real(self)

    monkeypatch.setattr(server, "ACCEPT_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(socket.socket, "accept", accept)
    listener = Listener("secret", answer)
    greet(listener).close()
    listener.close()
    assert failed


def test_routes_are_of_a_samples_tokens_and_its_prompts() -> None:
    parts = {"tokens": np.ones(3), "logprobs": np.ones(3), "versions": np.ones(3), "scores": np.ones(4)}
    for shape in ((4, 2, 1), None):
        routes = None if shape is None else np.ones(shape, np.uint8)
        assert server._sample(**parts, finished=True, routes=routes).routes is routes
    for shape in ((3, 2, 1), (8, 2)):  # no token of a prompt; no layers
        with pytest.raises(ValueError, match="not the routes of a sample"):
            server._sample(**parts, finished=True, routes=np.ones(shape, np.uint8))
