"""Messages between the trainer and its samplers: JSON and arrays, over TCP, authenticated by the attempt's token.

Both sides choose 32 random bytes, and derive a key from them and the token. A message is a head of JSON and then the
bytes of its arrays. Each of the two ends with its HMAC-SHA256 under this key, with a number and a direction, so that
what is altered, repeated, or from a process without the token ends the connection before it is parsed or used. Messages
are not encrypted.
"""

import hashlib
import hmac
import json
import math
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

NONCE_BYTES = 32
MAX_FIRST_BYTES = 1 << 16
"""Longest head from a peer that has not yet shown that it knows the token."""
MAX_BYTES = 1 << 36
HANDSHAKE_SECONDS = 30.0
"""How long a peer has to show that it knows the token, however its bytes arrive."""
SILENCE_SECONDS = 600.0
"""Silence of a peer after which its connection is closed."""
SLICE_BYTES = 1 << 24
"""Bytes that are sent at a time, each within SILENCE_SECONDS."""

Arrays = dict[str, np.ndarray]


class WireError(ConnectionError):
    """A message is not from a peer with the token, or the connection has ended."""


class Channel:
    """One side of a connection. Not thread-safe."""

    def __init__(self, peer: socket.socket, token: str, *, server: bool) -> None:
        """Agree on a key with the peer. Raises OSError if it does not answer in time."""
        self._until = time.monotonic() + HANDSHAKE_SECONDS
        peer.settimeout(HANDSHAKE_SECONDS)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._names = peer, (b"server", b"client") if server else (b"client", b"server")
        self._sent = self._received = 0
        own = secrets.token_bytes(NONCE_BYTES)
        peer.sendall(own)
        other = self._read(NONCE_BYTES)
        nonces = own + other if server else other + own
        self._key = hmac.digest(token.encode(), nonces, "sha256")

    @classmethod
    def connect(cls, host: str, port: int, token: str) -> "Channel":
        """Connect to the trainer. Raises OSError."""
        return cls(socket.create_connection((host, port), HANDSHAKE_SECONDS), token, server=False)

    def send(self, message: dict[str, Any], arrays: Arrays | None = None) -> None:
        """Send a message. Contiguous arrays are not copied; each is taken out of `arrays` as it is sent."""
        arrays = arrays or {}
        described = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
        head = json.dumps({"message": message, "arrays": described}).encode()
        self._socket.settimeout(SILENCE_SECONDS)
        self._socket.sendall(len(head).to_bytes(8, "big"))
        self._send_part([memoryview(head)])
        if arrays:
            self._send_part(_take_bytes(arrays))

    def receive(self) -> tuple[dict[str, Any], Arrays]:
        """Wait for the next message. Raises WireError, or TimeoutError if the peer is silent for too long."""
        length = int.from_bytes(self._read(8), "big")
        if length > (MAX_BYTES if self._received else MAX_FIRST_BYTES):
            raise WireError(f"a message of {length} bytes")
        head = bytearray(length)
        self._receive_part([memoryview(head)])
        self._socket.settimeout(SILENCE_SECONDS)
        try:
            content = json.loads(head)
            message, arrays = content["message"], _empty_arrays(content["arrays"])
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"a message that cannot be read: {error}") from error
        if arrays:
            self._receive_part(_bytes_of(array) for array in arrays.values())
        return message, arrays

    def ask(self, message: dict[str, Any], arrays: Arrays | None = None) -> tuple[dict[str, Any], Arrays]:
        """Send a request and return its answer."""
        self.send(message, arrays)
        return self.receive()

    def close(self) -> None:
        self._socket.close()

    def _send_part(self, buffers: Iterable[memoryview]) -> None:
        code = self._code(self._names[0], self._sent)
        for buffer in buffers:
            code.update(buffer)
            for begin in range(0, len(buffer), SLICE_BYTES):
                self._socket.sendall(buffer[begin : begin + SLICE_BYTES])
        self._socket.sendall(code.digest())
        self._sent += 1

    def _receive_part(self, buffers: Iterable[memoryview]) -> None:
        """Fill the buffers. Raises WireError if the peer did not send this part as it arrived."""
        code = self._code(self._names[1], self._received)
        for buffer in buffers:
            self._fill(buffer)
            code.update(buffer)
        if not hmac.compare_digest(self._read(hashlib.sha256().digest_size), code.digest()):
            raise WireError("a message without the token of this attempt")
        self._received += 1

    def _code(self, sender: bytes, number: int) -> hmac.HMAC:
        return hmac.new(self._key, sender + number.to_bytes(8, "big"), "sha256")

    def _read(self, count: int) -> bytes:
        content = bytearray(count)
        self._fill(memoryview(content))
        return bytes(content)

    def _fill(self, buffer: memoryview) -> None:
        while buffer:
            if not self._received:
                if (left := self._until - time.monotonic()) <= 0:
                    raise TimeoutError(f"no message with the token within {HANDSHAKE_SECONDS:g} s")
                self._socket.settimeout(left)
            count = self._socket.recv_into(buffer)
            if not count:
                raise WireError("the connection has ended")
            buffer = buffer[count:]


def _take_bytes(arrays: Arrays) -> Iterator[memoryview]:
    """Yield the memory of each array, and let go of it, so that nothing is kept for a slow peer but what it lacks."""
    while arrays:
        yield _bytes_of(np.ascontiguousarray(arrays.pop(next(iter(arrays)))))


def _bytes_of(array: np.ndarray) -> memoryview:
    """Return the memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def _empty_arrays(described: list[tuple[str, str, list[int]]]) -> Arrays:
    """Return arrays for the bytes that follow. Raises ValueError or TypeError if they cannot be."""
    kinds = {name: (np.dtype(kind), tuple(shape)) for name, kind, shape in described}
    if any(kind.hasobject for kind, _ in kinds.values()):
        raise ValueError("an array of objects")
    if (size := sum(kind.itemsize * math.prod(shape) for kind, shape in kinds.values())) > MAX_BYTES:
        raise ValueError(f"arrays of {size} bytes")
    return {name: np.empty(shape, kind) for name, (kind, shape) in kinds.items()}
