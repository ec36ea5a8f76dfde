"""What programs in a box reach: ports of this machine that are forwarded by name, and hosts of a proxy.

The box has a network of its own with nothing but 127.0.0.1 in it. This process carries bytes between sockets there and
here. The proxy speaks CONNECT, as HTTPS clients do, and connects to the named hosts at public addresses alone: never to
this machine, its network or Compute Engine's metadata server.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from trainer.sandbox.box import Box

LOOPBACK = "127.0.0.1"
PIECE_BYTES = 1 << 16
HEAD_BYTES = 1 << 14

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class BoxNetwork:
    """The forwarded ports of one box. Close it."""

    def __init__(self, box: Box, hosts: Sequence[str], on_refusal: Callable[[], None]) -> None:
        """hosts: names, or patterns such as `*.pypi.org`, that the proxy connects to. on_refusal: called for others."""
        self._box, self._hosts, self._on_refusal = box, hosts, on_refusal
        self._servers = dict[int, asyncio.Server]()

    async def forward(self, port: int) -> None:
        """Make a port of this machine's 127.0.0.1 the same port of the box's."""

        async def dial() -> Streams:
            return await asyncio.open_connection(LOOPBACK, port)

        if port not in self._servers:
            self._servers[port] = await self._serve(await self._box.listener(port), dial)

    async def expose(self, port: int) -> int:
        """Return a port of this machine's 127.0.0.1 that is a port of the box's."""

        async def dial() -> Streams:
            return await asyncio.open_connection(sock=await self._box.dial(port))

        server = await self._serve(socket.create_server((LOOPBACK, 0)), dial)
        exposed = server.sockets[0].getsockname()[1]
        self._servers[exposed] = server
        return exposed

    async def open_proxy(self) -> dict[str, str]:
        """Return the variables that make programs use the proxy."""
        listener = await self._box.listener(0)
        server = await asyncio.start_server(self._connect, sock=listener, limit=HEAD_BYTES)
        port = listener.getsockname()[1]
        self._servers[-port] = server
        url = f"http://{LOOPBACK}:{port}"
        return {"https_proxy": url, "HTTPS_PROXY": url, "no_proxy": LOOPBACK, "NO_PROXY": LOOPBACK}

    def close(self) -> None:
        """Close the ports; connections end with the box."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    async def _serve(self, listener: socket.socket, dial: Callable[[], Awaitable[Streams]]) -> asyncio.Server:
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                other = await dial()
            except OSError:
                writer.close()  # as refused as the other side
                return
            await _carry((reader, writer), other)

        return await asyncio.start_server(carry, sock=listener)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, _, rest = head.partition(" ")
            host, _, port = rest.partition(" ")[0].rpartition(":")
            if method != "CONNECT" or not any(fnmatchcase(host.lower(), name.lower()) for name in self._hosts):
                raise PermissionError(f"{rest.partition(' ')[0]} is not in loop.environment.sandbox.network")
            other = await asyncio.open_connection(await _public_address(host, int(port)), int(port))
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
            self._on_refusal()
            writer.write(f"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nX-Reason: {error!s:.200}\r\n\r\n".encode())
            with suppress(ConnectionError):
                await writer.drain()
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await _carry((reader, writer), other)


async def _public_address(host: str, port: int) -> str:
    """Return an address of a host that is a public one. Raises PermissionError if it has another one too."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(address[0]) for *_, address in found]
    if not all(ipaddress.ip_address(address).is_global for address in addresses):
        raise PermissionError(f"{host} has an address that is not public")
    return addresses[0]


async def _carry(one: Streams, other: Streams) -> None:
    """Carry bytes both ways until both sides have ended."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(PIECE_BYTES):
                writer.write(piece)
                await writer.drain()
            writer.write_eof()

    try:
        await asyncio.gather(copy(one[0], other[1]), copy(other[0], one[1]))
    finally:
        one[1].close()
        other[1].close()
