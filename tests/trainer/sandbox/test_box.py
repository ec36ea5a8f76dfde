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
            await box.stop()

    return asyncio.run(played())


def run(program: str, **limits: Any) -> tuple[Ended, dict[str, int]]:
    """Run a program of Python's in a box of its own; return how it ended, and what was counted."""

    async def play(box: Box) -> tuple[Ended, dict[str, int]]:
        return await box.run(["python", "-c", program]), dict(box.killed)

    return inside(play, **limits)


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
for path in ("/usr/x", "/etc/x", {str(ROOT / "x")!r}):
    try:
        open(path, "w").close()
        os.unlink(path)
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
    ended, killed = run(program)
    assert (ended.code, ended.cause, ended.stderr, killed) == (0, "", b"", {})
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
def test_what_would_not_end_is_killed_whole_and_counted(program: str, cause: str, limits: dict[str, Any]) -> None:
    token = f"# {uuid.uuid4()}"

    async def play(box: Box) -> tuple[Ended, dict[str, int], bytes]:
        ended = await box.run(["python", "-c", f"{program}\n{token}"])
        counted = dict(box.killed)
        return ended, counted, (await box.run(["echo", "next"])).stdout

    ended, counted, after = inside(play, **limits)
    assert (ended.cause, ended.code != 0, counted) == (cause, True, {cause: 1})
    assert len(ended.stdout) <= MIB
    assert after == b"next\n"
    assert not alive(token)


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


def test_a_box_ends_with_the_process_that_made_it_and_its_folder_goes_with_the_next(tmp_path: Path) -> None:
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
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", maker], env=env)
    wait_until(lambda: len(alive(token)) > 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not alive(token))
    (abandoned,) = tmp_path.iterdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.tempfile, "tempdir", str(tmp_path))
        module._remove_abandoned()
    assert not abandoned.exists()


def test_commands_of_a_box_share_its_files_and_processes_and_their_ends_are_told_apart() -> None:
    async def play(box: Box) -> list[Any]:
        box.begin(["sh", "-c", "echo ready; exec sleep 600"], {}, "log")
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
        box._process.kill()
        with pytest.raises(RefusedError, match="its first process has died"):
            await running

    inside(play)


def test_no_path_that_holds_the_users_home_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home, code = tmp_path / "home", tmp_path / "home" / "code"
    code.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [str(home), str(tmp_path), str(code), "", *sys.path])
    found = readable_paths()
    assert str(code) in found
    assert not {str(home), str(tmp_path), "/"} & {*found}
