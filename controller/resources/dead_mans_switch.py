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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

METADATA = "http://{}/computeMetadata/v1/instance/"
MAX_POLL_SECONDS = 30.0
GRACE_SECONDS = 30.0
"""How long after a limit of the watchdog it may still enforce that itself; a check later the pod is deleted here."""
NEVER = float("inf")


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
    last, known = clock(), sign()
    begun = last
    while True:
        sleep(min(MAX_POLL_SECONDS, limit / 10))
        now, (until, idle) = sign(), limits(begun)
        if now is None or now != known:
            last, known = clock(), now
        if clock() >= until + GRACE_SECONDS or clock() - last >= min(limit, idle + GRACE_SECONDS):
            try:
                delete()
            except Exception as error:  # the next check tries again
                print(f"the pod was not deleted: {error!r}", file=sys.stderr, flush=True)


def read_limits(homes: list[str], boot_id: str, begun: float) -> tuple[float, float]:
    """Return the watchdog's limits: when the budget is spent, and the idle seconds; infinity where there is none.

    After a reboot the seconds that were left then count from `begun`. What is damaged counts as no limit.
    """
    until = idle = NEVER
    for home in homes:
        for path in glob.glob(f"{home}/.slipway/watchdog.json"):  # noqa: PTH207 - see `last_sign`
            try:
                with open(path, "rb") as file:  # noqa: PTH123
                    order = json.loads(file.read(1 << 20))
                if order["until"] is not None:
                    rest = order["until"] if order["boot_id"] == boot_id else begun + order["seconds_left"]
                    until = min(until, float(rest))
                if order["idle_seconds"] is not None:
                    idle = min(idle, float(order["idle_seconds"]))
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue
    return until, idle


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


def delete_pod(urls: list[str], send: Callable[[str, str, dict[str, str]], bytes]) -> None:
    """Delete the first of the resources that exists, as the VM's service account; only worker 0 does.

    A resource that does not exist is skipped. Raises the error of a request that fails, after trying the others.
    """
    from urllib.error import HTTPError

    root = METADATA.format(os.environ.get("GCE_METADATA_HOST", "metadata.google.internal"))
    asked = {"Metadata-Flavor": "Google"}
    try:
        if send("GET", f"{root}attributes/agent-worker-number", asked).strip() != b"0":
            return
    except HTTPError as error:
        if error.code != 404:  # without the attribute, every worker deletes; the first one wins
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
                print(f"{url}: {error.code} {error.read(500)!r}", file=sys.stderr, flush=True)
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
    watch(
        float(limit),
        lambda: last_sign(homes),
        lambda: delete_pod(list(urls), send_request),
        limits=lambda begun: read_limits(homes, boot_id, begun),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
