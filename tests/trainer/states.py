"""The last checkpoint of a run, as arrays to compare."""

from typing import Any

import jax
import numpy as np

from conf.schema.training.run_yaml import RunFile
from trainer.checkpoint.manager import CheckpointManager
from trainer.distributed import mesh as meshes
from trainer.step import train_step


def final_state(run: dict[str, Any]) -> tuple[int, list[np.ndarray]]:
    """The number of updates of the last checkpoint, and its weights and moments."""
    experiment = RunFile.model_validate(run)
    checkpoints = CheckpointManager(experiment.dir, experiment.checkpoint)
    step = checkpoints.latest_step()
    assert step is not None, f"no checkpoint in {experiment.dir}"
    abstract = train_step.abstract_state(experiment.model, experiment.optimizer, meshes.build_mesh(experiment.mesh))
    state, _ = checkpoints.restore(step, abstract)
    checkpoints.close()
    return step, [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
