"""The trainer's side of the connections to samplers: tasks and weights out, samples in. Runs on process 0."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from etils import epath

from conf.strict_json import dumps
from trainer.checkpoint.local_saves import replaced_by
from trainer.checkpoint.storage import RunStorage
from trainer.rl.remote.identity import attempt_mark, attempt_number
from trainer.rl.remote.journal import DrawnSample
from trainer.rl.remote.leases import Leases, Presence, TaskLostError, TaskName
from trainer.rl.remote.wire import Arrays, Channel

MAX_WAITING = 64
"""Connections that have not shown the token yet; the oldest one makes room for a newer one."""
ACCEPT_PAUSE_SECONDS = 1.0
"""Pause after a connection that could not be accepted, as when too many files are open."""


class Listener:
    """Listens on a free port of all interfaces, a thread for each connection.

    A connection without the token has wire.HANDSHAKE_SECONDS, and one message of wire.MAX_FIRST_BYTES.

    Attributes:
        port: where peers connect.
        strangers: connections so far that ended without the token.
    """

    def __init__(self, token: str, serve: Callable[[Channel, dict[str, Any], str], None]) -> None:
        """Listen.

        Args:
            token: secret of the attempt.
            serve: called in a connection's thread, with its first message and address; the connection ends with it.
        """
        self._token, self._serve, self._closed = token, serve, False
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, None] = {}  # oldest first
        self.strangers = 0
        self._socket = socket.create_server(("", 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True, name="samplers").start()

    def close(self) -> None:
        """Accept no more connections; those that exist stay."""
        self._closed = True
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                peer, (host, port, *_) = self._socket.accept()
            except OSError as error:
                if not self._closed:  # the peer has hung up, or too many files are open
                    logging.warning("a sampler could not connect: %s", error)
                    time.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            self._admit(peer)
            threading.Thread(target=self._hear, args=(peer, f"{host}:{port}"), daemon=True, name="sampler").start()

    def _admit(self, peer: socket.socket) -> None:
        """Let a connection wait for its first message; end the oldest one if too many do."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                with suppress(OSError):  # it has hung up
                    oldest.shutdown(socket.SHUT_RDWR)  # its own thread closes it
            self._waiting[peer] = None

    def _hear(self, peer: socket.socket, address: str) -> None:
        try:
            channel, hello = self._authenticate(peer, address)
            self._serve(channel, hello, address)
        except OSError as error:
            logging.info("the connection from %s has ended: %s", address, error)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # a sampler with a bug
            logging.warning("the connection from %s was closed: %s: %s", address, type(error).__name__, error)
        finally:
            peer.close()

    def _authenticate(self, peer: socket.socket, address: str) -> tuple[Channel, dict[str, Any]]:
        """Return the channel and its first message. Raises OSError if there is none with the token."""
        try:
            channel = Channel(peer, self._token, server=True)
            return channel, channel.receive()[0]
        except OSError as error:
            with self._lock:
                self.strangers += 1
                first = self.strangers == 1
            if first:
                logging.warning(
                    "a connection from %s was closed before it showed the token of this attempt (%s); "
                    "further ones are only counted",
                    address,
                    error,
                )
            raise
        finally:
            with self._lock:
                self._waiting.pop(peer, None)


ADDRESS_FILE = "samplers.json"
"""Object in the run's folder that tells samplers where the trainer listens; it holds no secret."""
POLL_SECONDS = 5.0
"""How long a request waits for a task or for weights."""


