"""What `status` prints in 80 columns: run, failures, cost and every worker."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from controller.cli.verbs.look import status
from controller.config.compose import compose
from controller.plan.build import build_plan
from controller.resources.pod.provisioner import Place, ProvisionerName

RUN = "gemma2b-of-a-researcher-who-names-runs-018e4c33"
DRIVER = "somebody@a-workstation.of.the.department (bastion) for another-run-12345678 since 2026-11-23 00:09:16 UTC"
WHY = "worker 11: ResourceExhaustedError: out of memory while trying to allocate 17179869184 bytes on device 3 of 4"
ERROR = "SSH to 10.128.0.17 was refused: the host key has changed since 2026-11-22; run `slipway verify`"
BUCKET = "gs://a-bucket-with-a-name-as-long-as-google-allows-62c990"
SINCE = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1.7e9))
URL = "https://console.cloud.google.com/compute/tpus/details/us-central1-a/slipway-v5litepod-256-62c990?project=acme"
DOCUMENT: dict[str, Any] = {
    "pod": {"name": "slipway-v5litepod-256-62c990", "state": "ready in us-central1-a, spot", "driver": DRIVER,
            "console": URL},
    "run": {
        "id": RUN,
        "state": "running",
        "attempts": 3,
        "verdicts": [
            {"time": 1.7e9, "attempt": attempt, "message": WHY, "response": "restart_from_checkpoint", "kind": "oom"}
            for attempt in (1, 2)
        ],
        "summary": {"accuracy_before": 0.25, "accuracy_after": 0.75, "accuracy_low_after": 0.7, "steps": 188},
        "damaged": [f"{BUCKET}/runs/{RUN}/launches/0001.json is damaged: no JSON (Expecting value: line 1 column 1)"],
        "alerts": [],
        "is_followed": True,
        "abandoned": 1.7e9,
        "results": f"{BUCKET}/runs/{RUN}",
    },
    "cost": {"pod_hours": 12.5, "usd": 1234.56, "usd_per_hour": 98.76, "price": "Google's list price of 2026-11-01",
             "stored_gb": 123.4, "stored_usd_per_month": 2.47, "pods": []},
    "workers": [{"worker": worker, "running": RUN, "free_gb": 88.1} for worker in range(63)]
    + [{"worker": 63, "error": ERROR}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("provisioner", "page"),
    [
        ("node", "tpus/details/us-east5-b"),
        ("queued", "tpus/details/us-east5-b"),
        ("instance", "instancesDetail/zones/us-east5-b/instances"),
        ("mig", "instanceGroups/details/us-east5-b"),
    ],
)
def test_a_pod_of_either_plane_has_a_page_in_googles_console(provisioner: ProvisionerName, page: str) -> None:
    config, problems = compose(["+experiment=quickstart", "cloud=gcp", "cloud.project=acme"])
    assert config is not None, problems
    plan = build_plan(config, "acme", Path.cwd())
    there = replace(plan.node.status, place=Place("us-east5-b", "spot", "slipway", provisioner))
    node = replace(plan.node, status=there)
    url = f"https://console.cloud.google.com/compute/{page}/{node.name}?project=acme"
    assert status.console_url(plan, node) == url
    emulated = config.model_copy(update={"cloud": config.cloud.model_copy(update={"kind": "local"})})
    assert status.console_url(replace(plan, config=emulated), node) is None


@contextmanager
def no_session(options: object, *, keep_awake: bool) -> Any:
    assert keep_awake, "starting the emulated cloud again takes longer than all the rest"
    yield type("Session", (), {"context": None})


def test_no_line_is_wider_than_80_columns_and_nothing_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(status, "open_session", no_session)
    monkeypatch.setattr(status, "retry_deletions", lambda context: [])
    monkeypatch.setattr(status, "gather_status", lambda session: DOCUMENT)
    assert main.run(["status", "+experiment=quickstart"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 1] == []
    assert URL in lines, "whole, to be clicked"
    words = " ".join(" ".join(lines).split())
    for text in (
        RUN,
        DRIVER,
        f"attempt 2: {WHY}",
        DOCUMENT["run"]["results"],
        f"warning: {DOCUMENT['run']['damaged'][0]}",
        f"nobody has driven it since {SINCE}, when its controller was last heard of",
        "accuracy 0.25 → 0.75",
        f"worker 63: {ERROR}",
    ):
        assert text in words
    assert all(f"worker {worker}: running {RUN}" in words for worker in range(63))
    assert "12.5 pod hours" in words or "12.50 pod hours" in words
    assert "$1234.56" in words
