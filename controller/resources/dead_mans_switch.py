"""Dead man's switch: deletes the pod from inside after a time without any sign of Slipway, or of a user, on it.

It also knows the limits of the watchdog (`controller/agent/watchdog.py`) and enforces them a moment later, so that a
dead watchdog prolongs no budget. The node's startup script contains this file unchanged and runs it at every boot, so
it needs neither SSH nor a controller. It uses only the standard library of Python 3.10, and runs without site-packages.
"""

import glob
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

METADATA = "http://{}/computeMetadata/v1/instance/"
MAX_POLL_SECONDS = 30.0
GRACE_SECONDS = 30.0
"""How long after a limit of the watchdog it may still enforce that itself; a check later the pod is deleted here."""
MAX_SECONDS = 1e12
"""Greatest time, and greatest limit, that is one; as in the watchdog."""
NEVER = float("inf")
Limits = dict[str, tuple[float, float]]
"""By file: when the pod ends whatever runs, and the idle seconds; infinity where there is no limit."""


def boot_time() -> float:
    """Return the seconds since this boot, which no change of the time of day moves."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def watch(
    limit: float,
    sign: Callable[[], tuple[float, ...] | None],
    delete: Callable[[], None],
    clock: Callable[[], float] = boot_time,
    sleep: Callable[[float], None] = time.sleep,
    limits: Callable[[float], tuple[float, float]] = lambda begun: (NEVER, NEVER),
) -> None:
    """Call `delete` after `limit` seconds without a new sign of life, and again at each further check.

    Times are of this boot, because a VM sets its time of day while it boots. Ends only with `sleep`.

    Args:
        limit: seconds.
        sign: returns numbers that change with each sign of life; None means that somebody uses the VM now.
        delete: asks Google to delete the pod; it may fail.
        clock: seconds since this boot.
        sleep: waits between two checks.
        limits: returns when the pod ends whatever runs, and after how many seconds without a sign of life, from when
            this began.
    """
    begun = last = clock()
    known: tuple[float, ...] | None = None
    until = idle = NEVER
    with going_on():
        known = sign()
    while True:
        sleep(min(MAX_POLL_SECONDS, limit / 10))
        with going_on():
            if (now := sign()) is None or now != known:
                last, known = clock(), now
        with going_on():
            until, idle = limits(begun)
        if clock() >= until + GRACE_SECONDS or clock() - last >= min(limit, idle + GRACE_SECONDS):
            with going_on():
                delete()


@contextmanager
def going_on() -> Iterator[None]:
    """Go on after the block whatever happens in it: the next check tries again, and what was known counts."""
    try:
        yield
    except Exception as error:
        complain(f"a check failed: {error!r}")


def complain(message: str) -> None:
    """Print a line. A full disk takes none, and that ends nobody."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def read_limits(homes: list[str], boot_id: str, begun: float, known: Limits) -> tuple[float, float]:
    """Return the watchdog's limits: when the budget is spent, and the idle seconds; infinity where there is none.

    After a reboot the seconds that were left then count from `begun`.

    Args:
        homes: patterns of the users' home folders.
        boot_id: of this boot.
        begun: when this program began.
        known: what each file said last; it still counts while the file is damaged or gone, each number by itself.
    """
    for home in homes:
        for path in glob.glob(f"{home}/.slipway/watchdog.json"):  # noqa: PTH207 - see `last_sign`
            until, idle = known.get(path, (NEVER, NEVER))
            try:
                with open(path, "rb", opener=_open_at_once) as file:
                    order = json.loads(file.read(1 << 20), object_pairs_hook=_object)
                if not isinstance(order["boot_id"], str):
                    raise TypeError("boot_id is no text")
                key, start = ("until", 0.0) if order["boot_id"] == boot_id else ("seconds_left", begun)
                until = _limit(order, key, start, until)
                idle = _limit(order, "idle_seconds", 0.0, idle)
            except Exception as error:  # whatever it is, by whoever
                complain(f"{path}: {error!r:.200}")
            known[path] = until, idle
    return min((until for until, _ in known.values()), default=NEVER), min(
        (i for _, i in known.values()), default=NEVER
    )


