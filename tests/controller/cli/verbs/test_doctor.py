"""`slipway doctor` as it is typed: its table, its exit codes, and that it only reads."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from conf.as_of import all_facts
from controller.cli import main
from controller.cli.verbs.doctor import examine, format_rows, outdated
from controller.gcp.client import GoogleClient
from tests.composed import config_of
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context

READY = "cloud.realism=relaxed"
"""A project whose APIs are on."""


@pytest.mark.e2e
def test_what_it_says_of_a_new_project_and_of_one_in_use(slipway: SlipwayCli) -> None:
    code, out, _ = slipway("doctor", ECHO_COMMAND)
    assert code == 1
    assert "tpu.googleapis.com is off: `up` enables it, or `gcloud services enable tpu.googleapis.com" in out
    assert "→ gcloud services enable tpu.googleapis.com --project=slipway-local" in out
    code, out, _ = slipway("doctor", ECHO_COMMAND, READY, "--days", "36500")
    assert code == 0, out
    assert "✗" not in out
    assert "\n\n1 note, " in out
    code, out, _ = slipway("doctor", ECHO_COMMAND, READY, "--days", "1")
    assert (code, "! dates             conf/prices.yaml: " in out, "→ git pull" in out) == (0, True, True)
    assert slipway("doctor", "--days", "0")[0] == 2
    fault = {"kind": "billing_disabled"}
    slipway.cloud().post("faults", {"key": "billing", "faults": [fault]})
    code, out, _ = slipway("doctor", READY, "tpu.capacity=sopt")
    assert code == 2, "the schema refuses it"
    code, out, _ = slipway("doctor", READY)
    assert code == 2
    first, cure, *_ = out.splitlines()
    assert first.startswith("✗ billing  ")
    assert cure.strip().startswith("→ gcloud billing projects link slipway-local")
    assert "- plan" in out, "no program is named"
    code, out, _ = slipway("plan", ECHO_COMMAND, READY, "--json")
    [billing] = [finding for finding in json.loads(out)["findings"] if finding["severity"] == "error"]
    assert (code, billing["cure"] in cure) == (2, True)
    assert slipway.mutations() == []


@pytest.mark.e2e
def test_the_document_has_a_row_for_every_check(slipway: SlipwayCli) -> None:
    slipway.cloud().post("faults", {"key": "x", "faults": [{"kind": "denied", "permission": "orgpolicy.policy.get"}]})
    code, out, _ = slipway("doctor", ECHO_COMMAND, READY, "--json")
    document = json.loads(out)
    assert (code, document["project"]) == (0, "slipway-local")
    rows = {row["check"]: row for row in document["checks"]}
    assert {"credentials", "organization", "quota", "clock", "ssh_key", "hugging_face", "zone"} <= rows.keys()
    assert all(row.keys() == {"check", "outcome", "key", "words", "cure"} for row in rows.values())


def test_what_is_older_than_so_many_days_is_named_with_its_date_age_and_cure() -> None:
    now = datetime(2026, 11, 29, tzinfo=UTC).timestamp()
    [old] = [row for row in outdated(now, 600) if row["key"] == "conf/prices.yaml"]
    assert (old["check"], old["outcome"], old["cure"]) == ("dates", "warning", "git pull")
    assert old["words"].startswith(
        "storage, disks and VMs (the pages named below): as of 2025, 697 days old at most; a"
    )
    assert len(outdated(now + 86400 * 9999, 180)) == len(list(all_facts()))
    assert outdated(now, 9999) == [
        {"check": "dates", "outcome": "ok", "key": "", "cure": "",
         "words": "no table, image or lock is older than 9999 days"}]  # fmt: skip


def test_what_several_checks_say_is_printed_once() -> None:
    off = {"outcome": "unknown", "key": "", "words": "it is off", "cure": "gcloud services enable it"}
    rows = [{"check": "quota", **off}, {"check": "apis", **off}, {**off, "check": "zone", "outcome": "ok"}]
    late = {"outcome": "unknown", "key": "", "words": "not asked", "cure": ""}
    rows += [{"check": name, **late} for name in ("organization", "clock")]
    assert format_rows(rows) == [
        "? quota, apis       it is off",
        "                    → gcloud services enable it",
        "? organization, clock",
        "                    not asked",
        "✓ 1 check: zone",
        "",
        "4 unknown, 1 ok",
    ]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], {("plan", "note", "")}),
        (["program=command"], {("plan", "note", "")}),
        (["loop=grpo", "data=jsonl"], {("complete", "error", "model"), ("complete", "error", "optimizer")}),
    ],
)
def test_half_of_a_trainer_is_no_missing_program(
    overrides: list[str], told: set[tuple[str, str, str]], tmp_path: Path
) -> None:
    clock = ManualClock()
    context = make_context(GoogleClient(None, clock), tmp_path, project="acme", clock=clock)
    rows = examine(config_of("cloud=gcp", "cloud.project=acme", *overrides), context)
    found = {(row["check"], row["outcome"], row["key"]) for row in rows}
    assert {row for row in found if row[0] in ("complete", "command") or row[1] == "note"} == told


def test_a_run_on_this_machine_has_no_project(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "cloud=here"]) == 2
    assert "cloud=here has no project" in capsys.readouterr().err
    assert not home.exists()
