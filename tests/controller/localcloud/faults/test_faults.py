"""Faults of requests, of connections, of disks and clocks, and when they strike."""

import http.client
import random
import subprocess
import sys
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from controller.localcloud.faults.spec import KINDS, TRIGGERS, parse_fault
from controller.localcloud.http.errors import ApiError
from tests.controller.localcloud.harness import (
    COMPUTE,
    LOCATION,
    NODES,
    PROJECT,
    QUEUED,
    RUNTIME,
    ZONE,
    EmulatedCloud,
    wait_for,
)

BUCKET = "storage/v1/b?project=slipway-local"
OBJECT = "upload/storage/v1/b/bucket/o?uploadType=media&name="


BROKEN = (http.client.HTTPException, urllib.error.URLError, ConnectionError)


def faults(cloud: EmulatedCloud) -> list[dict[str, Any]]:
    return list(cloud.call_ok("GET", "emulator/state")["fault"].values())


def test_a_moment_drawn_from_a_seed_is_the_same_for_the_same_seed() -> None:
    def drawn(seed: int) -> float | None:
        return parse_fault({"kind": "preempted", "within_seconds": 10, "seed": seed}).seconds_after_ready()

    assert drawn(1) == drawn(1) != drawn(2)
    assert 0 < (drawn(1) or 0) < 10


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": ["preempted"]}, f"known: {', '.join(KINDS)}"),
        ({"kind": "preemptd"}, f"known: {', '.join(KINDS)}"),
        ({"kind": "preempt", "after_seconds": 1}, "unknown kind 'preempt'; did you mean preempted? known: preempted, "),
        ({"kind": "meteor"}, "unknown kind 'meteor'; known: preempted, "),
        ({}, f"has no kind; known: {', '.join(KINDS)}"),
        ({"kind": "preempted"}, f"preempted: needs exactly one of {', '.join(TRIGGERS[:-1])} and {TRIGGERS[-1]}"),
        ({"kind": "frozen", "worker": 1}, "exactly one of after_object, after_seconds"),
        ({"kind": "preempted", "after_object": "a", "after_seconds": 1}, "exactly one of"),
        ({"kind": "brownout", "seconds": 1, "share": 0.5, "after_object": "a", "after_requests": 1}, "at most one of"),
        ({"kind": "brownout", "seconds": 1, "share": 1.5}, "share: input should be less than or equal to 1"),
        ({"kind": "cut", "match": "x", "at": "end"}, "at: input should be 'request', 'upload' or 'answer'"),
        ({"kind": "disk_full", "seconds": 1}, "exactly one of"),
        ({"kind": "preempted", "after_step": 3, "after_object": "a"}, "unknown key after_step; keys: kind, "),
        ({"kind": "preempted", "after_seconds": -1}, "preempted: after_seconds: input should be greater than or equal"),
        ({"kind": "stockout", "times": 0}, "times: input should be greater than or equal to 1"),
        ({"kind": "http", "status": 200, "match": "x"}, "status: input should be greater"),
        ({"kind": "http", "status": 503, "match": "("}, "match: "),
        ({"kind": "ssh_refused"}, "seconds: field required"),
    ],
)
def test_a_wrong_fault_is_refused(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=r"^cloud\.faults: ") as refusal:
        parse_fault(spec)
    assert refusal.value.code == 400
    assert words in refusal.value.message


def test_faults_are_registered_all_or_none(cloud: EmulatedCloud) -> None:
    specs = [{"kind": "stockout"}, {"kind": "unknown"}]
    cloud.refused("POST", "emulator/faults", {"key": "half", "faults": specs}, 400)
    cloud.refused("POST", "emulator/faults", {"key": "", "faults": []}, 400)
    assert not faults(cloud)


