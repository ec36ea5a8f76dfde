"""Boxes: what a program in one sees, and how what it should not do ends. No payload is larger than it must be."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.paths import ROOT
from trainer.sandbox import box as module
from trainer.sandbox.box import Box, Ended, Limits, RefusedError, readable_paths

MIB = 1 << 20
HAS_NAMESPACES = subprocess.run(["unshare", "--user", "--map-root-user", "true"], check=False).returncode == 0
"""As util-linux sees it."""
LIMITS = Limits(cpu=60.0, wall=300.0, memory=512 * MIB, disk=8 * MIB, output=MIB, processes=16)

pytestmark = pytest.mark.skipif(not HAS_NAMESPACES, reason="the kernel gives ordinary users no namespaces")


def inside(play: Callable[[Box], Awaitable[Any]], **limits: Any) -> Any:
    """Return what a coroutine function of a box returns."""

    async def played() -> Any:
        box = Box(LIMITS._replace(**limits))
        try:
            await box.start()
            return await play(box)
        finally:
            box.stop()

    return asyncio.run(played())


def run(program: str, **limits: Any) -> Ended:
    """Run a program of Python's in a box of its own."""
    return inside(lambda box: box.run(["python", "-c", program]), **limits)


def test_it_sees_an_empty_home_and_nothing_of_this_machines_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-run")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/secret-of-the-run")
    program = f"""
import json, os
home = os.path.expanduser("~")
seen = {{"variables": sorted(os.environ), "home": os.listdir(home), "here": os.getcwd() == home, "user": os.getuid()}}
seen["processes"] = [n for n in os.listdir("/proc") if n.isdigit()]
own = ({str(Path.home() / ".bashrc")!r}, {str(Path.home() / ".config")!r}, "/etc/shadow", "/sys", "/run")
seen["own"] = [p for p in own if os.path.exists(p)]
for path in ("/usr/x", "/etc/hosts", {str(ROOT / "x")!r}):
    try:
        open(path, "a").close()
        seen.setdefault("written", []).append(path)
    except OSError:
        pass
try:
    seen["first"] = open("/proc/1/environ").read()
except PermissionError:
    seen["first"] = None
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
seen["rights"] = [int(status[n], 16) for n in ("CapEff", "CapPrm", "CapInh", "CapAmb", "NoNewPrivs")]
seen["groups"] = os.system("unshare --user true 2>/dev/null") != 0
print(json.dumps(seen))
"""
    ended = run(program)
    assert (ended.code, ended.cause, ended.stderr) == (0, "", b"")
    seen = json.loads(ended.stdout)
    assert seen["variables"] == ["HOME", "LANG", "PATH", "TMPDIR"]
    assert (seen["home"], seen["here"], seen["user"]) == ([], True, 1000)
    assert len(seen["processes"]) == 2
    assert "written" not in seen
    assert seen["own"] == []
    assert (seen["first"], seen["rights"], seen["groups"]) == (None, [0, 0, 0, 0, 1], True)


ENDLESS = {
    "a loop": ("while True: pass", "timeout", {"cpu": 0.5}),
    "a loop in many processes": (
        "import os\nfor _ in range(5): os.fork()\nwhile True: pass",
        "timeout",
        {"cpu": 1.0, "processes": 64},
    ),
    "a program that waits": ("import time; time.sleep(600)", "timeout", {"wall": 0.5}),
    "a program that ignores signals": (
        "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(600)",
        "timeout",
        {"wall": 0.5},
    ),
    "memory": ("x = bytearray(200 << 20); import time; time.sleep(600)", "memory", {"memory": 64 * MIB}),
    "memory of several processes": (
        "import os, time\nfor _ in range(7): os.fork() or (bytearray(24 << 20), time.sleep(600))\n"
        "x = [bytearray(1 << 20) for _ in range(24)]; time.sleep(600)",
        "memory",
        {"memory": 96 * MIB},
    ),
    "processes that make processes": (
        "import os, time\nfor _ in range(6): os.fork()\ntime.sleep(600)",
        "processes",
        {},
    ),
    "processes that leave their session": (
        "import os, time\nfor _ in range(6):\n  os.fork()\n  try: os.setsid()\n  except OSError: pass\ntime.sleep(600)",
        "processes",
        {},
    ),
    "a gigabyte of output": (
        "import os\nfor _ in range(1024): os.write(1, bytes(1 << 20))\nimport time; time.sleep(600)",
        "output",
        {},
    ),
    "a large file": (
        "import os\nwhile os.path.exists('.'): os.system('head -c 99000000 /dev/zero >big')",
        "output",
        {},
    ),
    "many files": (
        "import time\nfor i in range(60): open(f'f{i}', 'wb').write(bytes(1 << 18))\ntime.sleep(600)",
        "output",
        {},
    ),
    "files in /tmp": (
        "import time\nfor i in range(60): open(f'/tmp/f{i}', 'wb').write(bytes(1 << 18))\ntime.sleep(600)",
        "output",
        {},
    ),
}


