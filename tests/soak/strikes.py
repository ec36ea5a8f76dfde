"""What may befall a life. Each strike says what it did, or "" while there is nothing yet for it to strike."""

import json
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from controller.localcloud.vms.processes import MARKER
from tests.controller.run.test_damaged_objects import CONTENTS
from tests.fakes.disks import DAMAGES, OF_LINES, notes_of
from tests.scenarios.chaos.counter import STEPS
from tests.soak.laptops import FILL

if TYPE_CHECKING:
    from tests.soak.world import World

GUARDS = {"supervisor": " supervise", "watchdog": " run_watchdog", "switch": "Dead man's switch"}
"""What guards a pod from inside, and what the command lines of these processes contain."""
RECORDS = re.compile(
    r"^(runs/[^/]+/(launches|verdicts|pods|events|requests)/|index/|pods/[^/]+/(claims|waiting)/"
    r"|runs/[^/]+/(?!result|lease)\w+\.(json|yaml)$)"
)
LEASES = re.compile(r"/lease\.json$")
"""Objects that Slipway writes and others may spoil; a spoiled result is an error by design."""


def processes(cloud: Path) -> list[tuple[psutil.Process, dict[str, str], str]]:
    """Return the processes of all workers of an emulated cloud, with their environment and command line."""
    found = []
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            environment = process.environ()
            if environment.get(MARKER, "").startswith(f"{cloud.resolve()}:"):
                found.append((process, environment, " ".join(process.cmdline())))
    return found


def send(struck: Iterable[psutil.Process], number: int) -> int:
    """Send a signal; return to how many."""
    count = 0
    for process in struck:
        with suppress(psutil.Error):
            process.send_signal(number)
            count += 1
    return count


def kill_controller(world: "World", draw: random.Random) -> str:
    alive = [one for one in world.alive() if one.words[0] == "up"]
    if not alive:
        return ""
    draw.choice(alive).signal(signal.SIGKILL)
    return "killed"


def kill_guard(name: str) -> Callable[["World", random.Random], str]:
    def kill(world: "World", draw: random.Random) -> str:
        found = [process for process, _, line in processes(world.cloud.state) if GUARDS[name] in line]
        return f"killed {count}" if (count := send(found, signal.SIGKILL)) else ""

    return kill


def kill_program(world: "World", draw: random.Random) -> str:
    found = [process for process, environment, _ in processes(world.cloud.state) if "SLIPWAY_ATTEMPT" in environment]
    return "killed" if found and send([draw.choice(found)], signal.SIGKILL) else ""


def _a_worker(world: "World", draw: random.Random) -> list[psutil.Process]:
    """All that runs on one worker, whose program has begun."""
    found = processes(world.cloud.state)
    workers = sorted({environment[MARKER] for _, environment, _ in found if "SLIPWAY_ATTEMPT" in environment})
    chosen = draw.choice(workers) if workers else None
    return [process for process, environment, _ in found if environment[MARKER] == chosen]


def kill_worker(world: "World", draw: random.Random) -> str:
    return f"killed {count} processes" if (count := send(_a_worker(world, draw), signal.SIGKILL)) else ""


def pause_worker(world: "World", draw: random.Random) -> str:
    struck, seconds = _a_worker(world, draw), draw.uniform(1, 6)
    if not send(struck, signal.SIGSTOP):
        return ""
    threading.Timer(seconds, send, (struck, signal.SIGCONT)).start()
    return f"stopped {len(struck)} processes for {seconds:.1f} s"


def pause_controller(world: "World", draw: random.Random) -> str:
    alive, seconds = world.alive(), draw.choice([2.0, 5.0, 20.0])
    if not alive:
        return ""
    chosen = draw.choice(alive)
    chosen.signal(signal.SIGSTOP)
    threading.Timer(seconds, chosen.signal, (signal.SIGCONT,)).start()
    return f"stopped for {seconds:g} s"


def _of_the_pod(world: "World", fault: dict[str, Any], did: str) -> str:
    """Let a fault befall the pod, at once or as soon as it is ready."""
    if not world.pods():
        return ""
    world.fault(fault)
    return did


def clock(world: "World", draw: random.Random) -> str:
    seconds = draw.choice([-86400.0, -3600.0, 3600.0, 86400.0])
    fault = {"kind": "worker_clock", "seconds": seconds, "worker": draw.choice([None, 0])}
    return _of_the_pod(world, fault, f"{seconds:+.0f} s")


def fill_disk(world: "World", draw: random.Random) -> str:
    seconds = round(draw.uniform(0.5, 4.0), 1)
    fault = {"kind": "disk_full", "seconds": seconds, "worker": draw.choice([None, 0])}
    return _of_the_pod(world, fault, f"full for {seconds} s")


def preempt(world: "World", draw: random.Random) -> str:
    return _of_the_pod(world, {"kind": "preempted", "notice_seconds": draw.choice([None, None, 1.0])}, "preempted")


