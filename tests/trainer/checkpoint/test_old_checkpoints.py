"""Runs that an earlier Slipway saved with an earlier JAX: their weights are read, and their training goes on."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from etils import epath

from conf.schema.training.run_yaml import RunFile
from tests.conftest import wide
from tests.trainer import conftest
from tests.trainer.fixtures.make_checkpoints import SMALL, STEP, sum_of
from tests.trainer.lives import saved, train
from trainer import convert
from trainer.checkpoint.manager import CheckpointManager
from trainer.distributed import mesh as meshes
from trainer.pretrained import store
from trainer.step import train_step

FOLDER = Path(conftest.__file__).parent / "fixtures/checkpoints"


def unpacked(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run.yaml of a run that now lies in `folder`, as data, and what is known of its checkpoint."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(folder / "bucket", filter="data")
    file = folder / "bucket/run.yaml"
    raw = yaml.safe_load(file.read_text()) | {"dir": str(folder / "bucket")}
    if "path" in raw["data"]:
        raw["data"]["path"] = str(folder / Path(raw["data"]["path"]).name)
    file.write_text(yaml.safe_dump(raw))
    return raw, json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["lm", "grpo"])
def test_state_position_and_reference_are_read(name: str, tmp_path: Path) -> None:
    raw, made = unpacked(name, tmp_path)
    [(state, position)] = saved(raw)
    assert int(state.step) == made["updates"]
    assert position == made["position"]
    for part in ("params", "optimizer", *(["average"] if name == "lm" else [])):
        assert sum_of(getattr(state, part)) == made[part], part
    if name == "grpo":
        experiment = RunFile.model_validate(raw)
        shapes = train_step.abstract_state(experiment.model, experiment.optimizer, meshes.build_mesh(experiment.mesh))
        with CheckpointManager(experiment.dir, experiment.checkpoint) as checkpoints:
            assert sum_of(checkpoints.restore_reference(shapes.params)) == made["reference"]


@pytest.mark.parametrize("name", ["lm", "grpo"])
def test_the_weights_are_exported(name: str, tmp_path: Path) -> None:
    _, made = unpacked(name, tmp_path)
    checkpoint, out = epath.Path(tmp_path / f"bucket/checkpoints/{STEP}"), tmp_path / "out"
    assert convert.main(["export", str(checkpoint), str(out)]) == 0
    assert store.read_model(checkpoint).model_dump(include={*SMALL}) == SMALL
    folders = (checkpoint, epath.Path(out))
    before, after = (store.read_params(folder, store.read_model(folder)) for folder in folders)
    assert sum_of(before) == sum_of(after) == made["average" if name == "lm" else "params"]


@pytest.mark.parametrize("name", ["lm", *wide("grpo")])
def test_training_goes_on(name: str, tmp_path: Path) -> None:
    conftest.make_lm_run(tmp_path)  # its text, of which the run's is a copy
    raw, _ = unpacked(name, tmp_path)
    lines = train(raw, tmp_path / "worker")
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == [*range(STEP + 1, raw["loop"]["steps"] + 1)]
    assert sorted(path.name for path in (tmp_path / "bucket/checkpoints").iterdir())[-1] == str(raw["loop"]["steps"])