class RolloutServer:
    """Serves samplers, a thread for each connection. Close it at the end.

    Every other method is called by the trainer's own thread.
    """

    def __init__(
        self, leases: Leases[DrawnSample], facts: dict[str, str], token: str, samplers: Sequence[str] = ()
    ) -> None:
        """Listen on a free port of all interfaces.

        Args:
            leases: of the samplers' tasks.
            facts: what a sampler must agree with: config, code, packages.
            token: secret of the attempt.
            samplers: names of all samplers.
        """
        self._leases, self._facts, self._token = leases, facts, token
        self._presence = Presence(samplers)
        self._changed = threading.Condition()
        self._version, self._weights = -1, Arrays()
        self._exit_code: int | None = None
        self._error: TaskLostError | None = None
        self._storage: RunStorage | None = None
        self._address: dict[str, Any] = {}
        self._listener = Listener(token, self._serve)
        self.port = self._listener.port

    def announce(self, storage: RunStorage, host: str) -> None:
        """Write where samplers connect into the run's folder, and later, how they exit."""
        self._storage = storage
        self._address = {"host": host, "port": self.port, "attempt": attempt_mark(self._token)}
        self._address |= {"number": attempt_number()}
        self._write_address()

    def withdraw(self) -> None:
        """Let go of the weights, to make room for newer ones; a transfer that has begun keeps what it has to send."""
        with self._changed:
            self._weights = Arrays()

    def publish(self, version: int, weights: Arrays) -> None:
        """Offer the weights after `version` updates to the samplers. They must not change any more."""
        with self._changed:
            self._version, self._weights = version, weights
            self._changed.notify_all()

    def open(self, rollout: int, prompts: int, prompts_per_task: int, version: int) -> None:
        """See `Leases.open`."""
        with self._changed:
            self._leases.open(rollout, prompts, prompts_per_task, version)
            self._changed.notify_all()

    def wait(self, rollout: int, seconds: float) -> list[DrawnSample] | None:
        """Return all samples of a rollout, and close it; None if some are missing after that long.

        Raises TaskLostError if samplers die of a task again and again.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: self._error or self._leases.samples(rollout), seconds)
            if self._error is not None:
                raise self._error
            found = self._leases.samples(rollout)
            if done and found is not None:
                self._leases.close(rollout)
            return found

    def begin_wait(self) -> None:
        """Say that the trainer waits for samples from now on; see `report_silence`."""
        with self._changed:
            self._presence.begin(time.monotonic())

    def report_silence(self) -> None:
        """Print which samplers are silent if all are, and announce the address again. Raises SamplersLostError."""
        with self._changed:
            line = self._presence.report(time.monotonic())
        if line:
            print(line, flush=True)
            self._write_address()

    def summary(self) -> str:
        """Return what became of the tasks and samples so far."""
        with self._changed:
            own = self._leases
            text = f"{own.kept} samples, {own.duplicates} more dropped, {own.lost} tasks given to another sampler"
        strangers = self._listener.strangers
        return f"{text}, {strangers} connections without the token closed" if strangers else text

    def close(self, code: int) -> None:
        """Tell all samplers to exit with this code, and accept no more; one that is not connected reads the file."""
        with self._changed:
            self._exit_code = code
            self._changed.notify_all()
        self._listener.close()
        self._write_address()

    def _write_address(self) -> None:
        """Write the file, unless it is the next attempt's or the bucket does not answer: nothing waits for that."""
        if self._storage is None or not self._storage.answers():
            return
        ended = {} if self._exit_code is None else {"exit_code": self._exit_code}
        file = epath.Path(self._storage.folder) / ADDRESS_FILE
        with self._storage.tolerated(ADDRESS_FILE):
            if replaced_by(self._storage.folder):
                return
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dumps(self._address | ended))

    def _serve(self, channel: Channel, hello: dict[str, Any], address: str) -> None:
        """Answer a sampler until its connection ends. Raises OSError, and other errors if the sampler has a bug."""
        different = sorted(name for name, value in self._facts.items() if hello["facts"].get(name) != value)
        channel.send({"different": different})
        if different:
            return
        name = f"{hello['name']} {address}"
        try:
            while True:
                message, arrays = channel.receive()
                if message["kind"] != "weights":
                    with self._changed:
                        self._presence.hear(hello["name"], time.monotonic())
                self._answer(channel, name, message, arrays)
        finally:
            with self._guarded():
                self._leases.release(name)  # offers what this sampler leaves behind to the others

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Hold the lock; the trainer's thread raises what goes wrong with the leases."""
        with self._changed:
            try:
                yield
            except TaskLostError as error:
                self._error = error
            self._changed.notify_all()

    def _answer(self, channel: Channel, name: str, message: dict[str, Any], arrays: Arrays) -> None:
        match message["kind"]:
            case "take":
                channel.send(self._take(name, [(rollout, first) for rollout, first in message["held"]]))
            case "samples":
                channel.send(self._receive_samples(name, message, arrays))
            case "weights":
                channel.send(*self._newer_weights(message["version"]))
            case other:
                raise ValueError(f"unknown request {other!r}")

    def _newer_weights(self, version: int) -> tuple[dict[str, Any], Arrays]:
        """Return weights after more than `version` updates, with their version; no arrays if there are none yet."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._weights and self._version > version, POLL_SECONDS)
            return ({"version": self._version}, dict(self._weights)) if found else ({"version": version}, {})

    def _take(self, name: str, held: Sequence[TaskName]) -> dict[str, Any]:
        """Return a task, if there is one; a sampler that holds none waits for it."""
        late = time.monotonic() + POLL_SECONDS
        task = None
        with self._guarded():
            while self._exit_code is None and (left := late - time.monotonic()) > 0:
                if (task := self._leases.take(name, time.monotonic(), held)) or held:
                    break
                self._changed.wait(left)
        return {"task": task and vars(task), "exit_code": self._exit_code}

    def _receive_samples(self, name: str, message: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        with self._guarded():
            held = (message["rollout"], message["first"]) in self._leases.renew(name, time.monotonic())
            for row, finished in zip(message["rows"], message["finished"], strict=True):
                parts = {part: arrays[f"{row}/{part}"] for part in ("tokens", "logprobs", "versions", "scores")}
                routes = arrays.get(f"{row}/routes")
                self._leases.deliver(message["rollout"], row, _sample(**parts, finished=finished, routes=routes))
        return {"go_on": held and self._exit_code is None}


def _sample(
    tokens: np.ndarray,
    logprobs: np.ndarray,
    versions: np.ndarray,
    scores: np.ndarray,
    finished: bool,
    routes: np.ndarray | None,
) -> DrawnSample:
    """Return a sample with arrays of its dtypes. Raises ValueError if they are not of one sample."""
    if not tokens.ndim == 1 <= len(tokens) == len(logprobs) == len(versions) or scores.shape != (4,):
        raise ValueError("not a sample")
    if routes is not None and not (routes.ndim == 3 and len(routes) > len(tokens)):
        raise ValueError("not the routes of a sample")
    return DrawnSample(
        tokens=tokens.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        versions=versions.astype(np.int32),
        scores=scores.astype(np.float64),
        finished=finished,
        routes=routes,
    )
