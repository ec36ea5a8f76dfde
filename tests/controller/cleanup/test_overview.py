"""`slipway status --all` as text; what it finds is asserted on a running pod in test_orphans."""

from __future__ import annotations

import pytest

from controller.cleanup.orphans import BilledItem
from controller.cleanup.overview import PodOverview
from controller.cli import main
from controller.cli.verbs.look.project_status import format_pods

BUSY = PodOverview(
    "slipway-v5litepod-16-0ef9e1", "us-central1-a", "v5litepod-16", "ready, unhealthy tensorflow", "gsm8k-1cb75d98",
    "gsm8k-1cb75d98 is running on it", "anna@laptop (laptop)", 120, 95.0, 19.2, ("slow", "stale checkpoint"),
)  # fmt: skip
QUEUED = PodOverview("slow", "us-east5-b", "", "queued", "", "waiting_for_resources", "", None, None, 0.0)
UNKNOWN = PodOverview("odd", "us-east5-b", "v9-1", "ready", "", "not used by any known run", "", None, None, None)


@pytest.mark.parametrize("width", [80, 100, None])
def test_what_tells_pods_apart_is_never_cut(width: int | None) -> None:
    lines = format_pods([BUSY, QUEUED, UNKNOWN], [], ["lost-00c0ffee"], "my-project", width)
    text = " ".join(" ".join(lines).split())
    assert (
        "slipway-v5litepod-16-0ef9e1 ALERT slow, stale checkpoint; v5litepod-16; "
        "us-central1-a; ready, unhealthy tensorflow; gsm8k-1cb75d98 is "
        "running on it; checkpoint 120, 1:35 ago; $19.20 per hour; controlled by anna@laptop (laptop)" in text
    )
    assert "slow us-east5-b; queued; waiting_for_resources; $0.00 per hour odd v9-1" in text
    assert lines[-2] == "3 pods in my-project: $19.20 per hour at list prices"
    assert lines[-1].startswith("lost-00c0ffee was running when last seen from here")
    assert [line for line in "\n".join(lines[:-1]).splitlines() if width and len(line) > width] == []


def test_other_vms_follow() -> None:
    assert format_pods([], [], [], "my-project", 80) == ["no pods of Slipway in my-project"]
    fetcher = BilledItem("VM", "slipway-fetch-0", "us-west4-a", 0.067, "it fetches gemma", "")
    orphan = BilledItem("VM", "old-driver", "us-west4-a", None, "", "run-1 has ended")
    assert format_pods([], [fetcher, orphan], [], "my-project", 80)[1:] == [
        "VM slipway-fetch-0 in us-west4-a: it fetches gemma; $0.07 per hour",
        "VM old-driver in us-west4-a: run-1 has ended; unknown price",
    ]


@pytest.mark.parametrize("words", [["status", "--all"], ["orphans"]])
def test_this_machine_has_no_pods(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*words, "cloud=here"]) == 2
    assert "cloud=here has no project and no pods; set cloud=gcp or cloud=local" in capsys.readouterr().err