@pytest.mark.parametrize(("program", "cause", "limits"), ENDLESS.values(), ids=ENDLESS)
def test_what_would_not_end_ends_its_box(program: str, cause: str, limits: dict[str, Any]) -> None:
    token = f"# {uuid.uuid4()}"

    async def play(box: Box) -> Ended:
        ended = await box.run(["python", "-c", f"{program}\n{token}"])
        with pytest.raises(RefusedError, match=f"^the box has ended at its limit of {cause}$"):
            await box.run(["true"])
        return ended

    assert inside(play, **limits) == Ended(-signal.SIGKILL, cause, b"", b"")
    wait_until(lambda: not alive(token))


def alive(token: str) -> list[int]:
    """Return the processes of this machine whose command has a text."""
    found = list[int]()
    for process in psutil.process_iter():
        try:
            found += [process.pid] * any(token in word for word in process.cmdline())
        except psutil.Error:
            continue
    return found


def wait_until(holds: Callable[[], Any]) -> Any:
    while not (found := holds()):
        time.sleep(0.02)
    return found


def test_what_a_command_leaves_running_ends_with_the_box() -> None:
    token = f"# {uuid.uuid4()}"
    left = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600) {token}'])"

    async def play(box: Box) -> int:
        ended = await box.run(["python", "-c", left])
        await asyncio.to_thread(wait_until, lambda: alive(token))
        return ended.code

    assert inside(play) == 0
    wait_until(lambda: not alive(token))


def test_signals_that_its_maker_ignores_end_a_program() -> None:
    """As processes with environments do."""
    kept = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in kept:
            assert run(f"import os; os.kill(os.getpid(), {number.value}); print('goes on')").stdout == b""
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_a_command_whose_reader_gives_up_ends_alone() -> None:
    token = f"# {uuid.uuid4()}"

    async def play(box: Box) -> bytes:
        running = asyncio.ensure_future(box.run(["python", "-c", f"import time; time.sleep(600) {token}"]))
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_until, lambda: alive(token))
        running.cancel()
        await asyncio.to_thread(wait_until, lambda: not alive(token))
        return (await box.run(["echo", "next"])).stdout

    assert inside(play) == b"next\n"


def test_a_box_ends_with_the_process_that_made_it() -> None:
    token = f"# {uuid.uuid4()}"
    maker = f"""
import asyncio
from trainer.sandbox.box import Box, Limits
async def main():
    box = Box(Limits(*{tuple(LIMITS)!r}))
    await box.start()
    await box.run(["python", "-c", "import time; time.sleep(600) {token}"])
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", maker], env=os.environ | {"PYTHONPATH": str(ROOT)})
    wait_until(lambda: len(alive(token)) > 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not alive(token))


def test_commands_of_a_box_share_its_files_and_processes_and_their_ends_are_told_apart() -> None:
    async def play(box: Box) -> list[Any]:
        box.begin(["sh", "-c", "echo ready >log; exec sleep 600"])
        await box.run(["sh", "-c", "until grep -q ready log; do sleep 0.05; done; cat >said"], stdin=b"hello")
        found = [
            await box.run(["cat", "said"]),
            await box.run(["sh", "-c", "echo $A >&2; exit 3"], {"A": "b"}),
            await box.run(["no-such-program"]),
        ]
        return [*found, await asyncio.gather(*(box.run(["echo", str(n)]) for n in range(4)))]

    cat, wrong, missing, several = inside(play)
    assert cat == Ended(0, "", b"hello", b"")
    assert wrong == Ended(3, "", b"", b"b\n")
    assert (missing.code, b"No such file" in missing.stderr) == (127, True)
    assert [ended.stdout for ended in several] == [b"0\n", b"1\n", b"2\n", b"3\n"]


def test_the_seconds_of_a_program_stand_still_while_it_waits_for_this_machine() -> None:
    looks = iter([True] * 20)

    async def play(box: Box) -> Ended:
        return await box.run(["sleep", "0.6"], is_idle=lambda: next(looks, True))

    assert inside(play, wall=0.3).cause == ""


def test_a_machine_whose_kernel_has_no_box_is_refused_by_name() -> None:
    """In a box there can be no other: its kernel says so."""
    program = "from trainer.sandbox.box import why_not; print(why_not())"

    async def play(box: Box) -> Ended:
        return await box.run([sys.executable, "-c", program], {"PYTHONPATH": str(ROOT)})

    ended = inside(play)
    assert ended.stdout.decode().startswith("this machine has no box for programs: [Errno 28] unshare: "), ended.stderr


def test_a_box_that_is_killed_says_so() -> None:
    async def play(box: Box) -> None:
        running = asyncio.ensure_future(box.run(["sleep", "600"]))
        await asyncio.sleep(0)
        assert box._process is not None
        os.killpg(box._process.pid, signal.SIGKILL)
        with pytest.raises(RefusedError, match=r"^the box has ended$"):
            await running

    inside(play)


@pytest.mark.parametrize("has_link", [False, True])
def test_packages_in_the_folder_of_temporary_files_are_read_there_beside_an_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_link: bool
) -> None:
    """As those of a venv that was made below /tmp, or that is reached by a link."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine.py").write_text("x = 5")
    (tmp_path / "secret").write_text("of the run")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    folder = tmp_path / ("link" if has_link else "kept")
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path.parent))
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    program = f"""
import os, mine, tempfile
assert mine.x == 5 and sorted(os.listdir({str(tmp_path)!r})) == {["kept", "link"] if has_link else ["kept"]}
tempfile.NamedTemporaryFile().write(b"x")
open("/tmp/free", "w").close()
open(mine.__file__, "a")
"""

    async def play(box: Box) -> Ended:
        return await box.run(["python", "-c", program], {"PYTHONPATH": str(folder)})

    ended = inside(play)
    assert (ended.code, ended.stderr.splitlines()[-1]) == (
        1,
        f"OSError: [Errno 30] Read-only file system: '{folder}/mine.py'".encode(),
    )
    assert not Path("/tmp/free").exists()