def test_requests_fail_as_they_match_and_after_so_many(cloud: EmulatedCloud) -> None:
    cloud.script({"kind": "http", "status": 503, "match": "GET .*/nodes$", "times": 2})
    codes = [cloud.call("GET", NODES)[0] for _ in range(3)]
    assert codes == [503, 503, 200] == [entry["status"] for entry in cloud.request_log()[-3:]]
    cloud.call_ok("DELETE", "emulator/faults")
    cloud.script({"kind": "http", "status": 503, "match": "GET", "after_requests": 2})
    assert [cloud.call("GET", NODES)[0] for _ in range(4)] == [200, 200, 503, 200]
    assert len(faults(cloud)[0]["struck"]) == 1


def test_a_connection_that_breaks_leaves_whole_objects_or_none(cloud: EmulatedCloud) -> None:
    cloud.call_ok("POST", BUCKET, {"name": "bucket"})
    content = random.Random(1).randbytes(300_000)
    for at, sent, stored in (("request", content, []), ("upload", content, []), ("upload", b"", []),
                             ("answer", content, ["thing"])):  # fmt: skip
        cloud.script({"kind": "cut", "match": "POST .*name=thing", "at": at})
        with pytest.raises(BROKEN):
            cloud.send("POST", f"{OBJECT}thing", sent)
        assert cloud.call_ok("GET", "emulator/state")["objects"].get("bucket", []) == stored
    wait_for(lambda: cloud.send("POST", f"{OBJECT}thing", b"again")[0] == 200, "429 is over")


def test_half_a_chunk_of_a_resumable_upload_is_kept_and_gone_on_with(cloud: EmulatedCloud) -> None:
    cloud.call_ok("POST", BUCKET, {"name": "chunks"})
    content = random.Random(1).randbytes(1_200_000)
    begin = "upload/storage/v1/b/chunks/o?uploadType=resumable&name=thing"
    _, _, headers = cloud.send("POST", begin, b"{}", {"Content-Type": "application/json"})
    cloud.script({"kind": "cut", "match": "POST .*name=thing", "at": "upload"})
    whole = {"Content-Range": f"bytes 0-{len(content) - 1}/{len(content)}"}
    with pytest.raises(BROKEN):
        cloud.send("PUT", headers["Location"], content, whole)
    status, _, told = cloud.send("PUT", headers["Location"], b"", {"Content-Range": f"bytes */{len(content)}"})
    kept = int(told["Range"].rpartition("-")[2]) + 1
    assert (status, kept) == (308, 2 * 256 * 1024)
    rest = {"Content-Range": f"bytes {kept}-{len(content) - 1}/{len(content)}"}
    assert cloud.send("PUT", headers["Location"], content[kept:], rest)[0] == 200
    got = cloud.send("GET", "storage/v1/b/chunks/o/thing?alt=media")[1]
    assert got == content


def test_a_brown_out_fails_a_share_of_the_requests_and_is_over(cloud: EmulatedCloud) -> None:
    cloud.script({"kind": "brownout", "seconds": 1.5, "share": 0.5, "seed": 3})
    seen = []
    while faults(cloud)[0]["left"]:
        try:
            seen.append(cloud.call("GET", NODES)[0])
        except BROKEN:
            seen.append(0)
    assert {0, 200} < set(seen) <= {0, 200, 429, 503}
    assert cloud.call("GET", NODES)[0] == 200


