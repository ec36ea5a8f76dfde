"""`model.weights=run:ID` becomes a checkpoint's path with its step, or one line that names what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from conf.schema.config import Config
from controller.core.errors import ConfigError
from controller.run.options import RunOptions
from tests.golden import golden

RUN = "sft-12345678"
WORDS = ["cloud=here", "cloud.backend=cpu", "+experiment=quickstart", "mesh=data"]


def config(*words: str) -> Config:
    return RunOptions((*WORDS, *words)).config()[0]


@pytest.fixture
def run(home: Path) -> Path:
    """The folder of a finished run of cloud=here, with checkpoints of steps 4 and 10, and half of one of 12."""
    folder = home.parent / "results/runs" / RUN
    for step in (4, 10, 12):
        (folder / f"checkpoints/{step}/state").mkdir(parents=True)
        (folder / f"checkpoints/{step}/state/manifest.ocdbt").touch()
    for step in (4, 10):
        (folder / f"checkpoints/{step}/commit_success.txt").touch()
    scores = {"format": 1, "metric": "eval_accuracy", "mode": "max", "best": 4, "scores": {"4": 0.8, "10": 0.7}}
    (folder / "scores.json").write_text(json.dumps(scores))
    made = {"run": RUN, "bucket": str(home.parent / "results"), "config": config().model_dump(mode="json")}
    write_record(home, golden("record") | made)
    return folder


def write_record(home: Path, record: dict[str, Any]) -> None:
    file = home / "runs" / record["run"] / "record.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record))


@pytest.mark.parametrize(("reference", "step"), [("", 10), ("@best", 4), ("@4", 4)])
def test_a_run_means_one_checkpoint(run: Path, reference: str, step: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = config(f"model.weights=run:{RUN}{reference}")
    assert found.model is not None
    assert found.model.weights == f"{run}/checkpoints/{step}", "so a repeat starts from the same weights"
    assert f"model.weights: run:{RUN}{reference} is step {step}" in capsys.readouterr().err


@pytest.mark.usefixtures("run")
def test_what_cannot_be_started_from_is_one_line(home: Path) -> None:
    other = json.loads((home / f"runs/{RUN}/record.json").read_text())
    other["config"]["model"] = None
    write_record(home, other | {"run": "own-1"})
    for words, message in (
        ([f"model.weights=run:{RUN}@12"], f"{RUN} has checkpoints of steps 4, 10"),
        ([f"model.weights=run:{RUN}@last"], "is none of run:ID, run:ID@best and run:ID@STEP"),
        (["model.weights=run:own-1"], "own-1 is no run of the bundled trainer, so it has no weights"),
        (["model.weights=run:sft-0"], "model.weights: sft-0: no such run on this machine"),
        ([f"model.weights=run:{RUN}", "model.dim=128"], f"model.dim: is 128, but 64 in {RUN}"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(*words)
    with pytest.raises(ConfigError, match=r"cloud=local cannot read; `slipway export"):
        RunOptions(("cloud=local", *WORDS[2:], f"model.weights=run:{RUN}")).config()


def test_a_run_without_scores_has_no_best_and_one_without_checkpoints_says_so(run: Path) -> None:
    (run / "scores.json").unlink()
    with pytest.raises(ConfigError, match=r"did not record a best checkpoint \(checkpoint\.best\)"):
        config(f"model.weights=run:{RUN}@best")
    for file in run.glob("checkpoints/*/commit_success.txt"):
        file.unlink()
    with pytest.raises(ConfigError, match=f"{RUN} has no complete checkpoint in .* yet; the bundled trainer saves"):
        config(f"model.weights=run:{RUN}")
