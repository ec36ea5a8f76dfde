"""Dead man's switch: deletes the pod from inside after a time without any sign of Slipway, or of a user, on it.

The node's startup script contains this file unchanged and runs it at every boot, so it needs neither SSH nor a
controller. It uses only the standard library of Python 3.10, and runs without site-packages.
"""

import glob
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

METADATA = "http://{}/computeMetadata/v1/instance/"
MAX_POLL_SECONDS = 60.0


def watch(
    limit: float,
    sign: Callable[[], float | None],
    delete: Callable[[], None],
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Call `delete` after `limit` seconds without a new sign of life, and again at each further check.

    Times are of this boot's monotonic clock, because a VM sets its wall clock while it boots. Ends only with `sleep`.

    Args:
        limit: seconds.
        sign: returns a number that changes with each sign of life; None means that somebody uses the VM now.
        delete: asks Google to delete the pod; it may fail.
        monotonic: the clock.
        sleep: waits between two checks.
    """
    last, known = monotonic(), sign()
    while True:
        sleep(min(MAX_POLL_SECONDS, limit / 10))
        now = sign()
        if now is None or now != known:
            last, known = monotonic(), now
        elif monotonic() - last >= limit:
            try:
                delete()
            except Exception as error:  # the next check tries again
                print(f"the pod was not deleted: {error!r}", file=sys.stderr, flush=True)


def last_sign(homes: list[str], proc: str = "/proc") -> float | None:
    """Return when a user's Slipway agent last wrote its heartbeat; None while somebody is logged in over SSH."""
    for path in Path(proc).glob("[0-9]*/cmdline"):
        try:
            with path.open("rb") as file:
                title = file.read(200).split(b"\0")[0]
        except OSError:
            continue  # it has ended in the meantime
        if title.startswith((b"sshd: ", b"sshd-session: ")) and b"@" in title:
            return None
    times = [0.0]
    for home in homes:
        for path in glob.glob(f"{home}/.slipway/heartbeat"):  # noqa: PTH207 - pathlib's fails at a dead network mount
            try:
                times.append(os.stat(path).st_mtime)  # noqa: PTH116
            except OSError:
                continue
    return max(times)


def delete_pod(urls: list[str], send: Callable[[str, str, dict[str, str]], bytes]) -> None:
    """Delete the first of the resources that exists, as the VM's service account; only worker 0 does.

    A resource that does not exist is skipped. Raises the error of a request that fails, after trying the others.
    """
    from json import loads
    from urllib.error import HTTPError

    root = METADATA.format(os.environ.get("GCE_METADATA_HOST", "metadata.google.internal"))
    asked = {"Metadata-Flavor": "Google"}
    try:
        if send("GET", f"{root}attributes/agent-worker-number", asked).strip() != b"0":
            return
    except HTTPError as error:
        if error.code != 404:  # without the attribute, every worker deletes; the first one wins
            raise
    token = loads(send("GET", f"{root}service-accounts/default/token", asked))["access_token"]
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
    watch(float(limit), lambda: last_sign(homes), lambda: delete_pod(list(urls), send_request))


if __name__ == "__main__":
    main(*sys.argv[1:])
