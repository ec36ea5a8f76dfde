"""Faults of requests, of connections, of disks and clocks, and when they strike."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from controller.localcloud.faults.spec import parse_fault
from tests.controller.localcloud.harness import NODES, EmulatedCloud, wait_for

BUCKET = "storage/v1/b?project=slipway-local"
OBJECT = "upload/storage/v1/b/bucket/o?uploadType=media&name="


def script(cloud: EmulatedCloud, *specs: dict[str, Any]) -> None:
    assert cloud.call_ok("POST", "emulator/faults", {"key": json.dumps(specs), "faults": list(specs)})["registered"]


def faults(cloud: EmulatedCloud) -> list[dict[str, Any]]:
    return list(cloud.call_ok("GET", "emulator/state")["fault"].values())


def names(cloud: EmulatedCloud) -> list[str]:
    return cloud.call_ok("GET", "emulator/state")["objects"].get("bucket", [])


def test_a_moment_drawn_from_a_seed_is_the_same_for_the_same_seed() -> None:
    def drawn(seed: int) -> float | None:
        return parse_fault({"kind": "preempted", "within_seconds": 10, "seed": seed}).seconds_after_ready()

    assert drawn(1) == drawn(1) != drawn(2)
    assert 0 < (drawn(1) or 0) < 10


def test_after_so_many_requests(fresh_cloud: EmulatedCloud) -> None:
    script(fresh_cloud, {"kind": "http", "status": 503, "match": "GET", "after_requests": 2})
    assert [fresh_cloud.call("GET", NODES)[0] for _ in range(4)] == [200, 200, 503, 200]
    assert len(faults(fresh_cloud)[0]["struck"]) == 1


@pytest.mark.parametrize(("at", "stored"), [("request", False), ("upload", False), ("answer", True)])
def test_a_connection_that_breaks_leaves_whole_objects_or_none(
    fresh_cloud: EmulatedCloud, at: str, stored: bool
) -> None:
    fresh_cloud.call_ok("POST", BUCKET, {"name": "bucket"})
    script(fresh_cloud, {"kind": "cut", "match": "POST .*name=thing", "at": at})
    with pytest.raises((http.client.HTTPException, urllib.error.URLError, ConnectionError)):
        fresh_cloud.send("POST", f"{OBJECT}thing", random.Random(1).randbytes(300_000))
    assert names(fresh_cloud) == ["thing"] * stored
    wait_for(lambda: fresh_cloud.send("POST", f"{OBJECT}thing", b"again")[0] == 200, "429 is over")


def test_an_upload_without_content_may_break_too(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.call_ok("POST", BUCKET, {"name": "bucket"})
    script(fresh_cloud, {"kind": "cut", "match": "POST .*name=thing", "at": "upload"})
    with pytest.raises((http.client.HTTPException, urllib.error.URLError, ConnectionError)):
        fresh_cloud.send("POST", f"{OBJECT}thing", b"")
    assert fresh_cloud.call_ok("GET", "emulator/state")["mistake"] == {}


def test_half_a_chunk_of_a_resumable_upload_is_kept_and_gone_on_with(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.call_ok("POST", BUCKET, {"name": "bucket"})
    content = random.Random(1).randbytes(1_200_000)
    begin = "upload/storage/v1/b/bucket/o?uploadType=resumable&name=thing"
    _, _, headers = fresh_cloud.send("POST", begin, b"{}", {"Content-Type": "application/json"})
    script(fresh_cloud, {"kind": "cut", "match": "POST .*name=thing", "at": "upload"})
    whole = {"Content-Range": f"bytes 0-{len(content) - 1}/{len(content)}"}
    with pytest.raises((http.client.HTTPException, urllib.error.URLError, ConnectionError)):
        fresh_cloud.send("PUT", headers["Location"], content, whole)
    status, _, told = fresh_cloud.send("PUT", headers["Location"], b"", {"Content-Range": f"bytes */{len(content)}"})
    kept = int(told["Range"].rpartition("-")[2]) + 1
    assert (status, kept) == (308, 2 * 256 * 1024)
    rest = {"Content-Range": f"bytes {kept}-{len(content) - 1}/{len(content)}"}
    assert fresh_cloud.send("PUT", headers["Location"], content[kept:], rest)[0] == 200
    got = fresh_cloud.send("GET", "storage/v1/b/bucket/o/thing?alt=media")[1]
    assert got == content


def test_a_brown_out_fails_a_share_of_the_requests_and_is_over(fresh_cloud: EmulatedCloud) -> None:
    script(fresh_cloud, {"kind": "brownout", "seconds": 1.5, "share": 0.5, "seed": 3})
    seen = []
    while faults(fresh_cloud)[0]["left"]:
        try:
            seen.append(fresh_cloud.call("GET", NODES)[0])
        except (http.client.HTTPException, urllib.error.URLError, ConnectionError):
            seen.append(0)
    assert {0, 200} < set(seen) <= {0, 200, 429, 503}
    assert fresh_cloud.call("GET", NODES)[0] == 200


def test_a_partition_cuts_off_the_laptop_alone(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.create_network("net")
    node = fresh_cloud.create_node("pod", "net")
    script(fresh_cloud, {"kind": "partition", "seconds": 600})
    with pytest.raises((http.client.HTTPException, urllib.error.URLError, ConnectionError)):
        fresh_cloud.call("GET", NODES)
    token = fresh_cloud.endpoint["token"]
    assert fresh_cloud.send("GET", f"w/{token}/{node['id']}/0/{BUCKET}", headers={"Authorization": ""})[0] == 200
    fresh_cloud.call_ok("DELETE", "emulator/faults")
    assert fresh_cloud.call("GET", NODES)[0] == 200


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are a thing of Linux")
def test_a_disk_is_full_for_a_while(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.create_network("net")
    node = fresh_cloud.create_node("pod", "net")
    running = "setsid sh -c 'while :; do echo x >> words || touch failed; sleep 0.05; done'"
    fresh_cloud.run_on_worker(node, f"trap '' XFSZ; {running} >/dev/null 2>&1 </dev/null &")
    script(fresh_cloud, {"kind": "disk_full", "seconds": 600, "worker": 0, "after_seconds": 0})
    wait_for(lambda: str(fresh_cloud.run_on_worker(node, "cat $SLIPWAY_FREE_GB").stdout) == "0", "the disk is full")
    write = "python3 -c \"import pathlib; pathlib.Path('x').write_text('word')\""
    assert "File too large" in str(fresh_cloud.run_on_worker(node, write).stderr)
    wait_for(lambda: "failed" in str(fresh_cloud.run_on_worker(node, "ls").stdout), "also of what ran before")


def test_the_clock_of_a_worker_is_wrong(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.create_network("net")
    node = fresh_cloud.create_node("pod", "net")
    script(fresh_cloud, {"kind": "worker_clock", "seconds": -3600, "after_seconds": 0})
    wait_for(
        lambda: str(fresh_cloud.run_on_worker(node, "cat $SLIPWAY_CLOCK").stdout) == "-3600.0", "the clock is wrong"
    )


def test_the_controller_is_killed(fresh_cloud: EmulatedCloud, tmp_path: Path) -> None:
    asks = (
        "import http.client, sys, time\n"
        "url, token = sys.argv[1:]\n"
        "connection = http.client.HTTPConnection(url.split('/')[2])\n"
        "while True:\n"
        f"    connection.request('GET', '/{NODES}', headers={{'Authorization': 'Bearer ' + token}})\n"
        "    connection.getresponse().read()\n"
        "    time.sleep(0.05)\n"
    )
    endpoint = fresh_cloud.endpoint
    (tmp_path / "slipway").write_text(asks)
    client = subprocess.Popen([sys.executable, str(tmp_path / "slipway"), endpoint["url"], endpoint["token"]])
    script(fresh_cloud, {"kind": "controller_killed", "after_requests": 3})
    assert client.wait(240) == -9
    wait_for(lambda: faults(fresh_cloud)[0]["struck"], "it is on record")
    assert faults(fresh_cloud)[0]["struck"][0] <= time.time()


def test_a_preemption_is_announced_to_the_vms_and_takes_those_nodes_alone(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.create_network("net")
    node = fresh_cloud.create_node("pod", "net")
    key = f"w/{fresh_cloud.endpoint['token']}/{node['id']}/0/computeMetadata/v1/instance/preempted"
    ask = {"Authorization": "", "Metadata-Flavor": "Google"}
    _, value, headers = fresh_cloud.send("GET", f"{key}?wait_for_change=true&last_etag=0", headers=ask)
    assert value == b"FALSE"
    script(fresh_cloud, {"kind": "preempted", "after_seconds": 0, "notice_seconds": 1.5})
    changed = f"{key}?wait_for_change=true&timeout_sec=60&last_etag={headers['ETag']}"
    assert fresh_cloud.send("GET", changed, headers=ask)[1] == b"TRUE"
    assert fresh_cloud.call_ok("GET", f"{NODES}/pod")["state"] == "READY"
    fresh_cloud.call_and_wait("DELETE", f"{NODES}/pod")
    fresh_cloud.create_node("pod", "net")
    wait_for(lambda: not fresh_cloud.call_ok("GET", "emulator/state").get("notice"), "the time of the notice is over")
    assert fresh_cloud.call_ok("GET", f"{NODES}/pod")["state"] == "READY"


def test_one_node_may_be_preempted_and_the_others_stay(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.create_network("net")
    for name in ("pod", "pod-2"):
        fresh_cloud.create_node(name, "net")
    script(fresh_cloud, {"kind": "preempted", "after_seconds": 0, "node": "pod"})
    wait_for(lambda: fresh_cloud.call_ok("GET", f"{NODES}/pod")["state"] == "PREEMPTED", "it is preempted")
    assert fresh_cloud.call_ok("GET", f"{NODES}/pod-2")["state"] == "READY"


def test_maintenance_is_announced(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.create_network("net")
    node = fresh_cloud.create_node("pod", "net")
    host_keys = f"tpu/v2/{node['name']}:getGuestAttributes"
    wait_for(lambda: fresh_cloud.call("POST", host_keys, {})[0] == 200, "it has published its host key")
    before = fresh_cloud.call_ok("POST", host_keys, {})
    key = f"w/{fresh_cloud.endpoint['token']}/{node['id']}/0/computeMetadata/v1/instance/maintenance-event"
    ask = {"Authorization": "", "Metadata-Flavor": "Google"}
    script(fresh_cloud, {"kind": "maintenance", "seconds": 0.1, "after_seconds": 0, "notice_seconds": 3})
    wait_for(lambda: b"TERMINATE" in fresh_cloud.send("GET", key, headers=ask)[1], "it is announced")
    wait_for(lambda: fresh_cloud.send("GET", key, headers=ask)[1] == b"NONE", "it is over")
    wait_for(lambda: fresh_cloud.call("POST", host_keys, {})[0] == 200, "it is READY again")
    assert fresh_cloud.call_ok("POST", host_keys, {}) != before, "a rebuilt VM has another host key"
