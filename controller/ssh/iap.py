"""TCP tunnels through Google's Identity-Aware Proxy (IAP), which reaches VMs without an external address.

They use the protocol of gcloud's client: a WebSocket of subprotocol relay.tunnel.cloudproxy.app with binary messages.
A message is a tag (2 bytes), then either a length (4 bytes) and data, or a count of received bytes (8 bytes).
https://cloud.google.com/iap/docs/tcp-forwarding-overview
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlencode

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

ENDPOINT = "wss://tunnel.cloudproxy.app/v4"
SUBPROTOCOL = "relay.tunnel.cloudproxy.app"
ORIGIN = "bot:iap-tunneler"
CONNECTED, DATA, ACK = 0x0001, 0x0004, 0x0007
MAX_FRAME_BYTES = 16384
"""Maximum bytes of data in one message."""
ROLE = "roles/iap.tunnelResourceAccessor"
REFUSALS = {
    4003: "IAP reaches the VM, but the port does not answer: does a firewall rule allow 35.235.240.0/20?",
    4033: f"IAP denies you access: you need {ROLE}",
    4047: "IAP cannot find the VM; it may not be registered yet",
}
"""Messages for the codes with which IAP closes the WebSocket."""


@dataclass(frozen=True)
class IapTarget:
    """Port of a VM. `instance` is its Compute Engine name; a TPU VM has it in the guest attribute `hostname`."""

    project: str
    zone: str
    instance: str
    port: int = 22
    interface: str = "nic0"


class IapTunnel:
    """TCP connection with the socket methods that paramiko uses."""

    def __init__(self, websocket: ClientConnection, opened: ExitStack) -> None:
        self._websocket, self._opened = websocket, opened
        self._buffer = b""
        self._received = self._acknowledged = 0
        self._seconds: float | None = None
        self._closed = False  # paramiko reads this attribute

    def settimeout(self, seconds: float | None) -> None:
        self._seconds = seconds

    def send(self, data: bytes) -> int:
        """Send the beginning of `data` and return how many bytes. Raises BrokenPipeError if the tunnel is closed."""
        from websockets.exceptions import ConnectionClosed

        part = bytes(data[:MAX_FRAME_BYTES])
        try:
            self._websocket.send(struct.pack(">HI", DATA, len(part)) + part)
        except ConnectionClosed as error:
            raise BrokenPipeError(_refusal_reason(error)) from None
        return len(part)

    def recv(self, size: int) -> bytes:
        """Return up to `size` bytes; none after the other side has closed. Raises TimeoutError."""
        from websockets.exceptions import ConnectionClosed

        while not self._buffer:
            try:
                tag, content = _parse_message(self._websocket.recv(timeout=self._seconds))
                if tag == DATA:
                    self._receive_data(content)
            except ConnectionClosed:
                return b""
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def close(self) -> None:
        self._closed = True
        self._opened.close()

    def _receive_data(self, content: bytes) -> None:
        (length,) = struct.unpack_from(">I", content)
        self._buffer = content[4 : 4 + length]
        self._received += length
        if self._received - self._acknowledged > 2 * MAX_FRAME_BYTES:
            self._websocket.send(struct.pack(">HQ", ACK, self._received))
            self._acknowledged = self._received


def connect(target: IapTarget, token: Callable[[], str], seconds: float, endpoint: str = ENDPOINT) -> IapTunnel:
    """Open a tunnel.

    Args:
        token: returns the caller's access token.
        seconds: timeout.
        endpoint: URL of the proxy.

    Raises:
        PermissionError: IAP denies access.
        TimeoutError: no answer in time.
        ConnectionError: the tunnel failed for another reason.
    """
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
    from websockets.sync.client import connect
    from websockets.typing import Origin, Subprotocol

    query = {"project": target.project, "port": target.port, "newWebsocket": "True", "zone": target.zone}
    query |= {"instance": target.instance, "interface": target.interface}
    opened = ExitStack()
    try:
        websocket = opened.enter_context(
            connect(
                f"{endpoint}/connect?{urlencode(query)}",
                origin=Origin(ORIGIN),
                subprotocols=[Subprotocol(SUBPROTOCOL)],
                additional_headers={"Authorization": f"Bearer {token()}"},
                compression=None,
                open_timeout=seconds,
                close_timeout=0.5,
                ping_interval=None,  # SSH has its own keepalive
                user_agent_header="slipway",
            )
        )
    except InvalidStatus as error:
        status = error.response.status_code
        if status in (401, 403):
            raise PermissionError(f"IAP denies you access ({status}): is iap.googleapis.com enabled?") from None
        raise ConnectionRefusedError(f"IAP returned HTTP {status}") from None
    except (InvalidHandshake, EOFError) as error:
        raise ConnectionRefusedError(f"cannot open a tunnel through IAP: {error}") from None
    with opened:
        try:
            tag, _ = _parse_message(websocket.recv(timeout=seconds))
        except ConnectionClosed as error:
            code = error.rcvd.code if error.rcvd else 0
            raise (PermissionError if code == 4033 else ConnectionRefusedError)(_refusal_reason(error)) from None
        if tag != CONNECTED:
            raise ConnectionRefusedError(f"IAP uses an unknown protocol: its first message has tag {tag}")
        return IapTunnel(websocket, opened.pop_all())


def _parse_message(message: str | bytes) -> tuple[int, bytes]:
    """Return tag and content. The caller ignores unknown tags."""
    content = message.encode() if isinstance(message, str) else message
    return (struct.unpack_from(">H", content)[0], content[2:]) if len(content) >= 2 else (0, b"")


def _refusal_reason(error: Exception) -> str:
    received = getattr(error, "rcvd", None)
    if received is None:
        return "the tunnel through IAP was lost"
    return REFUSALS.get(received.code, f"IAP closed the tunnel: {received.code} {received.reason}")
