"""The replay of hand-written recordings against a hand-written cloud: what is a difference, what only time."""

import json
from dataclasses import replace
from typing import Any

import pytest

from controller.witness.compare import Difference, operations_out_of_range, table
from controller.witness.recording import RequestLine
from controller.witness.replay import LOOKS, Replayer, Report

NODE = "tpu.projects.locations.nodes.get"
Answer = tuple[int, Any]


def line(method_id: str, path: str, answer: Any, status: int = 200, **values: Any) -> RequestLine:
    made = RequestLine(0, 0.0, 0.0, "", method_id, "GET", path, {}, {}, None, 0, status, {}, answer, 0, "")
    return replace(made, **values)


def refusal(status: int, reason: str, message: str = "no") -> dict[str, Any]:
    return {"error": {"code": status, "status": reason, "message": message}}


class Cloud:
    """Gives each path its answers one after the other, the last one for ever; its time is held."""

    project, number = "emulated", "77"

    def __init__(self, headers: dict[str, str] | None = None, **answers: list[Answer]) -> None:
        self.answers, self.requests = answers, list[tuple[str, str, Any]]()
        self.headers, self.passed = headers or {}, list[float]()

    def send(
        self, api: str, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], Any]:
        self.requests.append((method, path, json.loads(body) if body and body[:1] == b"{" else body))
        known = self.answers.get(path.partition("?")[0].rpartition("/")[2], [(200, {})])
        status, answer = known.pop(0) if len(known) > 1 else known[0]
        return status, self.headers, answer

    def move_on(self, seconds: float) -> None:
        self.passed.append(seconds)


def replayed(cloud: Any, *lines: RequestLine) -> Report:
    """Replay lines that were recorded one after the other, ten seconds apart."""
    numbered = [replace(each, number=n, began=10.0 * n) for n, each in enumerate(lines, 1)]
    return Replayer(numbered, cloud, 30.0).run()


def kinds(report: Report) -> list[tuple[str, str]]:
    return [(found.kind, found.subject) for found in report.differences.values()]


def test_the_time_of_the_cloud_moves_by_the_recorded_gaps() -> None:
    cloud = Cloud()
    wait = line("compute.globalOperations.wait", "v1/operations/o/wait", {}, method="POST", seconds=7.0)
    replayed(cloud, line(NODE, "v2/n", {}), wait, line(NODE, "v2/n", {}))
    assert cloud.passed == [17.0, 3.0], "a request that waits is sent when it had its answer"
    assert [(method, path) for method, path, _ in cloud.requests][1] == ("GET", "v1/operations/o")


def test_fields_types_and_values() -> None:
    equal = Cloud(n=[(200, {"state": "READY", "ip": "10.0.0.9", "time": "2026-01-02T03:04:05Z", "etag": "q"})])
    recorded = {"state": "READY", "ip": "192.0.2.1", "time": "2026-11-22T16:59:29.236Z", "etag": "p"}
    assert kinds(replayed(equal, line(NODE, "v2/n", recorded))) == []
    cloud = Cloud(n=[(200, {"a": 1, "b": {"c": "x"}, "list": [{"p": 1}], "only": 1, "e": "STANDARD"})])
    answer = {"a": "1", "b": {"c": "y", "d": None}, "list": [{"p": True}], "empty": [], "e": "PREMIUM"}
    assert kinds(replayed(cloud, line("x.get", "v1/n", answer))) == [
        ("type", "a"), ("value", "b.c"), ("field", "b.d"), ("value", "e"), ("field", "empty"), ("type", "list[].p"),
        ("field", "only"),
    ]  # fmt: skip


def test_an_inner_object_in_another_state_and_elements_of_an_empty_list_are_not_compared() -> None:
    cloud = Cloud(n=[(200, {"done": True, "response": {"state": "ACTIVE", "active": {}, "name": "x"}})])
    recorded = {"done": True, "response": {"state": "WAITING", "waiting": {}, "name": "x"}}
    assert kinds(replayed(cloud, line("x.operations.get", "v1/n", recorded))) == []
    empty = Cloud(n=[(200, {"items": []})])
    assert kinds(replayed(empty, line("x.list", "v1/n", {"items": [{"name": "a"}]}))) == []


