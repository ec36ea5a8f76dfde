#!/usr/bin/env python3
"""Startup script of a bastion: download Slipway from the bucket, install it, run the controller, delete the VM.

The script is sent unchanged, so nothing from a config ever reaches a shell: its orders are JSON in the VM's metadata
attribute `slipway`. It uses only the standard library and the image's Python, and runs at every boot. Its output goes
to the serial port, and at the end to the bucket.
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

ATTRIBUTES = "instance/attributes/slipway"
TOKEN = "instance/service-accounts/default/token"  # noqa: S105 - a path
PAUSES = (5.0, 20.0, 60.0)
"""Seconds before each retry."""
FRESH_SECONDS = 480.0
"""For this long after the first boot, a refusal may mean that IAM does not show the roles of this VM everywhere yet."""
FRESH_PAUSE = 20.0
TRY_AGAIN = 75
"""Exit code of a controller that Google refused or did not answer (EX_TEMPFAIL of sysexits.h)."""
FORBIDDEN = 403
MAX_CRASHES = 5
"""Restarts of a controller that died from a signal or a bug of Slipway."""
LOG_BYTES = 4 << 20


def main() -> int:
    orders = with_retries(lambda: json.loads(send_request(read_metadata(ATTRIBUTES))))
    log = Path(orders["home"]).expanduser() / "bastion.log"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    code = 1
    try:
        python, environment = with_retries(lambda: install_slipway(orders, log.parent))
        code = run_to_the_end(lambda: run_controller(python, environment, orders, log), age_seconds(log.parent))
    except Exception as error:
        write_log_line(log, f"the bastion cannot start: {error!r}")
    finally:
        for leave in (lambda: upload_log(orders, log), lambda: delete_this_vm(orders)):
            try:
                with_retries(leave)
            except Exception as error:
                print(repr(error), flush=True)
    return code


def run_to_the_end(
    run: Callable[[], int],
    age: Callable[[], float],
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Run the controller until it ends, and return its exit code.

    A crash is not an end, and neither is a refusal by Google; while the roles of this VM are fresh, it does not count.

    Args:
        run: runs the controller once and returns its exit code, negative for a signal.
        age: returns the seconds since the first boot of this VM.
        sleep: waits before the next try.
    """
    crashes = 0
    while True:
        code = run()
        if code == TRY_AGAIN and age() < FRESH_SECONDS:
            print("the roles of this VM are fresh: trying again", flush=True)
            sleep(FRESH_PAUSE)
            continue
        if 0 <= code not in (1, TRY_AGAIN):
            return code
        crashes += 1
        if crashes == MAX_CRASHES:
            return code
        sleep(PAUSES[0])


def age_seconds(home: Path) -> Callable[[], float]:
    """Return a clock of the seconds since the first boot; a file in `home` remembers when that was."""
    mark = home / "first-boot"
    if not mark.exists():
        mark.touch()
    began = mark.stat().st_mtime
    return lambda: time.time() - began


