"""Alerts of a program from its metrics to the screen, the notifier, the bucket, `status` and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.cli import main
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


@pytest.mark.deep
def test_the_bundled_trainers_metrics_raise_alerts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = ["+experiment=quickstart", "scale=tiny", "cloud=here", "cloud.backend=cpu", "env.packages=image"]
    lengths = ["loop.steps=4", "loop.warm_start_steps=0", "logging.log_interval=1"]
    limits = ["alerts.min_tokens_per_second=1e12", "alerts.sustained_seconds=0", "loop.alerts.entropy_below=100"]
    code = main.run(["up", *words, *lengths, *limits])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    names = ["below floor", "entropy"]
    assert [out.count(f"! {name}: ") for name in names] == [1, 1], out
    assert main.run(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["run"]
    assert sorted(alert["name"] for alert in found["alerts"]) == names