def test_status_reason_words_and_headers_of_a_refusal() -> None:
    def one(status: int, emulated: Any, **headers: str) -> list[tuple[str, str]]:
        recorded = line("x.get", "v1/n", refusal(404, "NOT_FOUND", "no 12 in project-1"), 404)
        return kinds(replayed(Cloud(headers, n=[(status, emulated)]), recorded))

    assert one(404, refusal(404, "NOT_FOUND", "no 99 in emulated")) == []
    assert one(404, refusal(404, "NOT_FOUND", "nothing")) == [("words", "404 NOT_FOUND")]
    assert one(404, refusal(404, "GONE", "no 12 in emulated")) == [("reason", "404")]
    assert one(403, refusal(403, "PERMISSION_DENIED")) == [("status", "GET v1/n NOT_FOUND")]
    assert one(404, refusal(404, "NOT_FOUND", "no 1 in emulated"), **{"retry-after": "3"}) == [
        ("header", "retry-after of 404")
    ]


def test_a_refusal_that_passes_is_waited_for_and_one_that_never_comes_is_reported() -> None:
    late = Cloud(n=[(403, refusal(403, "DISABLED")), (403, refusal(403, "DISABLED")), (200, {"a": 2})])
    assert kinds(replayed(late, line("x.insert", "v1/n", {"a": 2}, method="POST"))) == []
    assert len(late.passed) == 2
    strict = line("x.insert", "v1/n", refusal(403, "DISABLED"), 403, method="POST")
    kind = Cloud(n=[(200, {"a": 2})])
    report = replayed(kind, strict, strict, line("x.insert", "v1/n", {"a": 2}, method="POST"))
    assert kinds(report) == [("status", "POST v1/n DISABLED")]
    assert len(kind.requests) == 1, "what was accepted is not sent again"
    never = Cloud(n=[(403, refusal(403, "DISABLED"))])
    assert kinds(replayed(never, line("x.get", "v1/n", {"a": 1}))) == [("status", "GET v1/n")]
    assert len(never.passed) == LOOKS


def test_an_api_that_refuses_now_and_then_does_so_at_other_requests() -> None:
    fresh = refusal(403, "PERMISSION_DENIED", "wait a few minutes")
    cloud = Cloud(a=[(200, {}), (403, fresh), (200, {})], b=[(200, {})])
    lines = [line("x.get", "v1/b", fresh, 403), line("x.get", "v1/a", {}), line("x.list", "v1/a", {})]
    assert kinds(replayed(cloud, *lines)) == []
    assert kinds(replayed(Cloud(), *lines)) == [("status", "GET v1/b PERMISSION_DENIED")], "if it never refuses"


def test_states_that_the_emulated_cloud_never_shows_and_their_order() -> None:
    def found(*states: str) -> list[tuple[str, str]]:
        cloud = Cloud(n=[(200, {"state": state}) for state in ("CREATING", "READY")])
        return kinds(replayed(cloud, *(line(NODE, "v2/n", {"state": state}) for state in states)))

    assert found("CREATING", "CREATING", "READY") == []
    assert found("CREATING", "REIMAGING", "READY") == [("state", "REIMAGING")]
    assert found("CREATING", "READY", "CREATING") == [("order", "READY, then CREATING")]


def test_guest_attributes_that_appear_one_after_the_other() -> None:
    def answer(*names: str) -> dict[str, Any]:
        items = [{"namespace": "a", "key": name, "value": "v"} for name in names]
        return {"guestAttributes": [{"queryValue": {"items": items}}]}

    def one(emulated: list[dict[str, Any]], *recorded: dict[str, Any]) -> list[tuple[str, str]]:
        cloud = Cloud(n=[(200, each) for each in emulated])
        method_id = "tpu.projects.locations.nodes.getGuestAttributes"
        return kinds(replayed(cloud, *(line(method_id, "v2/n", each, method="POST") for each in recorded)))

    both = answer("x", "y")
    assert one([answer("x"), both], answer("x"), both) == []
    assert one([both], answer("x"), both) == [("state", "0/a/x")], "the emulated cloud is kinder: all at once"