def spoil(pattern: re.Pattern[str], *, delete: bool) -> Callable[["World", random.Random], str]:
    """Return what deletes or overwrites one of the objects of such a name."""

    def strike(world: "World", draw: random.Random) -> str:
        names = sorted(name for name in world.objects() if pattern.search(name))
        if not names:
            return ""
        name = draw.choice(names)
        if delete:
            world.delete(name)
        else:
            world.write(name, draw.choice([b"", b"\xff\x00garbage", *(text.encode() for text in CONTENTS.values())]))
        return f"{'deleted' if delete else 'damaged'} {name}"

    return strike


def spoil_checkpoint(world: "World", draw: random.Random) -> str:
    """Damage a file of the newest checkpoint, or delete it, and kill the program, which must not go on from it.

    The counter's have no checksums, so they are unmade; the last one is the result, which nothing could replace.
    """
    names = world.objects()
    marks = [name for name in names if re.search(r"/checkpoints/\d+/(done|commit_success\.txt)$", name)]
    steps = sorted({int(name.split("/checkpoints/")[1].split("/")[0]) for name in marks})
    if not steps or steps[-1] >= STEPS or not kill_program(world, draw):
        return ""
    inside = sorted(name for name in names if f"/checkpoints/{steps[-1]}/" in name)
    if not world.life.training:
        world.delete(next(name for name in inside if name.endswith("/done")))
        return f"unmade checkpoint {steps[-1]}"
    name = draw.choice(inside)
    if draw.random() < 0.5:
        world.delete(name)
        return f"deleted {name}"
    content = bytearray(world.read(name) or b"x")
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    world.write(name, bytes(content))
    return f"flipped a bit of {name}"


def spoil_folder(world: "World", draw: random.Random) -> str:
    home, how, struck = world.laptops[0].home, draw.choice(list(DAMAGES)), False
    with suppress(OSError):  # the controller writes there meanwhile
        struck = any(how != OF_LINES or file.suffix == ".jsonl" for file in notes_of(home))
        if struck:
            DAMAGES[how](home)
    return how if struck else ""


def fill_folder(world: "World", draw: random.Random) -> str:
    alive = [one for one in world.laptops[0].started if one.alive and one.file.exists()]
    if not alive:
        return ""
    alive[-1].signal(FILL)
    return "full"


def second_laptop(*verbs: tuple[str, ...]) -> Callable[["World", random.Random], str]:
    def strike(world: "World", draw: random.Random) -> str:
        verb = draw.choice(verbs)
        world.start(world.laptops[1], *verb)
        return " ".join(verb)

    return strike


def abandon(world: "World", draw: random.Random) -> str:
    """Kill all controllers and some of what guards the pod, and let its limit pass: it must be gone in two minutes."""
    orders = list((world.cloud.state / "nodes").glob("*/worker-0/home/.slipway/watchdog.json"))
    if not orders or not any("SLIPWAY_ATTEMPT" in environment for _, environment, _ in processes(world.cloud.state)):
        return ""  # while a pod is set up, not all of its guards are there yet
    for one in world.alive():
        one.signal(signal.SIGKILL)
    dead = draw.sample(list(GUARDS), k=draw.randrange(len(GUARDS)))
    for name in dead:
        kill_guard(name)(world, draw)
    for file in orders:
        order = json.loads(file.read_text())
        file.write_text(json.dumps(order | {"until": time.clock_gettime(time.CLOCK_BOOTTIME)}))
    world.must_be_gone_within(120.0, f"all controllers and {dead or 'nothing else'} were killed")
    return f"left alone without {', '.join(dead) or 'a controller'}"


BUDGET, LAPTOP_CLOCK = "spent budget", "laptop's clock"
STRIKES: dict[str, Callable[[Any, random.Random], str] | None] = {
    "kill controller": kill_controller,
    "kill supervisor": kill_guard("supervisor"),
    "kill watchdog": kill_guard("watchdog"),
    "kill dead man's switch": kill_guard("switch"),
    "kill program": kill_program,
    "kill worker": kill_worker,
    "pause controller": pause_controller,
    "pause worker": pause_worker,
    "wrong clock": clock,
    "damaged record": spoil(RECORDS, delete=False),
    "deleted record": spoil(RECORDS, delete=True),
    "damaged lease": spoil(LEASES, delete=False),
    "deleted lease": spoil(LEASES, delete=True),
    "spoiled checkpoint": spoil_checkpoint,
    "spoiled state folder": spoil_folder,
    "full state folder": fill_folder,
    "second laptop goes on": second_laptop(("up",), ("up", "--take-over")),
    "second laptop ends it": second_laptop(("cancel",), ("down", "--yes")),
    "preemption": preempt,
    "abandoned": abandon,
    "full disk": fill_disk,
    BUDGET: None,
    LAPTOP_CLOCK: None,
}
"""What may befall a life, by name; None: the first `up` begins with it."""
