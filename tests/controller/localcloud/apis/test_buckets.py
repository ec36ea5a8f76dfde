"""storage v1, as spoken by a bare HTTP client."""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import google_crc32c
import pytest

from controller.agent.transfers import GrowingObject, read_object
from controller.localcloud.apis.objects import Blobs, Objects
from controller.localcloud.http.errors import ApiError
from controller.localcloud.iam import format_etag
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store
from tests.controller.localcloud.harness import EmulatedCloud, wait_for

BUCKETS = "storage/v1/b"
QUANTUM = 256 * 1024


class Bucket:
    """Requests on one bucket."""

    def __init__(self, cloud: EmulatedCloud, name: str) -> None:
        self.cloud = cloud
        self.objects = f"{BUCKETS}/{name}/o"

    def path(self, name: str, **query: object) -> str:
        return f"{self.objects}/{quote(name, safe='')}?{urlencode(query)}"

    def put(self, name: str, data: bytes = b"x", **query: object) -> tuple[int, Any]:
        """Write an object, after a pause if it was written a moment ago."""
        found: list[tuple[int, Any]] = []
        wait_for(
            lambda: (answer := self.put_once(name, data, **query))[0] != 429 and found.append(answer) is None, name
        )
        return found[0]

    def put_once(self, name: str, data: bytes = b"x", **query: object) -> tuple[int, Any]:
        query = {"uploadType": "media", "name": name, **query}
        status, text, _ = self.cloud.send("POST", f"upload/{self.objects}?{urlencode(query)}", data)
        return status, json.loads(text)

    def read(self, name: str, headers: Mapping[str, str] | None = None, **query: object) -> tuple[int, bytes]:
        status, data, _ = self.cloud.send("GET", self.path(name, alt="media", **query), headers=headers)
        return status, data

    def names(self, **query: object) -> Any:
        listing = self.cloud.call_ok("GET", f"{self.objects}?{urlencode(query)}")
        names = [item["name"] for item in listing.get("items", ())]
        return names, listing.get("prefixes", []), listing.get("nextPageToken")

    def begin(self, name: str, **query: object) -> str:
        """A resumable upload; returns its URL."""
        metadata = json.dumps({"name": name, "contentType": "text/plain", "metadata": {"k": "v"}}).encode()
        query = {"uploadType": "resumable", **query}
        status, _, headers = self.cloud.send("POST", f"upload/{self.objects}?{urlencode(query)}", metadata)
        assert status == 200
        return headers["Location"]

    def chunk(self, url: str, data: bytes, content_range: str, method: str = "PUT") -> tuple[int, bytes, str | None]:
        status, text, headers = self.cloud.send(method, url, data, {"Content-Range": content_range})
        return status, text, headers.get("Range")


@pytest.fixture
def bucket(cloud: EmulatedCloud, request: pytest.FixtureRequest) -> Bucket:
    """A bucket named after the test."""
    name = "b-" + hashlib.sha256(request.node.name.encode()).hexdigest()[:20]
    cloud.call_ok("POST", f"{BUCKETS}?project=slipway-local", {"name": name})
    return Bucket(cloud, name)


def test_buckets(cloud: EmulatedCloud) -> None:
    place, mine = f"{BUCKETS}?project=slipway-local", f"{BUCKETS}/mine"
    body = {"name": "mine", "location": "us-central1", "labels": {"a": "1", "b": "2"}}
    made = cloud.call_ok("POST", place, body)
    assert (made["location"], made["locationType"], made["metageneration"]) == ("US-CENTRAL1", "region", "1")
    for path, name, status in ((place, "mine", 409), (place, "No", 400), (BUCKETS, "yours", 400)):
        cloud.refused("POST", path, {"name": name}, status)
    change = {"labels": {"a": None, "c": "3"}}
    assert cloud.call_ok("PATCH", f"{mine}?ifMetagenerationMatch=1", change)["labels"] == {"b": "2", "c": "3"}
    cloud.refused("PATCH", f"{mine}?ifMetagenerationMatch=1", change, 412)
    assert "mine" in {item["name"] for item in cloud.call_ok("GET", place)["items"]}
    assert cloud.call_ok("GET", f"{mine}?projection=full")["name"] == "mine"
    assert cloud.call_ok("GET", f"{mine}/storageLayout")["hierarchicalNamespace"] == {"enabled": False}
    policy = cloud.call_ok("GET", f"{mine}/iam")
    policy["bindings"] = [{"role": "roles/storage.objectViewer", "members": ["user:a@example.com"]}]
    policy["bindings"] += [{"role": "roles/storage.admin", "members": ["user:you@example.com"]}]
    assert cloud.call_ok("PUT", f"{mine}/iam", policy)["bindings"] == policy["bindings"]
    cloud.refused("PUT", f"{mine}/iam", policy, 412)  # its etag is of the policy before
    Bucket(cloud, "mine").put("object")
    cloud.refused("DELETE", mine, None, 409)
    assert cloud.call("DELETE", Bucket(cloud, "mine").path("object"))[0] == 204
    assert cloud.call("DELETE", mine)[0] == 204
    cloud.refused("GET", mine, None, 404, "notFound")


