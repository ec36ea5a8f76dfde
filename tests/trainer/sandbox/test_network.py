"""The network of a box: nothing, but what is forwarded, and hosts of a proxy by name."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.trainer.sandbox.test_box import HAS_NAMESPACES, LIMITS
from trainer.sandbox import network
from trainer.sandbox.box import Box, Ended
from trainer.sandbox.network import BoxNetwork

pytestmark = pytest.mark.skipif(not HAS_NAMESPACES, reason="the kernel gives ordinary users no namespaces")
SAY = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5); print(s.recv(9))"
CONNECT = """
import socket, sys
port = int(__import__("os").environ["https_proxy"].rpartition(":")[2])
s = socket.create_connection(("127.0.0.1", port))
s.sendall(f"{sys.argv[1]}\\r\\n\\r\\n".encode())
print(b"".join(iter(lambda: s.recv(999), b"")).decode())
"""


def inside(play: Callable[[Box, BoxNetwork], Awaitable[Any]], *hosts: str) -> tuple[Any, int]:
    """Return what a coroutine function of a box and its network returns, and how many connections were refused."""
    refused = list[None]()

    async def played() -> Any:
        box = Box(LIMITS)
        ports = BoxNetwork(box, hosts, lambda: refused.append(None))
        try:
            await box.start()
            return await play(box, ports)
        finally:
            ports.close()
            await box.stop()

    return asyncio.run(played()), len(refused)


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    await writer.drain()
    writer.close()


def test_a_program_reaches_no_port_of_this_machine_but_the_forwarded_one() -> None:
    async def play(box: Box, ports: BoxNetwork) -> list[Ended]:
        one, other = [await asyncio.start_server(greet, "127.0.0.1", 0) for _ in range(2)]
        port, closed = (server.sockets[0].getsockname()[1] for server in (one, other))
        await ports.forward(port)
        await ports.forward(port)
        tried = (("127.0.0.1", port), ("127.0.0.1", closed), ("169.254.169.254", 80), ("1.1.1.1", 443))
        found = [await box.run(["python", "-c", SAY, host, str(number)]) for host, number in tried]
        for server in (one, other):
            server.close()
        return [*found, await box.run(["python", "-c", "import socket; socket.getaddrinfo('pypi.org', 443)"])]

    (open_one, *others), _ = inside(play)
    assert open_one.stdout == b"b'hello'\n"
    assert [ended.code for ended in others] == [1] * 4


def test_a_server_in_a_box_is_reached_at_its_exposed_port() -> None:
    serve = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
    serve += "while True: s.accept()[0].sendall(b'inside')"

    async def play(box: Box, ports: BoxNetwork) -> list[bytes]:
        box.begin(["python", "-c", serve], {}, "port")
        port = int((await box.run(["sh", "-c", "until grep . port; do sleep 0.05; done"])).stdout)
        exposed, silent = await ports.expose(port), await ports.expose(1)
        found = list[bytes]()
        for number in (exposed, silent):
            reader, writer = await asyncio.open_connection("127.0.0.1", number)
            found.append(await reader.read(6))
            writer.close()
        return found

    assert inside(play)[0] == [b"inside", b""]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("CONNECT evil.example:443 HTTP/1.1", "is not in loop.environment.sandbox.network"),
        ("CONNECT metadata.google.internal:80 HTTP/1.1", "has an address that is not public"),
        ("CONNECT 127.0.0.1:22 HTTP/1.1", "has an address that is not public"),
        ("CONNECT good.example:no HTTP/1.1", "invalid literal"),
        ("GET http://good.example/ HTTP/1.1", "is not in"),
        ("x", "is not in"),
    ],
)
def test_the_proxy_refuses_and_counts_what_is_not_named_and_every_private_address(
    monkeypatch: pytest.MonkeyPatch, line: str, reason: str
) -> None:
    addresses = {"metadata.google.internal": "169.254.169.254"}

    async def play(box: Box, ports: BoxNetwork) -> Ended:
        async def resolve(host: str, port: int, **_: Any) -> Any:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses.get(host, host), port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        return await box.run(["python", "-c", CONNECT, line], await ports.open_proxy())

    ended, refused = inside(play, "good.example", "*.internal", "127.*")
    assert ended.stdout.startswith(b"HTTP/1.1 403"), ended
    assert reason in ended.stdout.decode()
    assert refused == 1


def test_the_proxy_carries_bytes_to_a_host_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(box: Box, ports: BoxNetwork) -> Ended:
        server = await asyncio.start_server(greet, "127.0.0.1", 0)

        async def address(host: str, port: int) -> str:
            assert host == "files.good.example"
            return "127.0.0.1"

        monkeypatch.setattr(network, "_public_address", address)
        line = f"CONNECT files.good.example:{server.sockets[0].getsockname()[1]} HTTP/1.1"
        async with server:
            return await box.run(["python", "-c", CONNECT, line], await ports.open_proxy())

    ended, refused = inside(play, "*.good.example")
    assert ended.stdout.decode().startswith("HTTP/1.1 200 OK\r\n\r\nhello"), ended
    assert refused == 0
