"""The dead man's switch: when it strikes, what counts as a sign of life, and what it asks of whom."""

from __future__ import annotations

import io
import json
import os
from email.message import Message
from pathlib import Path
from urllib.error import HTTPError

import pytest

from controller.core.clock import InterruptedSleepError
from controller.resources.pod.dead_mans_switch import delete_pod, last_sign, watch
from tests.fakes.clock import ManualClock

QUEUED, NODE = "projects/p/locations/z/queuedResources/pod?force=true", "projects/p/locations/z/nodes/pod"


def strikes(limit: float, signs: dict[float, float | None], until: float) -> list[float]:
    """When the pod is deleted, if the sign of life changes at these times."""
    clock, struck = ManualClock(), list[float]()
    clock.interrupt_at = until + 1

    def sign() -> float | None:
        return next((value for at, value in reversed(signs.items()) if at <= clock.elapsed), 0.0)

    with pytest.raises(InterruptedSleepError):
        watch(limit, sign, lambda: struck.append(clock.elapsed), clock.monotonic, clock.sleep)
    return struck


def test_a_pod_without_a_sign_of_life_is_deleted_again_and_again_until_it_is_gone() -> None:
    assert strikes(7200.0, {}, until=7400.0) == [7200.0, 7260.0, 7320.0, 7380.0]


def test_a_busy_pod_is_left_alone() -> None:
    every_hour = {3600.0 * hour: float(hour) for hour in range(1, 200)}
    assert strikes(7200.0, every_hour, until=3600.0 * 200) == []
    assert strikes(7200.0, every_hour, until=3600.0 * 201)[0] == 3600.0 * 199 + 7200.0


def test_a_login_is_a_sign_of_life_though_slipway_is_silent() -> None:
    assert strikes(7200.0, {0.0: None, 36_000.0: 1.0}, until=44_000.0)[0] == 36_000.0 + 7200.0


def test_a_refusal_does_not_end_it() -> None:
    clock, asked = ManualClock(), list[float]()
    clock.interrupt_at = 301.0

    def refused() -> None:
        asked.append(clock.elapsed)
        raise PermissionError

    with pytest.raises(InterruptedSleepError):
        watch(100.0, lambda: 1.0, refused, clock.monotonic, clock.sleep)
    assert len(asked) > 10


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


def asked(google: Google) -> list[str]:
    delete_pod([f"https://tpu.googleapis.com/v2/{path}" for path in (QUEUED, NODE)], google)
    return google.deleted


def test_worker_0_deletes_the_request_or_else_the_node() -> None:
    assert asked(Google()) == [QUEUED]
    assert asked(Google(refuse={QUEUED: 404})) == [QUEUED, NODE]
    assert asked(Google("3")) == []
    assert asked(Google(None)) == [QUEUED]


def test_a_refused_request_does_not_keep_it_from_the_node() -> None:
    google = Google(refuse={QUEUED: 403})
    assert asked(google) == [QUEUED, NODE]
    google = Google(refuse={QUEUED: 404, NODE: 403})
    with pytest.raises(HTTPError):
        asked(google)