def _limit(order: dict[str, Any], key: str, start: float, known: float) -> float:
    """Return a limit of the orders, counted from `start`; infinity if they have none, `known` if it is no number."""
    value = order.get(key, "")
    if value is None:
        return NEVER
    if type(value) not in (int, float) or not abs(value) <= MAX_SECONDS or (key == "idle_seconds" and value < 0):
        return known
    return start + value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a name twice")
    return found


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe in its place holds up nobody."""
    return os.open(path, flags | os.O_NONBLOCK)


def last_sign(homes: list[str], proc: str = "/proc") -> tuple[float, ...] | None:
    """Return the times of all users' heartbeats, which each one changes; None while somebody is logged in over SSH."""
    for path in Path(proc).glob("[0-9]*/cmdline"):
        try:
            with path.open("rb") as file:
                title = file.read(200).split(b"\0")[0]
        except OSError:
            continue  # it has ended in the meantime
        if title.startswith((b"sshd: ", b"sshd-session: ")) and b"@" in title:
            return None
    times: list[float] = []
    for home in homes:
        for path in glob.glob(f"{home}/.slipway/heartbeat"):  # noqa: PTH207 - pathlib's fails at a dead network mount
            try:
                times.append(os.stat(path).st_mtime)  # noqa: PTH116
            except OSError:
                continue
    return tuple(sorted(times))


def told_workers(homes: list[str]) -> set[int]:
    """Return what Slipway has told this VM about which worker it is: nothing before it first came, then one number."""
    told: set[int] = set()
    for home in homes:
        for path in glob.glob(f"{home}/.slipway/worker.json"):  # noqa: PTH207 - see `last_sign`
            try:
                with open(path, "rb", opener=_open_at_once) as file:
                    index = json.loads(file.read(1 << 10), object_pairs_hook=_object)["index"]
                told |= {index} if type(index) is int else set()
            except Exception as error:  # whatever it is, by whoever
                complain(f"{path}: {error!r:.200}")
    return told


def delete_pod(urls: list[str], told: set[int], send: Callable[[str, str, dict[str, str]], bytes]) -> None:
    """Delete the first of the resources that exists, as the VM's service account.

    Only worker 0 does: the others do not see who uses it. A VM that Slipway has never reached asks the metadata server
    for its number; where that has none, as on Compute Engine, each such VM deletes, and the first one wins. A resource
    that does not exist is skipped. Raises the error of a request that fails, after trying the others.
    """
    from urllib.error import HTTPError

    root = METADATA.format(os.environ.get("GCE_METADATA_HOST", "metadata.google.internal"))
    asked = {"Metadata-Flavor": "Google"}
    if told and 0 not in told:
        return
    try:
        if not told and send("GET", f"{root}attributes/agent-worker-number", asked).strip() != b"0":
            return
    except HTTPError as error:
        if error.code != 404:
            raise
    token = json.loads(send("GET", f"{root}service-accounts/default/token", asked))["access_token"]
    failed = None
    for url in urls:
        try:
            send("DELETE", url, {"Authorization": f"Bearer {token}"})
            print(f"deleting {url}", flush=True)
            return
        except HTTPError as error:
            if error.code != 404:
                complain(f"{url}: {error.code} {error.read(500)!r}")
                failed = error
    if failed:
        raise failed


def send_request(method: str, url: str, headers: dict[str, str]) -> bytes:
    """Send a request directly, never through a proxy."""
    from urllib.request import ProxyHandler, Request, build_opener

    request = Request(url, headers=headers, method=method)  # noqa: S310 - the scheme is ours
    with build_opener(ProxyHandler({})).open(request, timeout=60) as answer:
        return answer.read()


def main(limit: str, *urls: str) -> None:
    homes = os.environ.get("SLIPWAY_HOMES", "/home/*:/root").split(":")
    boot_id = os.environ.get("SLIPWAY_BOOT_ID") or Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if "SLIPWAY_HOMES" not in os.environ:  # a VM of our own: memory that runs out must not end this
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("-1000")
    known: Limits = {}
    watch(
        float(limit),
        lambda: last_sign(homes),
        lambda: delete_pod(list(urls), told_workers(homes), send_request),
        limits=lambda begun: read_limits(homes, boot_id, begun, known),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
