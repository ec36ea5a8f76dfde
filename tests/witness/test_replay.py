"""The replay of hand-written recordings against a hand-written cloud: what is a difference, what is only time.

And what `python -m tests.witness` prints and how it exits.
"""

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from controller.witness.recording import REQUESTS, RequestLine
from tests.witness import __main__ as witness
from tests.witness.compare import Difference
from tests.witness.replay import Replayer, Report

NODE = "tpu.projects.locations.nodes.get"
Answer = tuple[int, Any]


def line(method_id: str, path: str, answer: Any, status: int = 200, **values: Any) -> RequestLine:
    made = RequestLine(0, 0.0, 0.0, "", method_id, "GET", path, {}, {}, None, 0, status, {}, answer, 0, "")
    return replace(made, **values)


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
    numbered = [replace(each, number=n, began=10.0 * n) for n, each in enumerate(lines, 1)]
    return Replayer(numbered, cloud.send, "emulated", "77", wait=wait, operation=60.0).run()


def kinds(report: Report) -> list[tuple[str, str]]:
    return [(found.kind, found.subject) for found in report.differences.values()]


def test_fields_and_types_and_no_values() -> None:
    equal = Cloud(n=[(200, {"state": "READY", "ip": "10.0.0.9", "ports": [1, 2]})])
    assert kinds(replayed(equal, line(NODE, "v2/n", {"state": "READY", "ip": "192.0.2.1", "ports": [3]}))) == []
    cloud = Cloud(n=[(200, {"a": 1, "b": {"c": "x"}, "list": [{"p": 1}], "only": 1})])
    answer = {"a": "1", "b": {"c": "y", "d": None}, "list": [{"p": True}], "empty": []}
    assert kinds(replayed(cloud, line("x.get", "v1/n", answer))) == [
        ("type", "a"), ("field", "b.d"), ("field", "empty"), ("type", "list[].p"), ("field", "only"),
    ]  # fmt: skip


def test_an_inner_object_in_another_state_and_elements_of_an_empty_list_are_not_compared() -> None:
    cloud = Cloud(n=[(200, {"done": True, "response": {"state": "ACTIVE", "active": {}, "name": "x"}})])
    recorded = {"done": True, "response": {"state": "WAITING", "waiting": {}, "name": "x"}}
    assert kinds(replayed(cloud, line("x.operations.get", "v1/n", recorded))) == []
    empty = Cloud(n=[(200, {"items": []})])
    assert kinds(replayed(empty, line("x.list", "v1/n", {"items": [{"name": "a"}]}))) == []


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
    def found(*states: str, wait: float = 60.0) -> list[tuple[str, str]]:
        cloud = Cloud(n=[(200, {"state": state}) for state in ("CREATING", "READY")])
        return kinds(replayed(cloud, *(line(NODE, "v2/n", {"state": state}) for state in states), wait=wait))

    assert found("CREATING", "CREATING", "READY") == []
    assert found("CREATING", "REIMAGING", "READY", wait=0.0) == [("state", "REIMAGING")]
    assert found("CREATING", "READY", "CREATING") == [("order", "READY, then CREATING")]


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
    objects = "storage/v1/b/bucket-1/o"
    listed = line("storage.objects.list", objects, {"items": [{"name": "runs/log", "generation": "5"}]})
    deleted = line("storage.objects.delete", f"{objects}/runs%2Flog", None, 204, method="DELETE",
                   query={"generation": "5"})  # fmt: skip
    answers = [(200, {}), (200, {"items": [{"name": "runs/log", "generation": "8"}]})]
    cloud = Cloud(o=answers, **{"runs%2Flog": [(204, None)]})
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


FOUND = Difference("status", "tpu.x.get", "GET v2/n", "403", "200")


def test_differences_are_printed_and_are_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = line("x.get", "v1/n", {})
    (tmp_path / REQUESTS).write_text(json.dumps({"format": 1, **asdict(recorded)}) + "\n")
    reports = [Report({FOUND.key: FOUND}, ["a.get not judged"], sent=1)] * 2 + [Report(sent=1)]
    monkeypatch.setattr(witness, "running_cloud", lambda start: nullcontext())
    monkeypatch.setattr(witness, "replay", lambda lines, cloud: reports.pop(0) if lines == [recorded] else None)
    assert witness.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{FOUND}\n1 recorded requests, 1 sent, 1 differences\n"
    assert witness.main([str(tmp_path), "--notes"]) == 1
    assert "note: a.get not judged\n" in capsys.readouterr().out
    assert witness.main([str(tmp_path), "--notes"]) == 0
    assert capsys.readouterr().out == "1 recorded requests, 1 sent, 0 differences\n"


def test_no_recording_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (None, "no json\n", '{"format": 99}\n', "[1]\n"):
        if text is not None:
            (tmp_path / REQUESTS).write_text(text)
        assert witness.main([str(tmp_path)]) == 2
        assert f"error: {tmp_path} holds no recording: " in capsys.readouterr().err