@pytest.mark.parametrize(
    ("days", "shown"), [(None, 7), (0, 0), (7, 7), (90, 90), (1, None), (91, None)]
)  # fmt: skip
def test_a_bucket_keeps_deleted_objects_unless_told_otherwise(
    cloud: EmulatedCloud, days: int | None, shown: int | None
) -> None:
    place, name = f"{BUCKETS}?project=slipway-local", f"kept-{days}".lower()
    policy = {} if days is None else {"softDeletePolicy": {"retentionDurationSeconds": str(days * 86400)}}
    if shown is None:
        cloud.refused("POST", place, {"name": name, **policy}, 400, "between 7 and 90 days")
        return
    made = cloud.call_ok("POST", place, {"name": name, **policy})
    assert made["softDeletePolicy"]["retentionDurationSeconds"] == str(shown * 86400)
    assert made["iamConfiguration"]["publicAccessPrevention"] == "inherited"


@pytest.mark.parametrize("name", ["goog-runs", "my-google-runs", "x" * 64, "ab"])
def test_a_bucket_name_that_google_refuses(cloud: EmulatedCloud, name: str) -> None:
    cloud.refused("POST", f"{BUCKETS}?project=slipway-local", {"name": name}, 400, "Invalid bucket name")


@pytest.mark.parametrize(
    ("place", "kind"),
    [("us-central1", "region"), ("EU", "multi-region"), ("nam4", "dual-region"), (None, "multi-region")],
)
def test_a_bucket_is_where_google_has_places(cloud: EmulatedCloud, place: str | None, kind: str) -> None:
    body = {"name": f"bucket-at-{place or 'home'}".lower(), **({"location": place} if place else {})}
    made = cloud.call_ok("POST", "storage/v1/b?project=slipway-local", body)
    assert (made["locationType"], made["etag"]) == (kind, format_etag(1))
    changed = cloud.call_ok("PATCH", f"storage/v1/b/{body['name']}", {"labels": {"a": "b"}})
    assert changed["etag"] != made["etag"]


@pytest.mark.parametrize("place", ["us-central1-a", "us-central", "everywhere", "nam12", "us-central1,us-east1"])
def test_a_bucket_is_refused_anywhere_else(cloud: EmulatedCloud, place: str) -> None:
    body = {"name": "bucket-nowhere", "location": place}
    cloud.refused("POST", "storage/v1/b?project=slipway-local", body, 400, "location constraint is not valid")


def test_a_page_of_a_list_has_a_thousand_objects_at_most(tmp_path: Path) -> None:
    """Description of objects.list.maxResults: or 1,000 items, whichever is smaller."""
    store = Store(tmp_path / "state.db")
    store.put("bucket", "b", {"name": "b"})
    objects = Objects(store, Blobs(tmp_path), lambda _: None, Settings(store))
    rows = [("b", f"{number:04d}", 1, "", "{}") for number in range(1001)]
    store.database.executemany("INSERT INTO objects VALUES (?, ?, ?, ?, ?)", rows)
    for asked in ({}, {"maxResults": "5000"}, {"maxResults": "1000"}):
        items, _, token = objects.list("b", asked)
        assert (len(items), token is not None) == (1000, True)


def test_an_object_comes_back_with_its_hashes(bucket: Bucket) -> None:
    data = bytes(range(256)) * 20_000  # 5 MB: beyond what is handled in one piece
    status, made = bucket.put("folder/an object+%.bin", data)
    assert status == 200
    assert made["size"] == str(len(data))
    assert made["md5Hash"] == base64.b64encode(hashlib.md5(data).digest()).decode()
    assert made["crc32c"] == base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
    assert bucket.read("folder/an object+%.bin") == (200, data)
    link = made["mediaLink"].removeprefix(bucket.cloud.endpoint["url"])
    status, text, headers = bucket.cloud.send("GET", link)
    assert (status, text) == (200, data)
    assert headers["X-Goog-Generation"] == made["generation"]
    assert f"crc32c={made['crc32c']}" in headers["X-Goog-Hash"]


