"""The first use, localcloud, and finding the emulated cloud of a state folder; the table of slipway capacity."""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from conf.schema.cloud import LocalCloud
from controller import emulator
from controller.cli import main
from controller.cli.verbs import clouds
from controller.cli.verbs.grants import format_entries
from controller.cli.verbs.placements import PlacementChoice, find_placements
from controller.core.errors import ConfigError
from controller.core.events import confirm
from controller.core.json_documents import append_lines
from controller.gcp.google_errors import ForbiddenError
from controller.records import index
from controller.resources.pod.capacity_log import CapacityEntry, capacity_file
from tests.composed import config_of
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.fakes.context import make_context
from tests.fakes.google import Answers
from tests.fakes.loopback import Loopback
from tests.terminal import Tty


@pytest.mark.e2e
def test_it_writes_what_plan_then_understands(slipway: SlipwayCli) -> None:
    found = slipway.json("init", "--yes", "--zone", "us-east5-b")
    assert found["files"] == ["slipway/cloud/mine.yaml", "slipway/tpu/mine.yaml"]
    assert (found["chosen"]["zone"], found["bucket"]) == ("us-east5-b", "slipway-local-slipway-us-east5")
    assert "slipway-local-slipway-us-east5" in slipway.cloud().get("state")["bucket"]
    assert main.run(["plan", "cloud=mine", "tpu=mine", "program=command", ECHO_COMMAND, "env.packages=image"]) == 0
    out, _ = slipway.capsys.readouterr()
    assert "in us-east5-b" in out
    assert "= exists   bucket slipway-local-slipway-us-east5" in out
    code, _, err = slipway("init")
    assert code == 2
    assert "already there; pass --yes to overwrite" in err


@pytest.mark.e2e
def test_without_a_terminal_it_takes_the_largest_quota_and_makes_no_bucket(slipway: SlipwayCli) -> None:
    code, out, _ = slipway("init")
    assert code == 0
    assert "wrote slipway/cloud/mine.yaml and slipway/tpu/mine.yaml" in out
    assert slipway.cloud().get("state")["bucket"] == {}
    assert slipway("init", "--yes", "--zone", "moon-base1-a")[0] == 2
    fault = {"kind": "http", "status": 403, "match": "GET .*consumerQuotaMetrics", "times": 9}
    slipway.cloud().post("faults", {"key": "quota", "faults": [fault]})
    (slipway.repository / "slipway").rename(slipway.repository / "before")
    choices = slipway.json("init")["choices"]
    assert {choice["chips"] for choice in choices} == {None}, "what zones offer, where quota cannot be asked for"


@pytest.mark.e2e
def test_what_google_offers_and_the_table_lacks_is_named_and_not_chosen(slipway: SlipwayCli) -> None:
    new = [
        {"kind": "offered", "zone": "us-central1-a", "type": "v8t-16"},
        {"kind": "offered", "zone": "us-east5-b", "type": "v8t-16"},
        {"kind": "offered", "zone": "us-central1-c", "machine_type": "tpu8i-standard-4t"},
        {"kind": "offered", "zone": "us-central1-c", "machine_type": "ct4p-hightpu-4t"},
        {"kind": "offered", "zone": "us-west1-ai1a", "type": "v6e-8"},
    ]
    slipway.cloud().post("faults", {"key": "new", "faults": new})
    ready = "cloud.realism=relaxed"  # the APIs are on
    code, _, err = slipway("init", ready)
    assert code == 0
    said = "Google offers what conf/tpu_types.yaml does not have: v8t-16 (us-central1-a and 1 more), tpu8i-standard-4t"
    assert f"{said} (us-central1-c). Their chips, VMs, memory, image and price are unknown" in err
    found = slipway.json("init", "--yes", "--no-bucket", ready)
    assert found["unknown"] == {"v8t-16": ["us-central1-a", "us-east5-b"], "tpu8i-standard-4t": ["us-central1-c"]}
    assert {choice["generation"] for choice in found["choices"]} == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    fault = {"kind": "http", "status": 403, "match": "GET .*consumerQuotaMetrics", "times": 9}
    slipway.cloud().post("faults", {"key": "quota", "faults": [fault]})
    choices = slipway.json("init", "--yes", ready)["choices"]
    [zone] = [c for c in choices if (c["zone"], c["capacity"]) == ("us-west1-ai1a", "spot")]
    assert (zone["generation"], zone["usd_per_chip_hour"], zone["chips"]) == ("v6e", None, None)


