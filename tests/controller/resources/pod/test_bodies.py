"""What is sent to make a pod, what is read from the answers, and the pod's dead man's switch."""

import io
import json
import os
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.error import HTTPError

import pytest

from controller.agent.fs import note_worker
from controller.context import Context
from controller.core.this_process import InterruptedSleepError
from controller.gcp.answers import parse_timestamp
from controller.resources.dead_mans_switch import NEVER, delete_pod, last_sign, read_limits, told_workers, watch
from controller.resources.pod import tpu_nodes
from controller.resources.pod.planes import waits_in_queue
from controller.resources.pod.provisioner import Place, SliceSpec, mount_part, startup_script, switch_part
from controller.resources.pod.slices import Slices
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context

SPEC = SliceSpec(
    workers=1, accelerator_type="v4-8", runtime_version="tpu-ubuntu2204-base", network="net1", external_ip=False,
    service_account="sa",
)  # fmt: skip
PLACE = Place("us-central2-b", "spot", "sub1", "node")
QUEUED = replace(PLACE, provisioner="queued")


@pytest.fixture
def context(tmp_path: Path) -> Context:
    google = SimpleNamespace(root=lambda api: f"https://{api}.googleapis.com/")
    return make_context(google, tmp_path, project="p1")


@pytest.mark.parametrize(
    ("capacity", "fields"),
    [
        ("on_demand", {"guaranteed": {}}),
        ("reserved", {"reservationName": "projects/p1/locations/us-central2-b/reservations/mine"}),
        ("flex_start", {"provisioningModel": "FLEX_START", "runDuration": {"maxRunDuration": "604800s"}}),
    ],
)
def test_the_other_tiers(context: Context, capacity: str, fields: dict[str, Any]) -> None:
    sent = tpu_nodes.request_body(context, "n1", replace(SPEC, reservation="mine"), replace(QUEUED, capacity=capacity))
    assert {k: v for k, v in sent.items() if k != "tpu"} == fields


def test_a_data_disk_is_attached_and_mounted_by_the_node_itself(context: Context) -> None:
    sent = tpu_nodes.node_body(context, "n1", replace(SPEC, data_disk_gb=100), PLACE)
    assert sent["dataDisks"] == [{"sourceDisk": "projects/p1/zones/us-central2-b/disks/n1-data", "mode": "READ_WRITE"}]
    script = sent["metadata"]["startup-script"]
    assert str(100 * 2**30) in script
    assert script.index("blkid") < script.index("mkfs") < script.index("mount")
    assert "startup-script" not in tpu_nodes.node_body(context, "n1", SPEC, PLACE)["metadata"]


def test_a_pod_starts_its_dead_mans_switch_unless_that_is_off(context: Context) -> None:
    limited = replace(SPEC, heartbeat_timeout_seconds=7200.0)
    where = "https://tpu.googleapis.com/v2/projects/p1/locations/us-central2-b"
    switch = f"7200 '{where}/queuedResources/n1?force=true' {where}/nodes/n1 <"
    for body, mounts in (
        (tpu_nodes.node_body(context, "n1", limited, PLACE), False),
        (tpu_nodes.request_body(context, "n1", limited, QUEUED)["tpu"]["nodeSpec"][0]["node"], False),
        (tpu_nodes.node_body(context, "n1", replace(limited, data_disk_gb=100), PLACE), True),
    ):
        assert switch in body["metadata"]["startup-script"]
        assert ("lsblk" in body["metadata"]["startup-script"]) == mounts


def test_times_are_read_to_the_microsecond() -> None:
    assert parse_timestamp("2026-11-20T23:28:17.123456789Z") == pytest.approx(1795217297.123456)
    assert parse_timestamp("2026-11-20T23:28:17Z") == 1795217297
    assert parse_timestamp(None) == 0