def test_generations_and_preconditions(bucket: Bucket) -> None:
    assert bucket.put("a", b"1", ifGenerationMatch=0)[0] == 200
    status, answer = bucket.put("a", b"2", ifGenerationMatch=0)
    assert (status, answer["error"]["errors"][0]["reason"]) == (412, "conditionNotMet")
    first = int(bucket.cloud.call_ok("GET", bucket.path("a"))["generation"])
    status, second = bucket.put("a", b"2", ifGenerationMatch=first)
    assert status == 200
    assert int(second["generation"]) > first
    assert bucket.read("a") == (200, b"2")
    assert bucket.read("a", generation=first)[0] == 404
    assert bucket.read("a", ifGenerationNotMatch=second["generation"])[0] == 304
    assert bucket.read("a", ifGenerationMatch=first)[0] == 412
    assert bucket.cloud.call("DELETE", bucket.path("a", ifGenerationMatch=first))[0] == 412
    assert bucket.cloud.call("DELETE", bucket.path("a", generation=second["generation"]))[0] == 204
    assert bucket.read("a")[0] == 404


def test_ranges(bucket: Bucket) -> None:
    bucket.put("a", b"0123456789")
    parts = {"0-0": b"0", "2-5": b"2345", "7-": b"789", "7-99": b"789", "-3": b"789"}
    for header, part in (*((f"bytes={name}", part) for name, part in parts.items()), ("lines=1-2", b"0123456789")):
        assert bucket.read("a", headers={"Range": header}) == (206, part), header
    assert bucket.read("a", headers={"Range": "bytes=10-"})[0] == 416


def test_listing(bucket: Bucket) -> None:
    for name in ("a", "b/1", "b/2/x", "b/2/y", "b0", "c/", "c/d"):
        bucket.put(name)
    assert bucket.names()[0] == ["a", "b/1", "b/2/x", "b/2/y", "b0", "c/", "c/d"]
    assert bucket.names(delimiter="/") == (["a", "b0"], ["b/", "c/"], None)
    assert bucket.names(delimiter="/", prefix="b/") == (["b/1"], ["b/2/"], None)
    assert bucket.names(prefix="b") == (["b/1", "b/2/x", "b/2/y", "b0"], [], None)
    assert bucket.names(delimiter="/", includeTrailingDelimiter="true")[0] == ["a", "b0", "c/"]
    assert bucket.names(startOffset="b/2/y", endOffset="c/d")[0] == ["b/2/y", "b0", "c/"]
    assert bucket.names(prefix="none") == ([], [], None)


def test_listing_in_pages_is_complete(bucket: Bucket) -> None:
    names = [*(f"{folder}/{index}" for folder in "abc" for index in range(4)), "z"]
    for name in names:
        bucket.put(name)
    for query in ({}, {"delimiter": "/"}, {"prefix": "b/"}):
        found: list[str] = []
        token: str | None = ""
        while token is not None:
            items, prefixes, token = bucket.names(maxResults=2, **query, **({"pageToken": token} if token else {}))
            assert len(items) + len(prefixes) <= 2
            found += items + prefixes
        whole = bucket.names(**query)
        assert sorted(found) == sorted(whole[0] + whole[1])


def test_partial_responses_and_metadata(bucket: Bucket) -> None:
    bucket.put("a")
    fields = quote("items(name,size),nextPageToken")
    assert bucket.cloud.call_ok("GET", f"{bucket.objects}?fields={fields}") == {"items": [{"name": "a", "size": "1"}]}
    bucket.cloud.call_ok("PATCH", bucket.path("a"), {"metadata": {"k": "v", "l": "w"}, "contentType": "text/x"})
    patched = bucket.cloud.call_ok("PATCH", bucket.path("a"), {"metadata": {"l": None}})
    assert (patched["metadata"], patched["contentType"], patched["metageneration"]) == ({"k": "v"}, "text/x", "3")


