"""The first use, on the emulated cloud and by hand-made answers; `localcloud wipe`."""

import sys
from pathlib import Path

import pytest

from controller.cli import main
from controller.cli.verbs import clouds
from controller.cli.verbs.clouds import PlacementChoice
from controller.cloud import emulator
from controller.core.ui import confirm
from controller.records import index
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
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
