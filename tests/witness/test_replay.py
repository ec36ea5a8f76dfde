"""The replay of hand-written recordings against a hand-written cloud: what is a difference, and what is only time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from controller.witness.recording import RequestLine
from tests.witness.replay import Replayer, Report

NODE = "tpu.projects.locations.nodes.get"
Answer = tuple[int, Any]


def line(method_id: str, path: str, answer: Any, status: int = 200, **values: Any) -> RequestLine:
    defaults: dict[str, Any] = {
        "number": 0, "began": 0.0, "seconds": 0.0, "stage": "", "method_id": method_id, "method": "GET", "path": path,
        "query": {}, "headers": {}, "body": None, "body_bytes": 0, "status": status, "answer_headers": {},
        "answer": answer, "answer_bytes": 0, "error": "",
    }  # fmt: skip
    return RequestLine(**(defaults | values))


def refusal(status: int, reason: str, message: str = "no") -> dict[str, Any]:
    return {"error": {"code": status, "status": reason, "message": message}}


class Cloud:
    """Gives each path its answers one after the other, the last one for ever."""

    def __init__(self, **answers: list[Answer]) -> None:
        self.answers, self.requests = answers, list[tuple[str, str, Any]]()

    def send(self, api: str, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        self.requests.append((method, path, json.loads(body) if body and body[:1] == b"{" else body))
        known = self.answers.get(path.partition("?")[0].rpartition("/")[2], [(200, {})])
        return known.pop(0) if len(known) > 1 else known[0]


def replayed(cloud: Cloud, *lines: RequestLine, wait: float = 0.0) -> Report:
    """Replay lines that were recorded one after the other, ten seconds apart."""
    numbered = [RequestLine(**{**vars(each), "number": n, "began": 10.0 * n}) for n, each in enumerate(lines, 1)]
    return Replayer(numbered, cloud.send, "emulated", "77", wait=wait, operation=60.0).run()


def kinds(report: Report) -> list[tuple[str, str]]:
    return [(found.kind, found.subject) for found in report.differences.values()]


def test_equal_answers_are_no_difference_whatever_their_values() -> None:
    cloud = Cloud(n=[(200, {"state": "READY", "ip": "10.0.0.9", "ports": [1, 2]})])
    assert kinds(replayed(cloud, line(NODE, "v2/n", {"state": "READY", "ip": "192.0.2.1", "ports": [3]}))) == []


def test_fields_and_types() -> None:
    cloud = Cloud(n=[(200, {"a": 1, "b": {"c": "x"}, "list": [{"p": 1}], "only": 1})])
    answer = {"a": "1", "b": {"c": "y", "d": None}, "list": [{"p": True}], "empty": []}
    assert kinds(replayed(cloud, line("x.get", "v1/n", answer))) == [
        ("type", "a"), ("field", "b.d"), ("field", "empty"), ("type", "list[].p"), ("field", "only"),
    ]  # fmt: skip


def test_an_inner_object_in_another_state_is_not_compared() -> None:
    cloud = Cloud(n=[(200, {"done": True, "response": {"state": "ACTIVE", "active": {}, "name": "x"}})])
    recorded = {"done": True, "response": {"state": "WAITING", "waiting": {}, "name": "x"}}
    assert kinds(replayed(cloud, line("x.operations.get", "v1/n", recorded))) == []


def test_an_empty_list_says_nothing_about_its_elements() -> None:
    cloud = Cloud(n=[(200, {"items": []})])
    assert kinds(replayed(cloud, line("x.list", "v1/n", {"items": [{"name": "a"}]}))) == []


def test_status_reason_and_words_of_a_refusal() -> None:
    def one(status: int, emulated: Any) -> list[tuple[str, str]]:
        recorded = line("x.get", "v1/n", refusal(404, "NOT_FOUND", "no 12 in project-1"), 404)
        return kinds(replayed(Cloud(n=[(status, emulated)]), recorded))

    assert one(404, refusal(404, "NOT_FOUND", "no 99 in emulated")) == []
    assert one(404, refusal(404, "NOT_FOUND", "nothing")) == [("words", "404 NOT_FOUND")]
    assert one(404, refusal(404, "GONE", "no 12 in emulated")) == [("reason", "404")]
    assert one(403, refusal(403, "PERMISSION_DENIED")) == [("status", "GET v1/n NOT_FOUND")]


def test_a_refusal_that_passes_is_waited_for_and_one_that_never_comes_is_reported() -> None:
    late = Cloud(n=[(403, refusal(403, "DISABLED")), (403, refusal(403, "DISABLED")), (200, {"a": 1})])
    assert kinds(replayed(late, line("x.insert", "v1/n", {"a": 2}, method="POST"), wait=60.0)) == []
    strict = line("x.insert", "v1/n", refusal(403, "DISABLED"), 403, method="POST")
    kind = Cloud(n=[(200, {"a": 1})])
    report = replayed(kind, strict, strict, line("x.insert", "v1/n", {"a": 2}, method="POST"))
    assert kinds(report) == [("status", "POST v1/n DISABLED")]
    assert len(kind.requests) == 1, "what was accepted is not sent again"


def test_states_that_the_emulated_cloud_never_shows_and_their_order() -> None:
    def nodes(*states: str) -> list[RequestLine]:
        return [line(NODE, "v2/n", {"state": state}) for state in states]

    def answers(*states: str) -> Cloud:
        return Cloud(n=[(200, {"state": state}) for state in states])

    assert kinds(replayed(answers("CREATING", "READY"), *nodes("CREATING", "CREATING", "READY"), wait=60.0)) == []
    assert kinds(replayed(answers("CREATING", "READY"), *nodes("CREATING", "REIMAGING", "READY"))) == [
        ("state", "REIMAGING")
    ]
    assert kinds(replayed(answers("CREATING", "READY"), *nodes("CREATING", "READY", "CREATING"), wait=60.0)) == [
        ("order", "READY, then CREATING")
    ]


def test_guest_attributes_and_the_order_in_which_they_appear() -> None:
    method_id = "tpu.projects.locations.nodes.getGuestAttributes"

    def answer(*names: str) -> dict[str, Any]:
        items = [{"namespace": "a", "key": name, "value": "v"} for name in names]
        return {"guestAttributes": [{"queryValue": {"items": items}}]}

    def one(emulated: list[dict[str, Any]], *recorded: dict[str, Any], wait: float = 0.0) -> list[tuple[str, str]]:
        cloud = Cloud(n=[(200, each) for each in emulated])
        lines = [line(method_id, "v2/n", each, method="POST") for each in recorded]
        return kinds(replayed(cloud, *lines, wait=wait))

    both = answer("x", "y")
    assert one([both], both) == []
    in_order = ("attribute order", "a/x of worker 0, then a/y of worker 0")
    assert one([both], answer("x"), both) == [in_order], "the emulated cloud is kinder: all at once"
    assert one([answer(), answer("y"), both], answer(), answer("x"), both) == [in_order]
    assert one([answer(), answer("x"), both], answer(), answer("x"), both) == []
    assert one([answer("x"), both], both, wait=60.0) == [], "the recording asked too late to see an order"
    assert one([answer("x")], both) == [("attribute", "a/y of worker 0")]


def test_names_that_the_emulated_cloud_chooses_are_mapped() -> None:
    cloud = Cloud(insert=[(200, {"name": "operation-7", "etag": "qqqq"})])
    made = line("x.insert", "v1/projects/project-1/insert", {"name": "operation-9", "etag": "pppp"}, method="POST",
                body={"number": "100000000001", "key": f"AAAAstandin0001{'A' * 53}"})  # fmt: skip
    asked = line("x.get", "v1/operations/operation-9", {}, query={"etag": "pppp"})
    replayed(cloud, made, asked)
    (_, first, body), (_, second, _) = cloud.requests
    assert first == "v1/projects/emulated/insert"
    assert body["number"] == "77"
    assert body["key"].startswith("AAAAC3NzaC1lZDI1NTE5")
    assert second == "v1/operations/operation-7?etag=qqqq"


def test_objects_that_workers_made_are_put_there() -> None:
    listed = line(
        "storage.objects.list", "storage/v1/b/bucket-1/o", {"items": [{"name": "runs/log", "generation": "5"}]}
    )
    deleted = line("storage.objects.delete", "storage/v1/b/bucket-1/o/runs%2Flog", None, 204, method="DELETE",
                   query={"generation": "5"})  # fmt: skip
    cloud = Cloud(
        o=[(200, {}), (200, {"items": [{"name": "runs/log", "generation": "8"}]})], **{"runs%2Flog": [(204, None)]}
    )
    assert kinds(replayed(cloud, listed, deleted)) == []
    assert [(method, path) for method, path, _ in cloud.requests] == [
        ("POST", "upload/storage/v1/b/bucket-1/o?uploadType=media&name=runs%2Flog"),
        ("GET", "storage/v1/b/bucket-1/o"),
        ("DELETE", "storage/v1/b/bucket-1/o/runs%2Flog?generation=8"),
    ]


def test_what_was_recorded_during_a_change_is_not_judged() -> None:
    change = line("x.insert", "v1/other", {}, method="POST", seconds=30.0)
    report = replayed(Cloud(n=[(200, {})]), change, line("x.get", "v1/n", refusal(404, "NOT_FOUND"), 404))
    assert kinds(report) == []
    assert report.notes == ["x.get not judged: a change was under way when it was recorded"]


def test_passing_failures_are_not_replayed() -> None:
    cloud, check = Cloud(), [(503, None), (429, None), (0, None)]
    make: Callable[..., RequestLine] = line
    report = replayed(cloud, *[make("x.get", "v1/n", answer, status) for status, answer in check])
    assert (cloud.requests, kinds(report), len(report.notes)) == ([], [], 3)