@pytest.mark.parametrize("line", [b"\r\n", b"\n"])
def test_multipart_upload(bucket: Bucket, line: bytes) -> None:
    data = b"--edge\r\n\n--edge-" + b"\x00\n" * 10
    metadata = json.dumps({"name": "m", "metadata": {"k": "v"}}).encode()
    parts = [b"--edge", b"Content-Type: application/json", b"", metadata, b"--edge", b"Content-Type: text/x", b"", data]
    body = line.join([*parts, b"--edge--", b""])
    headers = {"Content-Type": 'multipart/related; boundary="edge"'}
    status, text, _ = bucket.cloud.send("POST", f"upload/{bucket.objects}?uploadType=multipart", body, headers)
    assert status == 200, text
    made = json.loads(text)
    assert (made["metadata"], made["contentType"]) == ({"k": "v"}, "text/x")
    assert bucket.read("m") == (200, data)
    wrong = body.replace(b'"name": "m"', b'"name": "bad", "md5Hash": "AAAAAAAAAAAAAAAAAAAAAA=="')
    status, text, _ = bucket.cloud.send("POST", f"upload/{bucket.objects}?uploadType=multipart", wrong, headers)
    assert (status, b"doesn't match calculated md5Hash" in text, bucket.read("bad")[0]) == (400, True, 404)


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_resumable_upload_in_chunks(bucket: Bucket, method: str) -> None:
    data = bytes(range(256)) * 4 * 1024 + b"rest"
    url = bucket.begin("r", ifGenerationMatch=0)
    assert bucket.chunk(url, b"", "bytes */*", method)[::2] == (308, None)
    half = 2 * QUANTUM
    assert bucket.chunk(url, data[:half], f"bytes 0-{half - 1}/*", method)[::2] == (308, f"bytes=0-{half - 1}")
    # Google keeps whole quanta only; the client reads how far it got and goes on from there.
    odd = data[half : half + QUANTUM + 5]
    status, _, kept = bucket.chunk(url, odd, f"bytes {half}-{half + len(odd) - 1}/{len(data)}", method)
    assert (status, kept) == (308, f"bytes=0-{3 * QUANTUM - 1}")
    assert bucket.chunk(url, data[half:], f"bytes {len(data)}-{len(data) + 9}/{len(data) + 10}", method)[0] == 400
    rest = data[3 * QUANTUM :]
    status, text, _ = bucket.chunk(url, rest, f"bytes {3 * QUANTUM}-{len(data) - 1}/{len(data)}", method)
    assert status == 200
    assert json.loads(text)["metadata"] == {"k": "v"}
    assert bucket.read("r") == (200, data)
    assert bucket.chunk(url, b"", f"bytes */{len(data)}", method)[0] == 200, "asking again is harmless"
    cancelled = bucket.begin("c")
    assert bucket.cloud.send("DELETE", cancelled)[0] == 499
    assert bucket.chunk(cancelled, b"x", "bytes 0-0/1", method)[0] == bucket.read("c")[0] == 404


def test_the_log_names_objects_not_their_bytes(bucket: Bucket) -> None:
    bucket.put("plain", b"secret bytes")
    url = bucket.begin("chunked")
    bucket.chunk(url, b"more bytes", "bytes 0-9/10")
    bodies = [entry["body"] for entry in bucket.cloud.request_log()[-3:]]
    assert [body.get("name") for body in bodies] == ["plain", None, "chunked"]
    assert bodies[0]["size"] == "12"
    assert "bytes" not in str(bodies)