@pytest.mark.e2e
def test_a_quota_of_compute_engine_is_a_choice_of_that_plane(slipway: SlipwayCli) -> None:
    found = slipway.json("init", "--yes", "--no-bucket", "--zone", "us-central1-ai1a")
    chosen = found["chosen"]
    assert (chosen["generation"], chosen["plane"], chosen["accelerator_type"]) == (
        "tpu7x",
        "compute_engine",
        "tpu7x-32",
    )
    assert chosen["usd_per_chip_hour"] == 12.0
    assert "plane: compute_engine\n" in (slipway.repository / "slipway/tpu/mine.yaml").read_text()
    assert main.run(["plan", "cloud=mine", "tpu=mine", "program=command", ECHO_COMMAND, "env.packages=image"]) == 0
    assert "in us-central1-ai1a" in slipway.capsys.readouterr()[0]


def test_without_credentials_it_says_how_to_get_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    for name in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    assert main.run(["init"]) == 2
    assert "gcloud config set project ID" in capsys.readouterr().err
    assert main.run(["init", "cloud.project=acme"]) == 2
    assert "gcloud auth application-default login" in capsys.readouterr().err


def test_what_has_a_quota_comes_first_and_what_google_tells_none_of_last(tmp_path: Path) -> None:
    buckets = [{"effectiveLimit": "8", "dimensions": {"zone": "us-east5-b"}}]
    limit = {"unit": "1/{project}/{zone}", "quotaBuckets": buckets}
    metric = {"metric": "tpu.googleapis.com/tpu-v6e", "consumerQuotaLimits": [limit]}
    listed = {"acceleratorTypes": [{"name": "projects/p/locations/z/acceleratorTypes/v6e-8", "type": "v6e-8"}]}
    answers = {
        "services.consumerQuotaMetrics.list": {"metrics": [metric]},
        "projects.locations.list": {
            "locations": [{"name": "projects/p/locations/us-east5-b"}, {"locationId": "x-y-z"}]
        },
        "projects.locations.acceleratorTypes.list": listed,
        "machineTypes.aggregatedList": ForbiddenError("x", 403, "forbidden", "no"),
    }
    found = find_placements(make_context(Answers(answers), tmp_path, project="p"))
    first, *others = found.choices
    assert (first.zone, first.capacity, first.chips, first.accelerator_type) == (
        "us-east5-b",
        "on_demand",
        8.0,
        "v6e-8",
    )
    assert {choice.chips for choice in others} == {None}
    assert "x-y-z" in {choice.zone for choice in others}
    assert "tpu7x" in {choice.generation for choice in others if choice.plane == "compute_engine"}, "of the table"
    assert (found.why, found.unknown, found.unknown_words) == ("", {}, "")


def test_the_type_that_is_suggested_fits_the_quota() -> None:
    quota = [("v5e", 64.0), ("v5e", 8.0), ("v4", float("inf")), ("v6e", None)]
    found = [PlacementChoice(generation, "z", "spot", chips, None).accelerator_type for generation, chips in quota]
    assert found == ["v5litepod-16", "v5litepod-8", "v4-32", "v6e-16"]


