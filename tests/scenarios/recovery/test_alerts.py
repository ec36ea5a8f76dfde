"""Alerts of a program from its metrics to the screen, the notifier, the bucket, `status` and the report."""

from __future__ import annotations

import pytest

from tests.controller.conftest import SlipwayCli
from tests.scenarios.pods.test_money import ONE
from tests.scenarios.recovery.test_recovery import keeps_notifications, notified

pytestmark = pytest.mark.e2e
PROGRAM = """
import json, os

losses = [3.0, 3.1, 2.9] * 4 + [9.0] * 3 + [3.0] * 2 + [float("nan")]
with open(os.environ["SLIPWAY_RUN_DIR"] + "/metrics.jsonl", "a") as file:
    for step, loss in enumerate(losses, 1):
        print(json.dumps({"step": step, "loss": loss}), file=file)
    secret = os.environ["TOKEN"]
    print(json.dumps({"step": 18, "alert": "reward hacking", "message": "the token is " + secret}), file=file)
"""


@pytest.mark.deep
def test_alerts_reach_everyone_once_and_without_secrets(slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hf_a_secret_of_the_user")
    (slipway.repository / "train.py").write_text(PROGRAM)
    words = [*ONE, "program.command=[python,train.py]", "env.packages=image", "env.secrets.TOKEN=env"]
    code, out, err = slipway("up", *words, keeps_notifications(slipway))
    assert (code, err) == (0, "")
    names = ["loss spike", "not finite", "reward hacking"]
    assert [out.count(f"! {name}: ") for name in names] == [1, 1, 1]
    assert out.count("› loss spike is over") == 1
    assert notified(slipway) == ["alert", "alert", "alert", "end"]
    found = slipway.json("status", *words)["run"]
    assert sorted(alert["name"] for alert in found["alerts"]) == names
    assert all(alert["ended"] is not None for alert in found["alerts"])  # with the attempt at the latest
    status = slipway("status", *words)[1]
    assert status.count("past alert ") == 3
    assert slipway("report", found["id"])[0] == 0
    page = (slipway.home / "reports" / f"{found['id']}.html").read_text()
    assert page.count("<h3>Alerts</h3>") == 1
    assert "hf_a_secret" not in out + status + page