def test_names_that_the_emulated_cloud_chooses_are_mapped() -> None:
    cloud = Cloud(insert=[(200, {"name": "operations/acf.p2-77-8", "etag": "qqqq"})])
    key = f"AAAAstandin0001{'A' * 53}"
    answer = {"name": "operations/acf.p2-100000000001-9", "etag": "pppp"}
    made = line("x.insert", "v1/projects/project-1/insert", answer, method="POST",
                body={"number": "100000000001", "key": key})  # fmt: skip
    asked = line("x.get", "v1/operations/acf.p2-100000000001-9", {}, query={"etag": "pppp"})
    assert kinds(replayed(cloud, made, asked)) == []
    (_, first, body), (_, second, _) = cloud.requests
    assert first == "v1/projects/emulated/insert"
    assert body["number"] == "77"
    assert body["key"].startswith("AAAAC3NzaC1lZDI1NTE5")
    assert second == "v1/operations/acf.p2-77-8?etag=qqqq"


def test_objects_that_workers_made_are_put_there() -> None:
    objects = "storage/v1/b/bucket-1/o"
    listed = line("storage.objects.list", objects, {"items": [{"name": "runs/log", "generation": "5"}]})
    deleted = line("storage.objects.delete", f"{objects}/runs%2Flog", None, 204, method="DELETE",
                   query={"generation": "5"})  # fmt: skip
    answers = [(200, {}), (200, {"items": [{"name": "runs/log", "generation": "8"}]})]
    cloud = Cloud(None, o=answers, **{"runs%2Flog": [(204, None)]})
    assert kinds(replayed(cloud, listed, deleted)) == []
    assert [(method, path) for method, path, _ in cloud.requests] == [
        ("POST", "upload/storage/v1/b/bucket-1/o?uploadType=media&name=runs%2Flog"),
        ("GET", "storage/v1/b/bucket-1/o"),
        ("DELETE", "storage/v1/b/bucket-1/o/runs%2Flog?generation=8"),
    ]


def test_what_was_recorded_during_a_change_or_a_passing_failure_is_not_judged() -> None:
    change = line("x.insert", "v1/other", {}, method="POST", seconds=30.0)
    report = replayed(Cloud(n=[(200, {})]), change, line("x.get", "v1/n", refusal(404, "NOT_FOUND"), 404))
    assert kinds(report) == []
    assert report.notes == ["x.get not judged: a change was under way when it was recorded"]
    cloud = Cloud()
    report = replayed(cloud, *[line("x.get", "v1/n", None, status) for status in (503, 429, 0)])
    assert (cloud.requests, kinds(report), len(report.notes)) == ([], [], 3)


def test_apis_that_the_project_had_are_enabled_before() -> None:
    cloud = Cloud()
    services = [
        {"name": "projects/1/services/tpu.googleapis.com", "state": "ENABLED"},
        {"name": "x", "state": "DISABLED"},
    ]
    replayed(cloud, line("serviceusage.services.batchGet", "v1/g", {"services": services}))
    path = "v1/projects/emulated/services:batchEnable"
    assert cloud.requests[0] == ("POST", path, {"serviceIds": ["tpu.googleapis.com"]})


@pytest.mark.parametrize(
    ("done", "is_googles", "found"),
    [(30.0, True, []), (5.0, True, ["3 to 5.1 s"]), (95.0, True, ["93 to 95.1 s"]), (95.0, False, [])],
)
def test_an_operation_out_of_the_range_of_delays(done: float, *, is_googles: bool, found: list[str]) -> None:
    def polled(seconds: float, status: str) -> RequestLine:
        about = {"name": "o", "operationType": "insert", "targetLink": "x/networks/n", "status": status}
        return line("compute.networks.insert", "v1/n", about, began=seconds, seconds=0.1)

    delays = {"insert networks": (7.0, 45.0), "other operation": (1.0, 60.0)}
    lines = [polled(0.0, "RUNNING"), polled(done - 1.9, "RUNNING"), polled(done, "DONE")]
    told = [
        (one.kind, one.subject, one.emulated) for one in operations_out_of_range(lines, delays, is_googles=is_googles)
    ]
    assert told == [("delay", "insert networks", "7 to 45 s")] * len(found)
    assert [one.recorded for one in operations_out_of_range(lines, delays, is_googles=is_googles)] == found


def test_the_table_can_be_pasted() -> None:
    found = Difference("words", "x.get", "404", "a | b\nc", "d" * 500)
    head, _, row = table([found]).splitlines()
    assert head == "| what | method | where | recorded | emulated |"
    assert row == f"| words | x.get | 404 | a \\| b c | {'d' * 160}… |"