def test_wipe_asks_and_says_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    asked, called = list[str](), list[list[str]]()
    monkeypatch.setattr(sys, "stdin", Tty())
    monkeypatch.setattr(emulator, "run_emulator_verb", lambda words, *_, **__: (called.append(words), (0, ""))[1])
    index.append_rows(tmp_path, [{"run": "q-1", "cloud": "local"}, {"run": "q-2", "cloud": "gcp"}])

    def answer(text: str) -> None:
        def read(question: str, *, yes: bool) -> bool:
            return confirm(question, yes=yes, read=lambda prompt: (asked.append(prompt), text)[1])

        monkeypatch.setattr(clouds, "confirm", read)

    answer("n")
    assert main.run(["localcloud", "wipe"]) == 2
    assert "nothing was deleted; pass --yes to skip the prompt" in capsys.readouterr().err
    assert called == []
    answer("y")
    assert main.run(["localcloud", "wipe"]) == 0
    assert asked[-1] == "Delete the emulated cloud, and in its buckets the results of 1 run? [y/N] "
    assert "deleted: the emulated cloud with its buckets and pods" in capsys.readouterr().out
    assert main.run(["localcloud", "wipe", "--yes"]) == 0
    assert (len(asked), called) == (2, [["wipe"], ["wipe"]])


NOW = 1767225600.0
HOUR = 3600.0


def entry(zone: str, hours_ago: float, answer: str = "granted", *, lived: float = 0.0, **more: Any) -> CapacityEntry:
    """A request for a pod, which was there for `lived` seconds if not 0."""
    given: dict[str, Any] = {"time": NOW - hours_ago * HOUR, "waited_seconds": 40.0, **more}
    ended = given["time"] + given["waited_seconds"] + lived if lived else None
    what: dict[str, Any] = {"project": "acme", "provisioner": "queued", "tier": "spot", "pod": "slipway-anna"}
    what |= {"zone": zone, "accelerator_type": "v5litepod-16", "answer": answer, "ended_time": ended}
    return CapacityEntry(id=f"{zone}-{hours_ago}", **what, **given)


ENTRIES = [
    entry("us-west4-a", 160, "stock_out"),
    entry("us-west4-a", 30, "stock_out"),
    entry("us-central1-a", 29.9, lived=2 * HOUR, ended="preempted"),
    entry("us-central1-a", 5, waited_seconds=80.0, lived=4 * HOUR, ended="preempted"),
    entry("us-west4-a", 4, "stock_out"),
    entry("us-west4-a", 3.9, waited_seconds=100.0),
]


def test_the_table_and_the_pictures() -> None:
    lines = format_entries(ENTRIES, 7, NOW, None)
    assert [line.split()[:5] for line in lines[1:3]] == [
        ["v5litepod-16", "us-west4-a", "spot", "1", "of"],
        ["v5litepod-16", "us-central1-a", "spot", "2", "of"],
    ]
    assert "2 of 2   1:00    3:00:00  preempted, 5:00:00 ago" in lines[2]
    assert "1 of 4   1:40             granted, 3:54:00 ago" in lines[1]
    assert lines[1].split()[-1] == "·×·····················×···▄"
    assert lines[2].split()[-1] == "·······················█···█"
    lines = format_entries(ENTRIES, 7, NOW, 80)
    assert max(map(len, lines)) <= 80
    assert "the last 7 days:" in lines
    assert "·······················█···█  v5litepod-16 in us-central1-a (spot)" in lines


def test_a_life_that_nothing_ended_but_its_user_is_a_lower_bound() -> None:
    [_, line, *_] = format_entries([entry("a-b-c", 9, lived=HOUR, ended="deleted")], 7, NOW, None)
    assert "≥ 1:00:00" in line


def test_what_a_search_gave_back_is_no_refusal_and_no_life() -> None:
    found = [entry("a-b-c", 9), entry("a-b-c", 8, lived=4.0, ended="surplus"), entry("a-b-c", 7, "withdrawn")]
    [_, line, *_] = format_entries(found, 7, NOW, None)
    assert "2 of 2" in line  # the request that was withdrawn was never answered
    assert "withdrawn, 7:00:00 ago" in line
    assert "×" not in line
    assert "≥" not in line
    assert "surplus, 8:00:00 ago" in format_entries(found[:2], 7, NOW, None)[1]


