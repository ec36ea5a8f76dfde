"""The first use, on the emulated cloud and by hand-made answers."""

from __future__ import annotations

import pytest

from controller.cli import main
from controller.cli.verbs.setup.init import PlacementChoice
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli


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


@pytest.mark.e2e
def test_where_quota_cannot_be_asked_for_it_lists_what_zones_offer(slipway: SlipwayCli) -> None:
    fault = {"kind": "http", "status": 403, "match": "GET .*consumerQuotaMetrics", "times": 9}
    slipway.cloud().post("faults", {"key": "quota", "faults": [fault]})
    found = slipway.json("init")
    assert found["choices"]
    assert {choice["chips"] for choice in found["choices"]} == {None}


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


def test_the_type_that_is_suggested_fits_the_quota() -> None:
    assert PlacementChoice("v5e", "z", "spot", 64.0, 1.0).accelerator_type == "v5litepod-16"
    assert PlacementChoice("v5e", "z", "spot", 8.0, 1.0).accelerator_type == "v5litepod-8"
    assert PlacementChoice("v4", "z", "spot", float("inf"), None).accelerator_type == "v4-32"
    assert PlacementChoice("v6e", "z", "spot", None, None).accelerator_type == "v6e-16"