REQUEST = {
    "name": "projects/p/locations/us-central2-b/queuedResources/q",
    "createTime": "2026-11-20T00:00:00Z",
    "spot": {},
    "queueingPolicy": {"validUntilDuration": "3600s"},
    "tpu": {"nodeSpec": [{"node": {"acceleratorType": "v4-8", "labels": {"managed-by": "slipway"}}}]},
}
NODE = {"name": "projects/p/locations/us-central2-b/nodes/q", "id": "1", "acceleratorType": "v4-8"}
CREATED = parse_timestamp("2026-11-20T00:00:00Z")


@pytest.mark.parametrize(
    ("state", "of_node", "later", "seen", "pending"),
    [
        ("ACCEPTED", None, 10, "ACCEPTED", True),
        ("WAITING_FOR_RESOURCES", None, 10, "WAITING_FOR_RESOURCES", True),
        ("WAITING_FOR_RESOURCES", None, 3601, "EXPIRED", False),
        ("PROVISIONING", "CREATING", 10, "PROVISIONING", True),
        ("ACTIVE", "READY", 9999, "READY", False),
        ("ACTIVE", "REPAIRING", 10, "REPAIRING", True),
        ("ACTIVE", "PREEMPTED", 10, "PREEMPTED", False),
        ("ACTIVE", None, 10, "GONE", False),
        ("SUSPENDING", "PREEMPTED", 10, "SUSPENDING", True),
        ("SUSPENDED", "PREEMPTED", 10, "PREEMPTED", False),
        ("SUSPENDED", "READY", 10, "SUSPENDED", False),
        ("SUSPENDING", "DELETING", 10, "SUSPENDING", True),
        ("SUSPENDED", None, 10, "SUSPENDED", False),
        ("FAILED", None, 10, "FAILED", False),
        ("DELETING", None, 10, "DELETING", True),
    ],
)
def test_a_request_and_its_node_are_one_thing(
    state: str, of_node: str | None, later: float, seen: str, pending: bool
) -> None:
    answer = None if of_node is None else {**NODE, "state": of_node}
    found = tpu_nodes.parse_request({**REQUEST, "state": {"state": state}}, answer, CREATED + later)
    assert (found.state, found.pending) == (seen, pending)
    assert found.place.zone == "us-central2-b"
    assert waits_in_queue(found.place)


def test_what_a_waiting_request_wants_is_known_from_it() -> None:
    found = tpu_nodes.parse_request({**REQUEST, "state": {"state": "ACCEPTED"}}, None, CREATED)
    assert (found.spec.accelerator_type, found.place.capacity) == ("v4-8", "spot")
    assert found.labels == (("managed-by", "slipway"),)
    assert found.uid == ""


@pytest.mark.parametrize(
    ("answer", "repaired"),
    [
        ({"state": "READY", "health": "HEALTHY"}, []),
        ({"state": "REPAIRING"}, ["7"]),
        ({"state": "READY", "health": "UNHEALTHY_MAINTENANCE"}, ["7"]),
        ({"state": "READY", "upcomingMaintenance": {"maintenanceStatus": "ONGOING"}}, ["7"]),
        ({"state": "READY", "upcomingMaintenance": {"maintenanceStatus": "PENDING"}}, []),
    ],
)
def test_a_repair_that_google_reports_lets_host_keys_change(
    answer: dict[str, Any], repaired: list[str], tmp_path: Path
) -> None:
    told: list[str] = []
    status = tpu_nodes.parse_node({**NODE, "id": "7", **answer})
    api = SimpleNamespace(observe=lambda context, name, zone: status)
    fleets = SimpleNamespace(expect_new_host_keys=told.append)
    context = SimpleNamespace(fleets=fleets, state_dir=tmp_path, refused_since={})
    slices = Slices("q", ["us-central2-b"], {"node": cast(Any, api)})
    assert slices.find(cast(Any, context)) is status
    assert told == repaired


METADATA_VALUE_BYTES = 256 << 10
"""https://cloud.google.com/compute/docs/metadata/setting-custom-metadata#limitations"""
REQUEST_URL, NODE_URL = "projects/p/locations/z/queuedResources/pod?force=true", "projects/p/locations/z/nodes/pod"


