"""The dead man's switch: how it starts, when it strikes, what counts as a sign of life, and what it asks of whom."""

from __future__ import annotations

import io
import json
import os
import subprocess
from contextlib import nullcontext
from email.message import Message
from pathlib import Path
from urllib.error import HTTPError

import pytest

from controller.core.clock import InterruptedSleepError
from controller.resources.pod.data_disk import mount_part
from controller.resources.pod.dead_mans_switch import delete_pod, last_sign, watch
from controller.resources.pod.startup_script import startup_script, switch_part
from tests.fakes.clock import ManualClock

METADATA_VALUE_BYTES = 256 << 10
"""https://cloud.google.com/compute/docs/metadata/setting-custom-metadata#limitations"""
QUEUED, NODE = "projects/p/locations/z/queuedResources/pod?force=true", "projects/p/locations/z/nodes/pod"


def strikes(
    limit: float, signs: dict[float, float | None], until: float, refusal: type[Exception] | None = None
) -> list[float]:
    """When the pod is deleted, if the sign of life changes at these times; Google may refuse it."""
    clock, struck = ManualClock(), list[float]()
    clock.interrupt_at = until + 1

    def sign() -> float | None:
        return next((value for at, value in reversed(signs.items()) if at <= clock.elapsed), 0.0)

    def strike() -> None:
        struck.append(clock.elapsed)
        if refusal is not None:
            raise refusal

    with pytest.raises(InterruptedSleepError):
        watch(limit, sign, strike, clock.monotonic, clock.sleep)
    return struck


EVERY_HOUR: dict[float, float | None] = {3600.0 * hour: float(hour) for hour in range(1, 200)}


@pytest.mark.parametrize(
    ("signs", "until", "expected"),
    [
        ({}, 7400.0, [7200.0, 7260.0, 7320.0, 7380.0]),  # again and again until it is gone
        (EVERY_HOUR, 3600.0 * 200, []),
        (EVERY_HOUR, 3600.0 * 199 + 7201.0, [3600.0 * 199 + 7200.0]),
        ({0.0: None, 36_000.0: 1.0}, 36_000.0 + 7201.0, [36_000.0 + 7200.0]),  # a login, though Slipway is silent
    ],
    ids=["silent", "busy", "no longer busy", "a login"],
)
def test_it_strikes_where_there_is_no_sign_of_life(
    signs: dict[float, float | None], until: float, expected: list[float]
) -> None:
    assert strikes(7200.0, signs, until) == expected


def test_a_refusal_does_not_end_it() -> None:
    assert len(strikes(100.0, {0.0: 1.0}, 300.0, PermissionError)) > 2


def test_the_heartbeat_of_any_user_counts_and_so_does_a_login(tmp_path: Path) -> None:
    homes, proc = [f"{tmp_path}/home/*", f"{tmp_path}/root"], str(tmp_path / "proc")
    assert last_sign(homes, proc) == 0.0
    for name, time in (("home/anna", 5.0), ("home/ben", 9.0), ("root", 7.0)):
        folder = tmp_path / name / ".slipway"
        folder.mkdir(parents=True)
        (folder / "heartbeat").touch()
        os.utime(folder / "heartbeat", (time, time))
    assert last_sign(homes, proc) == 9.0
    for pid, title in {7: b"sshd: /usr/sbin/sshd -D\0", 8: b"bash\0me@pts\0"}.items():
        (tmp_path / "proc" / str(pid)).mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "cmdline").write_bytes(title)
    assert last_sign(homes, proc) == 9.0
    (tmp_path / "proc" / "8" / "cmdline").write_bytes(b"sshd: anna@notty\0")
    assert last_sign(homes, proc) is None


class Google:
    """The metadata server and the TPU API."""

    def __init__(self, number: str | None = "0", refuse: dict[str, int] | None = None) -> None:
        self.number, self.refuse, self.deleted = number, refuse or {}, list[str]()

    def __call__(self, method: str, url: str, headers: dict[str, str]) -> bytes:
        if method == "GET":
            assert headers == {"Metadata-Flavor": "Google"}
            if url.endswith("attributes/agent-worker-number"):
                if self.number is None:
                    raise HTTPError(url, 404, "", Message(), io.BytesIO())
                return self.number.encode()
            return json.dumps({"access_token": "ya29.pod"}).encode()
        assert headers == {"Authorization": "Bearer ya29.pod"}
        resource = url.removeprefix("https://tpu.googleapis.com/v2/")
        self.deleted.append(resource)
        if status := self.refuse.get(resource):
            raise HTTPError(url, status, "", Message(), io.BytesIO(b"no"))
        return b"{}"


@pytest.mark.parametrize(
    ("google", "asked"),
    [
        (Google(), [QUEUED]),
        (Google(refuse={QUEUED: 404}), [QUEUED, NODE]),
        (Google(refuse={QUEUED: 403}), [QUEUED, NODE]),
        (Google("3"), []),
        (Google(None), [QUEUED]),
        (Google(refuse={QUEUED: 404, NODE: 403}), [QUEUED, NODE]),
    ],
)
def test_worker_0_deletes_the_request_or_else_the_node(google: Google, asked: list[str]) -> None:
    with pytest.raises(HTTPError) if NODE in google.refuse else nullcontext():
        delete_pod([f"https://tpu.googleapis.com/v2/{path}" for path in (QUEUED, NODE)], google)
    assert google.deleted == asked


def test_it_starts_the_switch_in_the_background_with_exactly_its_arguments(tmp_path: Path) -> None:
    hostile = """it's "$(touch hit)" `touch hit` \\ END_OF_DEAD_MANS_SWITCH"""
    script = startup_script("mounted=yes\n", switch_part(7200.0, [hostile, "b"]))
    assert len(script.encode()) < METADATA_VALUE_BYTES / 10
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "setsid").write_text('#!/bin/sh\nprintf "%s\\0" "$@" > seen\n')
    (tools / "setsid").chmod(0o700)
    (tmp_path / "script").write_text(script)
    variables = {"PATH": f"{tools}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    subprocess.run(["bash", "-c", ". ./script; wait"], cwd=tmp_path, env=variables, check=True)
    words = (tmp_path / "seen").read_text().split("\0")
    assert words[:4] == ["python3", "-I", "-S", "-c"]
    assert words[5:] == ["7200", hostile, "b", ""]
    compile(words[4], "switch", "exec")
    assert not (tmp_path / "hit").exists()
    with_disk = startup_script(mount_part(100), switch_part(60.0, ["a"]))
    assert with_disk.startswith("#!/bin/bash\n")
    assert with_disk.index("mkfs") < with_disk.index("setsid")
    subprocess.run(["bash", "-n"], input=with_disk, text=True, check=True)