def test_a_partition_cuts_off_the_laptop_alone(fresh_cloud: EmulatedCloud) -> None:
    node = fresh_cloud.create_pod()
    fresh_cloud.script({"kind": "partition", "seconds": 600})
    with pytest.raises(BROKEN):
        fresh_cloud.call("GET", NODES)
    token = fresh_cloud.endpoint["token"]
    assert fresh_cloud.send("GET", f"w/{token}/{node['id']}/0/{BUCKET}", headers={"Authorization": ""})[0] == 200
    fresh_cloud.call_ok("DELETE", "emulator/faults")
    assert fresh_cloud.call("GET", NODES)[0] == 200


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are a thing of Linux")
def test_a_disk_is_full_and_a_clock_wrong_for_a_while(fresh_cloud: EmulatedCloud) -> None:
    node = fresh_cloud.create_pod()
    running = "setsid sh -c 'while :; do echo x >> words || touch failed; sleep 0.05; done'"
    fresh_cloud.run_on_worker(node, f"trap '' XFSZ; {running} >/dev/null 2>&1 </dev/null &")
    full = {"kind": "disk_full", "seconds": 600, "worker": 0, "after_seconds": 0}
    fresh_cloud.script(full, {"kind": "worker_clock", "seconds": -3600, "after_seconds": 0})
    wait_for(lambda: str(fresh_cloud.run_on_worker(node, "cat $SLIPWAY_FREE_GB").stdout) == "0", "the disk is full")
    write = "python3 -c \"import pathlib; pathlib.Path('x').write_text('word')\""
    assert "File too large" in str(fresh_cloud.run_on_worker(node, write).stderr)
    wait_for(lambda: "failed" in str(fresh_cloud.run_on_worker(node, "ls").stdout), "also of what ran before")
    clock = "cat $SLIPWAY_CLOCK"
    wait_for(lambda: str(fresh_cloud.run_on_worker(node, clock).stdout) == "-3600.0", "the clock is wrong")


def test_the_controller_is_killed(cloud: EmulatedCloud, tmp_path: Path) -> None:
    asks = (
        "import http.client, sys, time\n"
        "url, token = sys.argv[1:]\n"
        "connection = http.client.HTTPConnection(url.split('/')[2])\n"
        "while True:\n"
        f"    connection.request('GET', '/{NODES}', headers={{'Authorization': 'Bearer ' + token}})\n"
        "    connection.getresponse().read()\n"
        "    time.sleep(0.05)\n"
    )
    endpoint = cloud.endpoint
    (tmp_path / "slipway").write_text(asks)
    client = subprocess.Popen([sys.executable, str(tmp_path / "slipway"), endpoint["url"], endpoint["token"]])
    cloud.script({"kind": "controller_killed", "after_requests": 3})
    assert client.wait(240) == -9
    wait_for(lambda: faults(cloud)[0]["struck"], "it is on record")
    assert faults(cloud)[0]["struck"][0] <= time.time()


def test_a_preemption_is_announced_to_the_vms_and_takes_those_nodes_alone(fresh_cloud: EmulatedCloud) -> None:
    node = fresh_cloud.create_pod()
    key = f"w/{fresh_cloud.endpoint['token']}/{node['id']}/0/computeMetadata/v1/instance/preempted"
    ask = {"Authorization": "", "Metadata-Flavor": "Google"}
    _, value, headers = fresh_cloud.send("GET", f"{key}?wait_for_change=true&last_etag=0", headers=ask)
    assert value == b"FALSE"
    fresh_cloud.script({"kind": "preempted", "after_seconds": 0, "notice_seconds": 1.5})
    changed = f"{key}?wait_for_change=true&timeout_sec=60&last_etag={headers['ETag']}"
    assert fresh_cloud.send("GET", changed, headers=ask)[1] == b"TRUE"
    assert fresh_cloud.node_state("pod") == "READY"
    fresh_cloud.delete(f"{NODES}/pod")
    for name in ("pod", "pod-2"):
        fresh_cloud.create_node(name, "net")
    wait_for(lambda: not fresh_cloud.call_ok("GET", "emulator/state").get("notice"), "the time of the notice is over")
    assert fresh_cloud.node_state("pod") == "READY"
    fresh_cloud.script({"kind": "preempted", "after_seconds": 0, "node": "pod"})
    wait_for(lambda: fresh_cloud.node_state("pod") == "PREEMPTED", "one of the two")
    assert fresh_cloud.node_state("pod-2") == "READY"


