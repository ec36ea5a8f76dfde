"""Handle an update whose loss is not finite: save its batch, find the cause, then end the run or skip the update."""

import io
import math
from collections.abc import Callable

import jax
import numpy as np
from etils import epath

from conf.schema.training.run_yaml import RunFile
from trainer.distributed.batch import Batch
from trainer.distributed.runtime import gather_texts


class DivergedError(RuntimeError):
    """Loss or gradient is not finite; the message names the update and the file with its batch."""


def check_finite(
    step: int,
    metrics: dict[str, jax.Array],
    batch: Batch,
    experiment: RunFile,
    diagnose: Callable[[bool], None],
) -> None:
    """Check that the update's loss and gradient are finite; a non-finite update has changed nothing.

    batch: this process's rows, which are saved to DIR/diverged/step-N/worker-P.npz on failure. diagnose: raises
    CorruptionError if hardware is to blame; its argument is whether an earlier attempt met the same update. Raises
    DivergedError on all processes, unless `optimizer.nan_policy` is skip, which prints a line instead.
    """
    loss, norm = jax.device_get((metrics["loss"], metrics["grad_norm"]))
    if math.isfinite(loss) and math.isfinite(norm):
        return
    folder = epath.Path(experiment.dir) / "diverged" / f"step-{step}"
    repeated = "yes" in gather_texts("yes" if folder.exists() else "no")  # all look before one creates it
    folder.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez_compressed(content, **batch)  # pyright: ignore[reportArgumentType]
    (folder / f"worker-{jax.process_index()}.npz").write_bytes(content.getvalue())
    diagnose(repeated)
    message = f"update {step}: the loss is {loss:.4g} and the gradient norm {norm:.4g}; the batch is in {folder}"
    if experiment.optimizer.nan_policy == "stop":
        raise DivergedError(f"{message}. Lower optimizer.lr, or set optimizer.nan_policy=skip to skip such updates")
    if jax.process_index() == 0:
        print(f"{message}. The update is skipped", flush=True)