def test_copy_rewrite_move_and_compose(bucket: Bucket) -> None:
    cloud, name = bucket.cloud, bucket.objects.split("/")[3]
    bucket.put("dir/a", b"first ")
    bucket.put("b", b"second")
    source, compose = f"{bucket.objects}/dir%2Fa", f"{bucket.objects}/both/compose"
    assert cloud.call_ok("POST", f"{source}/copyTo/b/{name}/o/copied", None)["name"] == "copied"
    rewritten = cloud.call_ok("POST", f"{source}/rewriteTo/b/{name}/o/re%2Fwritten", {"contentType": "text/y"})
    assert (rewritten["done"], rewritten["resource"]["contentType"]) == (True, "text/y")
    cloud.refused("POST", f"{source}/moveTo/o/moved", None, 403)  # an Owner lacks storage.objects.move
    policy = cloud.call_ok("GET", f"{BUCKETS}/{name}/iam")
    policy["bindings"].append({"role": "roles/storage.objectUser", "members": ["user:you@example.com"]})
    cloud.call_ok("PUT", f"{BUCKETS}/{name}/iam", policy)
    wanted = f"{BUCKETS}/{name}/iam/testPermissions?permissions=storage.objects.move"
    wait_for(lambda: cloud.call_ok("GET", wanted).get("permissions"), "the role is in effect")
    assert cloud.call_ok("POST", f"{source}/moveTo/o/moved", None)["name"] == "moved"
    assert bucket.read("dir/a")[0] == 404
    assert {bucket.read(each) for each in ("copied", "re/written", "moved")} == {(200, b"first ")}
    body = {"sourceObjects": [{"name": "moved"}, {"name": "b"}], "destination": {"contentType": "text/z"}}
    composed = cloud.call_ok("POST", compose, body)
    assert composed["componentCount"] == 2
    assert "md5Hash" not in composed
    assert bucket.read("both") == (200, b"first second")
    longer = {"sourceObjects": [{"name": "both"}, {"name": "b"}]}
    assert cloud.call_ok("POST", f"{bucket.objects}/longer/compose", longer)["componentCount"] == 3
    assert bucket.read("longer") == (200, b"first secondsecond")
    cloud.refused("POST", f"{compose}?ifGenerationMatch=1", longer, 412)
    cloud.refused("POST", compose, {"sourceObjects": []}, 400)
    cloud.refused("POST", f"{bucket.objects}/none/copyTo/b/{name}/o/x", None, 404)


def test_uploads_are_checked(bucket: Bucket) -> None:
    def files() -> set[Path]:
        return {path for path in (bucket.cloud.state / "blobs").rglob("*") if path.is_file()}

    before = files()
    assert bucket.put("", b"x")[0] == 400
    assert bucket.put("a\nb", b"x")[0] == 400
    assert bucket.put("a", b"x", uploadType="carrier-pigeon")[0] == 400
    assert Bucket(bucket.cloud, "no-such-bucket").put("a")[0] == 404
    bucket.cloud.refused("GET", f"{BUCKETS}?project=slipway-local&alt=media", None, 400)  # only objects have media
    bucket.cloud.refused("POST", f"upload/{BUCKETS}?project=slipway-local", {"name": "other"}, 400)
    assert files() == before, "refused bytes are not kept"


@pytest.mark.parametrize("pace", [0.02, 0.5, 30])
def test_an_object_is_written_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pace: float) -> None:
    """A second is a second at any pace; where nothing takes time, nothing is limited."""
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    store, blobs = Store(tmp_path / "state.db"), Blobs(tmp_path / "blobs")
    settings = Settings(store, operation_seconds=pace)
    objects = Objects(store, blobs, lambda name: None, settings)
    store.put("bucket", "b", {})

    def put(name: str) -> str:
        try:
            objects.put("b", name, {}, blobs.create(), {})
        except ApiError as error:
            return f"{error.code} {error.reason}: {error.message}"
        return "written"

    assert [put("log"), put("other")] == ["written", "written"]
    now[0] = 1000.99
    words = "exceeded the rate limit for object mutation operations (create, update, and delete)."
    assert put("log").startswith(f"429 rateLimitExceeded: The object b/log {words}")
    now[0] = 1001.01
    assert put("log") == "written"
    for change in ({"operation_seconds": 0}, {"operation_seconds": pace, "realism": "relaxed"}):
        settings.update(change)
        assert put("log") == "written"


def test_the_agent_joins_what_is_new_of_a_file(
    cloud: EmulatedCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that another one has replaced is sent whole."""
    monkeypatch.setenv("SLIPWAY_STORAGE_ROOT", f"{cloud.endpoint['url']}t/{cloud.endpoint['token']}")
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": "logs"})
    cloud.call_ok("POST", "emulator/settings", {"realism": "relaxed"})  # more than one write in a second
    path, name = tmp_path / "file", "runs/r/logs/worker-0.log"
    grown, other = (GrowingObject(path, "logs", name) for _ in range(2))
    for number, (sender, components) in enumerate([(grown, 1), (grown, 2), (other, 1), (grown, 1), (grown, 2)], 1):
        path.write_bytes(b"x\n" * number)
        sender.send(2 * number)
        found = {item["name"]: item for item in cloud.call_ok("GET", "storage/v1/b/logs/o")["items"]}
        assert (found[name]["size"], found[name].get("componentCount", 1)) == (str(2 * number), components)
        assert found[name]["contentType"] == "text/plain; charset=utf-8"
    assert list(found) == [name], "no part is left"
    assert read_object("logs", name, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    cloud.call_ok("POST", "emulator/settings", {"realism": "strict"})