def test_maintenance_is_announced(fresh_cloud: EmulatedCloud) -> None:
    node = fresh_cloud.create_pod()
    host_keys = f"tpu/v2/{node['name']}:getGuestAttributes"
    wait_for(lambda: fresh_cloud.call("POST", host_keys, {})[0] == 200, "it has published its host key")
    before = fresh_cloud.call_ok("POST", host_keys, {})
    key = f"w/{fresh_cloud.endpoint['token']}/{node['id']}/0/computeMetadata/v1/instance/maintenance-event"
    ask = {"Authorization": "", "Metadata-Flavor": "Google"}
    fresh_cloud.script({"kind": "maintenance", "seconds": 0.1, "after_seconds": 0, "notice_seconds": 3})
    wait_for(lambda: b"TERMINATE" in fresh_cloud.send("GET", key, headers=ask)[1], "it is announced")
    wait_for(lambda: fresh_cloud.send("GET", key, headers=ask)[1] == b"NONE", "it is over")
    wait_for(lambda: fresh_cloud.call("POST", host_keys, {})[0] == 200, "it is READY again")
    assert fresh_cloud.call_ok("POST", host_keys, {}) != before, "a rebuilt VM has another host key"


EVERYWHERE = f"tpu/v2/{PROJECT}/locations/-"
AGGREGATED = f"{COMPUTE}/aggregated/disks"
DISK = {"name": "old", "sizeGb": "10", "type": f"{PROJECT}/zones/{ZONE}/diskTypes/pd-balanced"}


def test_a_list_of_all_places_leaves_out_what_google_cannot_reach_and_says_so(cloud: EmulatedCloud) -> None:
    cloud.call_and_wait("POST", f"{COMPUTE}/zones/{ZONE}/disks", DISK)
    spec = {"parent": LOCATION.removeprefix("tpu/v2/"), "nodeId": "q"}
    body = {"tpu": {"nodeSpec": [{**spec, "node": {"acceleratorType": "v5litepod-8", "runtimeVersion": RUNTIME}}]}}
    cloud.call_ok("POST", f"{QUEUED}?queuedResourceId=q", body)
    scope = f"zones/{ZONE}"
    empty = cloud.call_ok("GET", AGGREGATED)["items"]["zones/us-east5-b"]["warning"]
    assert (empty["code"], empty["data"]) == ("NO_RESULTS_ON_PAGE", [{"key": "scope", "value": "zones/us-east5-b"}])
    assert "unreachable" not in cloud.call_ok("GET", f"{EVERYWHERE}/queuedResources")
    for told in ("field", "warning"):
        cloud.script({"kind": "unreachable", "place": ZONE, "told": told})
        listed = cloud.call_ok("GET", f"{EVERYWHERE}/queuedResources")
        assert listed == {"unreachable": [f"{PROJECT}/locations/{ZONE}"]}
        answer = cloud.call_ok("GET", AGGREGATED)
        assert answer.get("unreachables") == ([scope] if told == "field" else None)
        assert answer["items"][scope]["warning"]["code"] == (
            "UNREACHABLE" if told == "warning" else "NO_RESULTS_ON_PAGE"
        )
        assert cloud.call_ok("GET", f"{COMPUTE}/{scope}/disks/old")["name"] == "old"
        cloud.call_ok("DELETE", "emulator/faults")
    cloud.script({"kind": "lagging_lists", "seconds": 1000.0})
    assert cloud.call_ok("GET", f"{EVERYWHERE}/queuedResources") == {}
    assert "items" not in cloud.call_ok("GET", f"{COMPUTE}/{scope}/disks")
    cloud.call_ok("DELETE", "emulator/faults")
    assert [disk["name"] for disk in cloud.call_ok("GET", f"{COMPUTE}/{scope}/disks")["items"]] == ["old"]


def test_an_operation_may_stay_open(cloud: EmulatedCloud) -> None:
    cloud.script({"kind": "open_operation", "verb": "insert", "seconds": 1000.0})
    operations = [
        cloud.call_ok("POST", f"{COMPUTE}/zones/{ZONE}/disks", {**DISK, "name": name})["name"] for name in ("a", "b")
    ]
    path = f"{COMPUTE}/zones/{ZONE}/operations"
    wait_for(lambda: cloud.call_ok("GET", f"{path}/{operations[1]}")["status"] == "DONE", "the second one")
    assert cloud.call_ok("GET", f"{path}/{operations[0]}")["status"] == "RUNNING"
