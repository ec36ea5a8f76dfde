"""Weights & Biases for real, offline: what it writes is read back."""

import json
import logging
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from conf.schema.training.run_yaml import RunFile, RunFileError
from trainer.telemetry import wandb
from trainer.telemetry.metrics import MetricsLogger
from trainer.telemetry.wandb import WandbRun

BLOCK = 32768
SETTINGS = {"project": "slipway-test", "entity": None, "mode": "offline"}


def experiment(lm_run: dict[str, Any], **settings: Any) -> RunFile:
    return RunFile.model_validate(lm_run | {"logging": lm_run["logging"] | {"wandb": SETTINGS | settings}})


def life(found: RunFile, folder: Path, first: int, last: int) -> None:
    """The steps after `first` to `last`, of process 0."""
    log = MetricsLogger(folder, found.dir, writes=True, wandb=wandb.start_run(found, folder))
    log.resume(first)
    for step in range(first + 1, last + 1):
        log.log(step, "train", loss=1.0 / step, broken=float("nan"))
    log.summarize(accuracy_after=0.75)
    log.close()


def records(file: Path) -> list[Any]:
    """All that one life has written: LevelDB's log format behind seven bytes of W&B's own.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, found, text = file.read_bytes(), 7, [], b""
    while at + 7 <= len(content):
        if (rest := BLOCK - at % BLOCK) < 7:
            at += rest
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        text += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(text))
            text = b""
    return found


@pytest.mark.filterwarnings("default")  # of the packages that it brings along
def test_each_life_of_a_run_is_the_same_run_there(
    lm_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    secret = "0123456789abcdef" * 3
    monkeypatch.setenv("WANDB_API_KEY", secret)
    found = experiment(lm_run)
    life(found, tmp_path / "first", 0, 3)
    life(found, tmp_path / "second", 2, 5)
    assert list((tmp_path / "bucket" / "wandb").rglob("*.wandb"))
    files = [file for name in ("first", "second") for file in (tmp_path / name / "wandb").glob("offline-*/*.wandb")]
    assert len(files) == 2
    for file, steps in zip(files, ([1, 2, 3], [3, 4, 5]), strict=True):
        everything = records(file)
        [run] = [record.run for record in everything if record.HasField("run")]
        assert (run.run_id, run.project, run.run_group) == (found.id, "slipway-test", found.name)
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["loop"]["steps"] == found.loop.steps
        assert "dir" not in config
        lines = [{item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                 for record in everything if record.HasField("history")]  # fmt: skip
        assert [(line["_step"], line["loss"]) for line in lines] == [(step, 1.0 / step) for step in steps]
        assert not any("broken" in line for line in lines)
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert secret.encode() not in written
    assert os.uname().nodename.encode() not in b"".join(file.read_bytes() for file in files)


def test_a_missing_package_is_one_clear_error(
    lm_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunFileError, match=r"logging\.wandb: the package wandb is not installed"):
        wandb.start_run(experiment(lm_run), tmp_path)
    assert wandb.start_run(RunFile.model_validate(lm_run), tmp_path) is None


class Broken:
    """A run there that nobody answers for."""

    def log(self, *_: Any, **__: Any) -> None:
        raise ConnectionError("no network\nand much more")

    def finish(self) -> None:
        raise ConnectionError("no network")


def test_trouble_there_is_told_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLogger(tmp_path / "a", str(tmp_path / "bucket"), writes=True, wandb=WandbRun(Broken()))
    with caplog.at_level(logging.WARNING):
        log.log(1, "train", loss=0.5)
        log.summarize(x=1.0)
        log.close()
    assert (tmp_path / "bucket" / "metrics.jsonl").read_text().count("loss") == 1
    assert caplog.records[0].getMessage() == "logging.wandb: no network"
    assert len(caplog.records) == 3
