"""The memory of capacity: what is recorded of requests and of ends, what other machines see, and the order of zones."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.context import Context
from controller.gcp.errors import GoogleError
from controller.resources.pod import capacity_log, search
from controller.resources.pod.capacity_log import CapacityEntry, fetch_entries, load_entries, recent_places_first
from controller.resources.pod.provisioner import Place
from tests.controller.localcloud.harness import wait_for
from tests.controller.resources.conftest import EmulatedProject
from tests.controller.resources.fake_pod import TWO_ZONES, A, B, pod

HOUR = 3600.0
NOW = 1767225600.0


@pytest.fixture
def recorded(project: EmulatedProject) -> EmulatedProject:
    project.context.bucket = f"{project.tag}-bucket"
    return project


def on_another_machine(context: Context, folder: Path) -> Context:
    context.state_dir = folder
    return context


def test_answers_and_ends_are_on_record_here_and_in_the_bucket(recorded: EmulatedProject, tmp_path: Path) -> None:
    made = pod(recorded, "tpu.provisioner=node", *TWO_ZONES)
    recorded.inject_fault(kind="stockout", times=1, zone=A, at="request")
    made.up()
    made.down()
    refused, granted = entries = load_entries(recorded.folder)
    assert (refused.zone, refused.tier, refused.answer, refused.ended) == (A, "spot", "stock_out", "")
    assert "no more capacity" in refused.message
    assert (granted.zone, granted.answer, granted.ended) == (B, "granted", "deleted")
    assert granted.lived_seconds is not None
    assert {entry.accelerator_type for entry in entries} == {"v5litepod-8"}

    other = on_another_machine(recorded.context, tmp_path / "other")
    assert load_entries(other.state_dir) == []
    for _ in range(2):
        assert fetch_entries(other, other.bucket, 0.0) == entries
    assert len(capacity_log.capacity_file(other.state_dir).read_text().splitlines()) == 3  # nothing is copied twice
    assert fetch_entries(on_another_machine(other, tmp_path / "third"), other.bucket, granted.time + 1000) == []


def test_a_zone_that_granted_a_slice_comes_first_until_it_preempts_it(recorded: EmulatedProject) -> None:
    made = pod(recorded, "tpu.provisioner=queued", *TWO_ZONES)
    recorded.inject_fault(kind="stockout", times=1, zone=A, at="request")
    made.up()
    made.down()
    second = made.up()
    assert made.asked() == [f"{A} spot", f"{B} spot", f"{B} spot"]
    recorded.inject_fault(kind="preempted", after_seconds=0)
    wait_for(lambda: second.pod_seen(recorded.context).state == "PREEMPTED", "the preemption")
    made.up()
    assert made.asked()[3:] == [f"{A} spot"]
    assert [entry.ended for entry in load_entries(recorded.folder)] == ["", "deleted", "preempted", ""]
    made.down()


def test_without_the_bucket_the_search_goes_on(recorded: EmulatedProject, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pod(recorded, "tpu.provisioner=node", *TWO_ZONES)

    def refused(*_: object, **__: object) -> None:
        raise GoogleError("storage", 503, "UNAVAILABLE", "no bucket today")

    monkeypatch.setattr(recorded.context.google, "upload", refused)
    monkeypatch.setattr(search, "fetch_entries", refused)
    made.up()
    assert "the answer is on record on this machine only: " in made.notes
    assert "the bucket's record of capacity is not used: " in made.notes
    assert [entry.answer for entry in load_entries(recorded.folder)] == ["granted"]
    made.down()


def entry(zone: str, hours_ago: float, answer: str = "granted", ended: str = "", kind: str = "v6e-8") -> CapacityEntry:
    return CapacityEntry(
        id=f"{zone}-{hours_ago}",
        time=NOW - hours_ago * HOUR,
        project="acme",
        provisioner="node",
        zone=zone,
        tier="spot",
        accelerator_type=kind,
        pod="p",
        answer=answer,
        ended=ended,
    )


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], "abc"),
        ([entry("b", 3)], "bac"),
        ([entry("b", 3), entry("c", 2)], "cba"),
        ([entry("b", 3), entry("b", 1, "stock_out")], "abc"),
        ([entry("b", 3), entry("b", 1, ended="preempted")], "abc"),
        ([entry("b", 3), entry("b", 1, "withdrawn")], "bac"),  # that says nothing of capacity
        ([entry("b", 3, ended="preempted"), entry("b", 1, ended="deleted")], "bac"),
        ([entry("b", 25)], "abc"),
        ([entry("b", 3, kind="v6e-16")], "abc"),
        ([entry("b", 3), entry("b", 1, answer="", ended="preempted")], "bac"),  # of a slice that nobody asked for here
        ([entry("z", 3)], "abc"),
    ],
)
def test_the_order_of_zones(entries: list[CapacityEntry], expected: str) -> None:
    tiers = ("spot", "on_demand")
    places = [Place(zone, tier, "") for zone in "abc" for tier in tiers]
    found = recent_places_first(places, "v6e-8", entries, NOW)
    assert found == [Place(zone, tier, "") for zone in expected for tier in tiers]


def test_a_damaged_line_is_named_and_skipped(tmp_path: Path) -> None:
    file = capacity_log.capacity_file(tmp_path)
    good = capacity_log._line(entry("b", 3))
    file.write_text(f'{good}\n{{"format": 1, "id"\n{{"format": 1, "id": 3}}\nnull\n')
    damaged: list[int] = []
    assert load_entries(tmp_path, damaged) == [entry("b", 3)]
    assert damaged == [2, 3, 4]