def install_slipway(orders: dict[str, Any], home: Path) -> tuple[str, dict[str, str]]:
    """Verify and unpack Slipway and install its dependencies; returns the Python and its environment."""
    source = home / f"slipway-{orders['sha256'][:12]}"
    if not source.is_dir():
        name = f"storage/v1/b/{quote(orders['bucket'])}/o/{quote(orders['package'], safe='')}?alt=media"
        packed = send_request(download_object(orders, name), token())
        if (found := hashlib.sha256(packed).hexdigest()) != orders["sha256"]:
            raise ValueError(f"{orders['package']} has SHA-256 {found}, expected {orders['sha256']}")
        archive, draft = home / "slipway.tar.gz", home / f".slipway-{os.getpid()}"
        archive.write_bytes(packed)
        unpack(archive, draft)
        about = draft / f"slipway_tpu-{orders['version']}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: slipway-tpu\nVersion: {orders['version']}\n")
        draft.rename(source)
    python = sys.executable
    if orders["install"]:
        venv = home / "venv"
        python = str(venv / "bin" / "python")
        if not (venv / "complete").exists():
            wait = ("-o", "DPkg::Lock::Timeout=300")  # unattended upgrades run at the first boot
            call("apt-get", *wait, "update", "--quiet")
            call("apt-get", *wait, "install", "--quiet", "--yes", "python3-venv")
            call(sys.executable, "-m", "venv", "--clear", str(venv))
            call(python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", str(source / "conf/driver.txt"))
            (venv / "complete").touch()
    return python, {**os.environ, "PYTHONPATH": str(source), "PYTHONUNBUFFERED": "1", "SLIPWAY_HOME": str(home)}


def unpack(archive: Path, folder: Path) -> None:
    """Extract only plain files that stay inside the folder."""
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            if member.name.startswith("/") or ".." in parts or not member.isfile():
                raise ValueError(f"the archive contains {member.name!r}")
            path = folder.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            path.write_bytes(content.read() if content else b"")


def run_controller(python: str, environment: dict[str, str], orders: dict[str, Any], log: Path) -> int:
    """Run the controller to the end of the run; returns its exit code, negative for a signal."""
    command = [python, "-P", "-m", "controller.bastion"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdin.write(json.dumps(orders))
        driver.stdin.close()
        for line in driver.stdout:
            write_log_line(log, line.rstrip("\n"))
        return driver.wait()


def write_log_line(log: Path, line: str) -> None:
    print(line, flush=True)
    with log.open("a") as file:
        file.write(f"{line}\n")


def upload_log(orders: dict[str, Any], log: Path) -> None:
    name = quote(orders["log"], safe="")
    place = f"upload/storage/v1/b/{quote(orders['bucket'])}/o?uploadType=media&name={name}"
    send_request(
        download_object(orders, place), {**token(), "Content-Type": "text/plain"}, log.read_bytes()[-LOG_BYTES:]
    )


def delete_this_vm(orders: dict[str, Any]) -> None:
    """Request the deletion of this VM; its account may delete no other."""
    root = orders["roots"].get("compute", "https://compute.googleapis.com/")
    send_request(f"{root}compute/v1/{orders['instance']}", token(), method="DELETE")


def call(*command: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def with_retries(
    act: Callable[[], Any],
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> Any:
    """Retry after each pause; while the VM and its roles are fresh, also retry what Google refuses with 403."""
    pauses, began = iter(PAUSES), monotonic()
    while True:
        try:
            return act()
        except Exception as error:
            pause = next(pauses, None)
            if pause is None and getattr(error, "code", None) == FORBIDDEN and monotonic() - began < FRESH_SECONDS:
                pause = FRESH_PAUSE
            if pause is None:
                raise
            print(repr(error), flush=True)
        sleep(pause)


def read_metadata(path: str) -> str:
    return f"http://{os.environ.get('GCE_METADATA_HOST', 'metadata.google.internal')}/computeMetadata/v1/{path}"


def download_object(orders: dict[str, Any], path: str) -> str:
    return f"{orders['roots'].get('storage', 'https://storage.googleapis.com/')}{path}"


def token() -> dict[str, str]:
    """Fetch an access token (https://cloud.google.com/compute/docs/access/authenticate-workloads)."""
    return {"Authorization": f"Bearer {json.loads(send_request(read_metadata(TOKEN)))['access_token']}"}


def send_request(
    url: str, headers: dict[str, str] | None = None, data: bytes | None = None, method: str | None = None
) -> bytes:
    """Send a request to Google directly, never through a proxy."""
    wanted = {"Metadata-Flavor": "Google"} if "/computeMetadata/" in url else headers or {}
    request = Request(url, data=data, headers=wanted, method=method)  # noqa: S310 - the scheme is ours
    with build_opener(ProxyHandler({})).open(request, timeout=120) as answer:
        return answer.read()


if __name__ == "__main__":
    sys.exit(main())
