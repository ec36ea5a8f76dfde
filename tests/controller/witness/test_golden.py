"""Recordings in `tests/golden/witness/`, replayed: the emulated cloud answers as they do; what is planted is found."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller import emulator
from controller.witness.compare import table
from controller.witness.recording import REQUESTS, RequestLine, load
from controller.witness.replay import Report, replay_recording
from tests.emulators import Emulators
from tests.paths import ROOT

FILES = sorted((ROOT / "tests" / "golden" / "witness").glob("*.jsonl"))
OWN = ROOT / "tests" / "golden" / "witness" / "emulated.jsonl"
pytestmark = pytest.mark.e2e
Document = dict[str, Any]


def replayed(lines: list[RequestLine], about: Document, emulators: Emulators, patch: pytest.MonkeyPatch) -> Report:
    patch.setattr(emulator, "run_emulator_verb", emulators.run_emulator_verb)
    return replay_recording(lines, about["pace"], is_googles=about["cloud"] == "gcp")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_emulated_cloud_answers_as_recorded(
    file: Path, emulators: Emulators, monkeypatch: pytest.MonkeyPatch
) -> None:
    about, lines = load(file)
    found = replayed(lines, about, emulators, monkeypatch)
    assert not found.differences, table(found.differences.values())
    assert found.sent >= len(lines) - len(found.notes)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recording_says_whose_answers_it_holds(file: Path) -> None:
    about, lines = load(file)
    assert ("NOT Google" in about["answers_by"]) == (about["cloud"] != "gcp")
    assert {line.stage.partition(":")[0] for line in lines} <= {"tpu_api", "compute_engine"}


def first(lines: list[Document], method: str, status: int = 200, **answer: Any) -> Document:
    """The first recorded request of a method with such an answer."""
    return next(
        line
        for line in lines
        if line["method_id"].endswith(method)
        and line["status"] == status
        and all((line["answer"] or {}).get(name) == value for name, value in answer.items())
    )


def other_status(lines: list[Document]) -> None:
    first(lines, "compute.networks.get", 404).update(status=410)


def missing_field(lines: list[Document]) -> None:
    for line in lines:
        if line["method_id"] == "compute.subnetworks.get" and line["status"] == 200:
            del line["answer"]["privateIpGoogleAccess"]


def extra_field(lines: list[Document]) -> None:
    first(lines, "compute.networks.get")["answer"]["peerings"] = []


def other_enum(lines: list[Document]) -> None:
    first(lines, "compute.networks.get")["answer"]["routingConfig"]["routingMode"] = "GLOBAL"


def other_reason(lines: list[Document]) -> None:
    first(lines, "storage.buckets.get", 404)["answer"]["error"]["errors"][0]["reason"] = "gone"


def other_words(lines: list[Document]) -> None:
    first(lines, "iam.projects.serviceAccounts.get", 404)["answer"]["error"]["message"] = "There is none."


def another_order(lines: list[Document]) -> None:
    reads = [line for line in lines if line["method_id"].endswith("queuedResources.get") and line["status"] == 200]
    early = reads[0]
    late = next(line for line in reads if line["answer"]["state"] != early["answer"]["state"])
    early["answer"], late["answer"] = late["answer"], early["answer"]


def unknown_state(lines: list[Document]) -> None:
    first(lines, "nodes.get", state="READY")["answer"]["state"] = "REPAIRING"


def shape_of_an_operation(lines: list[Document]) -> None:
    for line in lines:
        if line["method_id"] == "compute.networks.insert" and line["status"] == 200:
            line["answer"]["progress"] = "0"


def page_token(lines: list[Document]) -> None:
    listed = next(line for line in lines if line["method_id"] == "storage.buckets.list" and line["status"] == 200)
    listed["answer"]["nextPageToken"] = "abc"


def default_echo(lines: list[Document]) -> None:
    for line in lines:
        if line["method_id"] == "compute.firewalls.get" and line["status"] == 200:
            del line["answer"]["priority"]


def retry_after(lines: list[Document]) -> None:
    first(lines, "compute.regions.get", 403)["answer_headers"]["retry-after"] = "7"


def no_etag(lines: list[Document]) -> None:
    for line in lines:
        if line["method_id"] == "cloudresourcemanager.projects.getIamPolicy" and line["status"] == 200:
            del line["answer"]["etag"]


def other_quota(lines: list[Document]) -> None:
    for line in lines:
        if line["method_id"] == "serviceusage.services.consumerQuotaMetrics.list" and line["status"] == 200:
            text = json.dumps(line["answer"]).replace('"effectiveLimit": "4096"', '"effectiveLimit": "8"')
            line["answer"] = json.loads(text)


def too_fast(lines: list[Document]) -> None:
    made = first(lines, "compute.subnetworks.insert")
    for line in lines:
        if (line["answer"] or {}) and line["answer"] != made["answer"] and isinstance(line["answer"], dict) \
                and line["answer"].get("name") == made["answer"]["name"]:  # fmt: skip
            line.update(began=made["began"], seconds=0.0)


PLANTED: dict[Callable[[list[Document]], None], tuple[str, str, str]] = {
    other_status: ("status", "compute.networks.get", "GET networks/account-1"),
    missing_field: ("field", "compute.subnetworks.get", "privateIpGoogleAccess"),
    extra_field: ("field", "compute.networks.get", "peerings"),
    other_enum: ("value", "compute.networks.get", "routingConfig.routingMode"),
    other_reason: ("reason", "storage.buckets.get", "404"),
    other_words: ("words", "iam.projects.serviceAccounts.get", "404 NOT_FOUND"),
    another_order: ("order", "tpu.projects.locations.queuedResources.get", ", then "),
    unknown_state: ("state", "tpu.projects.locations.nodes.get", "REPAIRING"),
    shape_of_an_operation: ("type", "compute.networks.insert", "progress"),
    page_token: ("field", "storage.buckets.list", "nextPageToken"),
    default_echo: ("field", "compute.firewalls.get", "priority"),
    retry_after: ("header", "compute.regions.get", "retry-after of 403"),
    no_etag: ("field", "cloudresourcemanager.projects.getIamPolicy", "etag"),
    other_quota: ("value", "serviceusage.services.consumerQuotaMetrics.list", "effectiveLimit"),
    too_fast: ("delay", "compute.subnetworks.insert", "insert subnetworks"),
}
"""What is changed in a recording, and the row of the table that tells of it."""


@pytest.mark.deep
def test_every_planted_difference_is_found_and_nothing_else(
    tmp_path: Path, emulators: Emulators, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, *lines = [json.loads(line) for line in OWN.read_text().splitlines()]
    planted = copy.deepcopy(lines)
    for plant in PLANTED:
        before = json.dumps(planted)
        plant(planted)
        assert json.dumps(planted) != before, plant.__name__
    file = tmp_path / REQUESTS
    file.write_text("".join(json.dumps(line) + "\n" for line in (head, *planted)))
    about, recorded = load(file)
    found = replayed(recorded, about, emulators, monkeypatch).differences
    for kind, method_id, subject in PLANTED.values():
        told = [key for key in found if key[:2] == (kind, method_id) and subject in key[2]]
        assert told, f"{kind} {method_id} {subject}: {found.keys()}"
        assert f"| {kind} | {method_id} |" in table(found.values())
    assert {key[:2] for key in found} == {row[:2] for row in PLANTED.values()}
