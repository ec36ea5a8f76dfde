"""Checkpoints of runs, saved without training."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from conf.schema.training.model import Model
from conf.schema.training.run_yaml import RunFile
from tests.trainer.conftest import make_mesh
from trainer.checkpoint.manager import CheckpointManager
from trainer.models import weights
from trainer.policy.run_files import write_run_files
from trainer.step import train_step

MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def make_checkpoint(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Make a run's folder with a checkpoint of step 3, from its run.yaml as data, and maybe its weights.

    Equal ones are copies of the first; each model has its own weights.
    """

    def make(raw: dict[str, Any], params: Any = None, mesh: Any = None) -> Path:
        experiment = RunFile.model_validate(raw | {"dir": str(tmp_path / "bucket/runs" / raw["id"])})
        what = json.dumps([raw["model"], raw["optimizer"], raw["checkpoint"], params is None])
        made = tmp_path_factory.getbasetemp() / "made" / hashlib.sha256(what.encode()).hexdigest()
        if not made.exists():
            save(experiment, params, mesh or make_mesh(1, 2, 1))
            shutil.copytree(experiment.dir, made)
        shutil.copytree(made, experiment.dir, dirs_exist_ok=True)
        write_run_files(experiment)
        return Path(experiment.dir) / "checkpoints" / "3"

    return make


def save(experiment: RunFile, params: Any, mesh: Any) -> None:
    """Write the checkpoint. params: random ones if None."""
    cfg = experiment.model
    if params is None:
        params = weights.init_params(cfg, jax.random.key(1))
    placed = jax.device_put(params, weights.param_shardings(cfg, mesh))
    shardings = train_step.state_shardings(cfg, experiment.optimizer, mesh)
    with jax.set_mesh(mesh):
        state = jax.jit(lambda p: train_step.new_state(p, cfg, experiment.optimizer), out_shardings=shardings)(placed)
        with CheckpointManager(experiment.dir, experiment.checkpoint) as checkpoints:
            checkpoints.save(3, state, {})


def rewrite_run_file(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the run.yaml of a checkpoint's run."""
    file = checkpoint.parents[1] / "run.yaml"
    content = yaml.safe_load(file.read_text())
    change(content)
    file.write_text(yaml.safe_dump(content))


def as_raw(cfg: Model) -> dict[str, Any]:
    return cfg.model_dump(mode="json")