def strikes(
    limit: float,
    signs: dict[float, float | None],
    until: float,
    refusal: type[Exception] | None = None,
    limits: tuple[float, float] = (NEVER, NEVER),
) -> list[float]:
    """When the pod is deleted, if the sign of life changes at these times; Google may refuse it."""
    clock, struck = ManualClock(), list[float]()
    clock.interrupt_at = until + 1

    def sign() -> tuple[float, ...] | None:
        value = next((value for at, value in reversed(signs.items()) if at <= clock.elapsed), 0.0)
        return None if value is None else (value,)

    def strike() -> None:
        struck.append(clock.elapsed)
        if refusal is not None:
            raise refusal

    with pytest.raises(InterruptedSleepError):
        watch(limit, sign, strike, clock.monotonic, clock.sleep, lambda _: limits)
    return struck


EVERY_MINUTE: dict[float, float | None] = {60.0 * minute: float(minute) for minute in range(1, 61)}
EVERY_HOUR: dict[float, float | None] = {3600.0 * hour: float(hour) for hour in range(1, 200)}


@pytest.mark.parametrize(
    ("signs", "until", "expected"),
    [
        ({}, 7300.0, [7200.0, 7230.0, 7260.0, 7290.0]),  # again and again until it is gone
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


@pytest.mark.parametrize(
    ("limits", "signs", "first"),
    [
        ((1000.0, NEVER), EVERY_MINUTE, 1030.0),  # the budget, though a program runs
        ((NEVER, 600.0), {0.0: 1.0}, 630.0),  # idle, as the watchdog would say
        ((NEVER, 600.0), EVERY_MINUTE, 3600.0 + 630.0),
        ((1000.0, NEVER), {0.0: None}, 1030.0),  # a login does not prolong a budget
    ],
)
def test_it_enforces_the_limits_of_a_dead_watchdog_within_two_minutes(
    limits: tuple[float, float], signs: dict[float, float | None], first: float
) -> None:
    struck = strikes(7200.0, signs, 7100.0, limits=limits)
    assert first <= struck[0] <= first + 60.0


def test_limits_are_those_of_this_boot_and_what_is_left_of_another(tmp_path: Path) -> None:
    folder = tmp_path / ".slipway"
    folder.mkdir()
    known: dict[str, Any] = {"boot_id": "b1", "until": 500.0, "seconds_left": 300.0, "idle_seconds": 60.0}
    for text, expected in (
        (json.dumps(known), (500.0, 60.0)),
        (json.dumps(known | {"boot_id": "b0"}), (310.0, 60.0)),
        (json.dumps(known | {"until": None, "seconds_left": None}), (NEVER, 60.0)),
        (json.dumps(known | {"idle_seconds": None}), (500.0, NEVER)),
        *((text, (NEVER, NEVER)) for text in ("", "{", "[1]", "5")),
        (json.dumps(known | {"until": "soon"}), (NEVER, 60.0)),
        (json.dumps(known | {"idle_seconds": -1.0}), (500.0, NEVER)),
        (json.dumps(known | {"until": 10**400}), (NEVER, 60.0)),
    ):
        (folder / "watchdog.json").write_text(text)
        assert read_limits([str(tmp_path)], "b1", 10.0, {}) == expected, text[:99]


def test_a_refusal_does_not_end_it() -> None:
    assert len(strikes(100.0, {0.0: 1.0}, 300.0, PermissionError)) > 2


def test_the_heartbeat_of_any_user_counts_and_so_does_a_login(tmp_path: Path) -> None:
    homes, proc = [f"{tmp_path}/home/*", f"{tmp_path}/root"], str(tmp_path / "proc")
    assert last_sign(homes, proc) == ()
    for name, time in (("home/anna", 5.0), ("home/ben", 9.0), ("root", 7.0)):
        folder = tmp_path / name / ".slipway"
        folder.mkdir(parents=True)
        (folder / "heartbeat").touch()
        os.utime(folder / "heartbeat", (time, time))
    assert last_sign(homes, proc) == (5.0, 7.0, 9.0)
    os.utime(tmp_path / "home/anna/.slipway/heartbeat", (4.0, 4.0))
    assert last_sign(homes, proc) == (4.0, 7.0, 9.0), "her clock was set back, and ben has left"
    for pid, title in {7: b"sshd: /usr/sbin/sshd -D\0", 8: b"bash\0me@pts\0"}.items():
        (tmp_path / "proc" / str(pid)).mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "cmdline").write_bytes(title)
    assert last_sign(homes, proc) == (4.0, 7.0, 9.0)
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


def test_a_vm_knows_which_worker_it_is_from_the_agents_of_all_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = [f"{tmp_path}/home/*", f"{tmp_path}/root"]
    for number, (home, told) in enumerate([("home/anna", {2}), ("home/ben", {2}), ("root", {0, 2})]):
        monkeypatch.setenv("SLIPWAY_AGENT_ROOT", f"{tmp_path}/{home}/.slipway")
        assert told_workers(homes) == (set() if not number else {2})
        note_worker(0 if home == "root" else 2)
        assert told_workers(homes) == told
    numbers = (
        '{"index": 1e999}',
        '{"index": true}',
        '{"index": 0.0}',
        '{"index": 0, "index": 1}',
        '{"index": ' + "9" * 5000,
    )
    for damage in ("", "{", "[1]", '{"format": 1}', '{"index": "two"}', '{"index": null}', "[" * 999, *numbers):
        (tmp_path / "root/.slipway/worker.json").write_text(damage)
        assert told_workers(homes) == {2}, damage


@pytest.mark.parametrize(
    ("told", "number", "deletes"),
    [
        ({0}, None, True),
        ({1}, None, False),
        ({15}, "0", False),
        ({0, 3}, "3", True),
        (set(), None, True),
        (set(), "2", False),
    ],
)
def test_what_the_controller_said_counts_before_the_metadata(told: set[int], number: str | None, deletes: bool) -> None:
    """Compute Engine has no `agent-worker-number`, and the others than worker 0 do not see whether a pod is in use."""
    google = Google(number)
    delete_pod(["https://tpu.googleapis.com/v2/pod"], told, google)
    assert google.deleted == ["pod"] * deletes


@pytest.mark.parametrize(
    ("google", "asked"),
    [
        (Google(), [REQUEST_URL]),
        (Google(refuse={REQUEST_URL: 404}), [REQUEST_URL, NODE_URL]),
        (Google(refuse={REQUEST_URL: 403}), [REQUEST_URL, NODE_URL]),
        (Google("3"), []),
        (Google(None), [REQUEST_URL]),
        (Google(refuse={REQUEST_URL: 404, NODE_URL: 403}), [REQUEST_URL, NODE_URL]),
    ],
)
def test_worker_0_deletes_the_request_or_else_the_node(google: Google, asked: list[str]) -> None:
    with pytest.raises(HTTPError) if NODE_URL in google.refuse else nullcontext():
        delete_pod([f"https://tpu.googleapis.com/v2/{path}" for path in (REQUEST_URL, NODE_URL)], set(), google)
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
    assert words[:2] == ["bash", "-c"]
    assert words[5:] == ["7200", hostile, "b", ""]
    compile(words[4], "switch", "exec")
    (tools / "python3").write_text('#!/bin/sh\nprintf "%s\\0" "$@" >> python; echo >> runs; [ $(wc -l < runs) = 2 ]\n')
    (tools / "sleep").write_text("#!/bin/sh\n")
    for name in ("python3", "sleep"):
        (tools / name).chmod(0o700)
    subprocess.run([*words[:4], "source", *words[5:-1]], cwd=tmp_path, env=variables, check=True)
    once = ["-I", "-S", "-c", "source", "7200", hostile, "b"]
    assert (tmp_path / "python").read_text().split("\0") == [*once, *once, ""], "killed, it is started again"
    assert not (tmp_path / "hit").exists()
    with_disk = startup_script(mount_part(100), switch_part(60.0, ["a"]))
    assert with_disk.startswith("#!/bin/bash\n")
    assert with_disk.index("mkfs") < with_disk.index("setsid")
    subprocess.run(["bash", "-n"], input=with_disk, text=True, check=True)