def test_planes_are_rows_of_their_own() -> None:
    first = entry("us-west4-a", 2)
    others = [replace(entry("us-west4-a", 1, "stock_out"), provisioner=way) for way in ("mig", "way-of-tomorrow")]
    title, *lines = format_entries([first, *others], 7, NOW, None)
    assert "plane" in title
    assert [line.split()[3:6] for line in lines[:3]] == [
        ["TPU", "API", "1"], ["Compute", "Engine", "0"], ["way-of-tomorrow", "0", "of"]]  # fmt: skip
    assert "plane" not in format_entries([first], 7, NOW, None)[0]
    assert ", Compute Engine" in "\n".join(format_entries([first, *others], 7, NOW, 80))


def test_the_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    assert main.run(["capacity"]) == 0
    assert capsys.readouterr().out.startswith("no requests for pods in the last 7 days; ")
    now = time.time()
    lines = [entry("us-west4-a", 0, time=now - HOUR), entry("us-west4-b", 0, "quota", time=now - 30 * HOUR)]
    text = "".join(json.dumps(line.to_json()) + "\n" for line in lines)
    append_lines(capacity_file(tmp_path), f"{text}{{\n")
    assert main.run(["capacity", "--days", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [(found["zone"], found["lived_seconds"]) for found in json.loads(out)] == [("us-west4-a", None)]
    assert err.startswith(f"warning: {capacity_file(tmp_path)}: line 3 cannot be read; ")
    assert main.run(["capacity"]) == 0
    assert "quota" in capsys.readouterr().out
    for days in ("0", "-1", "nan", "inf"):
        assert main.run(["capacity", "--days", days]) == 2
        assert f"--days: must be a number above 0 and at most 3650, not '{days}'" in capsys.readouterr().err


class Answering(Loopback, BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == "Bearer right"
        answer = {"pid": os.getpid()} if allowed else {"error": {"message": "another server's token"}}
        self.answer(200 if allowed else 401, json.dumps(answer).encode())


@pytest.fixture
def url() -> Iterator[str]:
    with Answering.serving() as url:
        yield url


def _endpoint(folder: Path, **changed: object) -> None:
    found = {"token": "right", "pid": os.getpid(), "roots": {}, "project": "p", "ssh_config": "s", **changed}
    (folder / "endpoint.json").write_text(json.dumps(found))


def test_a_running_one_is_found_without_starting_a_program(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator, "run_emulator_verb", lambda *_: pytest.fail("a program was started"))
    _endpoint(tmp_path, url=url)
    found = emulator.find_answering(tmp_path)
    assert found is not None
    assert found.url == url.rstrip("/")


@pytest.mark.parametrize("changed", [{"token": "wrong"}, {"pid": 1}, {"url": "http://127.0.0.1:9/"}])
def test_the_file_of_a_killed_one_is_not_believed(url: str, tmp_path: Path, changed: dict[str, object]) -> None:
    assert emulator.find_answering(tmp_path) is None, "none has run on a new folder"
    (tmp_path / "endpoint.json").write_text('{"url"')
    assert emulator.find_answering(tmp_path) is None
    _endpoint(tmp_path, **{"url": url, **changed})
    assert emulator.find_answering(tmp_path) is None


def test_a_port_beside_a_running_emulated_cloud_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    running = emulator.Emulator(tmp_path, "http://127.0.0.1:4000", "t", {}, "p", tmp_path)
    monkeypatch.setattr(emulator, "find_answering", lambda folder: running)
    monkeypatch.setattr(emulator.Emulator, "post", lambda *args: {})
    for port, is_refused in ((0, False), (4000, False), (4001, True), (400, True)):
        config = config_of("cloud=local", "program=command", ECHO_COMMAND, f"cloud.port={port}")
        assert isinstance(config.cloud, LocalCloud)
        if not is_refused:
            assert emulator.ensure_running(config.cloud, str(tmp_path)) is running
            continue
        with pytest.raises(
            ConfigError, match=r"cloud\.port: the emulated cloud runs already, at http://127\.0\.0\.1:4000;"
        ):
            emulator.ensure_running(config.cloud, str(tmp_path))