def test_no_path_that_holds_the_users_home_or_the_runs_folder_can_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home, code, run = (tmp_path / name for name in ("home", "home/code", "run"))
    for folder in (code, run):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path / "home"))
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "path", [str(home), str(tmp_path), str(code), str(run), "", *sys.path])
    found = readable_paths()
    assert {str(code), str(ROOT)} <= {*found}
    assert not {str(home), str(tmp_path), str(run), "/"} & {*found}
    monkeypatch.chdir(ROOT)
    assert str(ROOT) in readable_paths()


SAY = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5); print(s.recv(9))"


async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    await writer.drain()
    writer.close()


def test_a_program_reaches_no_port_of_this_machine_but_the_forwarded_one() -> None:
    async def play(box: Box) -> list[Ended]:
        one, other = [await asyncio.start_server(greet, "127.0.0.1", 0) for _ in range(2)]
        port, closed = (server.sockets[0].getsockname()[1] for server in (one, other))
        await box.forward(port)
        await box.forward(port)
        tried = (("127.0.0.1", port), ("127.0.0.1", closed), ("169.254.169.254", 80), ("1.1.1.1", 443))
        found = [await box.run(["python", "-c", SAY, host, str(number)]) for host, number in tried]
        for server in (one, other):
            server.close()
        return [*found, await box.run(["python", "-c", "import socket; socket.getaddrinfo('pypi.org', 443)"])]

    open_one, *others = inside(play)
    assert open_one.stdout == b"b'hello'\n"
    assert [ended.code for ended in others] == [1] * 4


def test_a_box_with_this_machines_network_reaches_its_ports() -> None:
    async def play() -> Ended:
        box = Box(LIMITS, has_network=True)
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            try:
                await box.start()
                port = server.sockets[0].getsockname()[1]
                await box.forward(port)
                assert await box.expose(port) == port
                return await box.run(["python", "-c", SAY, "127.0.0.1", str(port)])
            finally:
                box.stop()

    assert asyncio.run(play()).stdout == b"b'hello'\n"


def test_a_server_in_a_box_is_reached_at_its_exposed_port() -> None:
    serve = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], file=open('port', 'w'))\n"
    )
    serve += "while True: s.accept()[0].sendall(b'inside')"

    async def play(box: Box) -> list[bytes]:
        box.begin(["python", "-c", serve])
        port = int((await box.run(["sh", "-c", "until grep . port; do sleep 0.05; done"])).stdout)
        found = list[bytes]()
        for number in (await box.expose(port), await box.expose(1)):
            reader, writer = await asyncio.open_connection("127.0.0.1", number)
            found.append(await reader.read(6))
            writer.close()
        return found

    assert inside(play) == [b"inside", b""]
