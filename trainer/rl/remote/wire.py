"""Messages between the trainer and its samplers: JSON with arrays, over TCP, authenticated by the attempt's token.

Both sides choose 32 random bytes, and derive a key from them and the token. Every message ends with its HMAC-SHA256
under this key, with a number and a direction, so that a message that is altered, repeated, or from a process without
the token ends the connection before anything of it is parsed. Messages are not encrypted.
"""

import hashlib
import hmac
import io
import json
import secrets
import socket
import zipfile
from typing import Any

import numpy as np

TOKEN_VARIABLE = "SLIPWAY_SAMPLER_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable with the secret that the controller derives for each attempt."""
NONCE_BYTES = 32
MAX_FIRST_BYTES = 1 << 20
"""Longest message from a peer that has not yet shown that it knows the token."""
MAX_BYTES = 1 << 36
HANDSHAKE_SECONDS = 10.0
SILENCE_SECONDS = 600.0
"""Silence of a peer after which its connection is closed."""

Arrays = dict[str, np.ndarray]


class WireError(ConnectionError):
    """A message is not from a peer with the token, or the connection has ended."""


class Channel:
    """One side of a connection. Not thread-safe."""

    def __init__(self, peer: socket.socket, token: str, *, server: bool) -> None:
        """Agree on a key with the peer. Raises OSError if it does not answer in time."""
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
        self.send_packed(pack(message, arrays or {}))

    def send_packed(self, content: bytes) -> None:
        """Send what `pack` returned."""
        self._socket.settimeout(SILENCE_SECONDS)
        self._socket.sendall(len(content).to_bytes(8, "big"))
        self._socket.sendall(content)
        self._socket.sendall(self._code(content, self._names[0], self._sent))
        self._sent += 1

    def receive(self) -> tuple[dict[str, Any], Arrays]:
        """Wait for the next message. Raises WireError, or TimeoutError after SILENCE_SECONDS."""
        self._socket.settimeout(SILENCE_SECONDS if self._received else HANDSHAKE_SECONDS)
        length = int.from_bytes(self._read(8), "big")
        if length > (MAX_BYTES if self._received else MAX_FIRST_BYTES):
            raise WireError(f"a message of {length} bytes")
        content, code = self._read(length), self._read(hashlib.sha256().digest_size)
        if not hmac.compare_digest(code, self._code(content, self._names[1], self._received)):
            raise WireError("a message without the token of this attempt")
        self._received += 1
        try:
            return unpack(content)
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise WireError(f"a message that cannot be read: {error}") from error

    def ask(self, message: dict[str, Any], arrays: Arrays | None = None) -> tuple[dict[str, Any], Arrays]:
        """Send a request and return its answer."""
        self.send(message, arrays)
        return self.receive()

    def close(self) -> None:
        self._socket.close()

    def _code(self, content: bytes, sender: bytes, number: int) -> bytes:
        code = hmac.new(self._key, sender + number.to_bytes(8, "big"), "sha256")
        code.update(content)
        return code.digest()

    def _read(self, count: int) -> bytes:
        content = bytearray()
        while len(content) < count:
            part = self._socket.recv(min(count - len(content), 1 << 20))
            if not part:
                raise WireError("the connection has ended")
            content += part
        return bytes(content)


def pack(message: dict[str, Any], arrays: Arrays) -> bytes:
    """Return a message as the bytes of an npz file without pickles."""
    content = io.BytesIO()
    text = np.frombuffer(json.dumps(message).encode(), np.uint8)
    np.savez(content, **arrays, message=text)  # pyright: ignore[reportArgumentType]
    return content.getvalue()


def unpack(content: bytes) -> tuple[dict[str, Any], Arrays]:
    """Return what `pack` was given."""
    with np.load(io.BytesIO(content)) as found:
        arrays = dict(found)
    return json.loads(arrays.pop("message").tobytes()), arrays
