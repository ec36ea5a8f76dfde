"""An update whose loss is no number: its batch is kept for a look, and the run ends, or goes on without it."""

from __future__ import annotations

import io
import math

import jax
import numpy as np
from etils import epath

from conf.schema.training.run_yaml import RunFile
from trainer.distributed.batch import Batch


class DivergedError(RuntimeError):
    """Loss or gradient is not finite; the message says at which update, and where its batch is."""


def check_finite(step: int, metrics: dict[str, jax.Array], batch: Batch, experiment: RunFile) -> None:
    """See that the update's loss and gradient are finite; where not, it has changed nothing.

    batch: this process's rows, which then go to DIR/diverged/step-N/worker-P.npz. Raises DivergedError, on all
    processes, unless `optimizer.nan_policy` is skip, which prints a line instead.
    """
    loss, norm = jax.device_get((metrics["loss"], metrics["grad_norm"]))
    if math.isfinite(loss) and math.isfinite(norm):
        return
    folder = epath.Path(experiment.dir) / "diverged" / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez_compressed(content, **batch)  # pyright: ignore[reportArgumentType]
    (folder / f"worker-{jax.process_index()}.npz").write_bytes(content.getvalue())
    words = f"update {step}: the loss is {loss:.4g} and the gradient's norm {norm:.4g}; its batch is in {folder}"
    if experiment.optimizer.nan_policy == "stop":
        raise DivergedError(
            f"{words}. Make optimizer.lr smaller, or go on without such updates: optimizer.nan_policy=skip"
        )
    if jax.process_index() == 0:
        print(f"{words}. It is left out", flush=True)
