"""An update whose loss is not finite: its batch is saved, the cause found, then the run ends or the update is skipped.

The program is to blame, or the hardware of one worker.

Devices that compute the same thing must get the same result. So where every device holds all weights, each of them
computes the loss and the gradient of every device's rows, without any exchange of results: NaN on some devices only,
from the same rows, is a fault of hardware, and NaN on all of them is the program's. On other meshes the update is
computed once more, which finds a fault that does not repeat itself.
"""

import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from conf.schema.training.model import AnyModel
from conf.schema.training.run_yaml import RunFile
from trainer.distributed import mesh as meshes
from trainer.distributed.checksums import CorruptionError
from trainer.distributed.mesh import Batch, DeviceBatch
from trainer.distributed.runtime import gather_texts
from trainer.models.weights import Params
from trainer.step import train_step
from trainer.step.train_step import CarryLossFn


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


class FiniteTable(NamedTuple):
    """Whether loss and gradient are finite when they are computed again.

    table: bool [devices, shards of the batch]; [1, 1] on a mesh that splits the weights. workers: of each row.
    """

    table: np.ndarray
    workers: list[int]


Recompute = Callable[[train_step.State, DeviceBatch], FiniteTable]
"""Computes an update's loss and gradient again from (state, batch)."""


def build_recompute(loss: CarryLossFn, cfg: AnyModel, mesh: Mesh, accumulation: int = 1) -> Recompute:
    """Return the function that computes an update's loss and gradient again. It is compiled when it is first called.

    All processes must call it, and all get the same. It changes nothing.
    """
    build = _on_each_device if meshes.is_data_parallel(mesh) else _on_the_mesh
    program = jax.jit(build(loss, cfg, mesh, accumulation), out_shardings=meshes.named_sharding(mesh))

    assert mesh.devices is not None, "a mesh of real devices"
    workers = [device.process_index for device in mesh.devices.flat]

    def recompute(state: train_step.State, batch: DeviceBatch) -> FiniteTable:
        with jax.transfer_guard("allow"):
            table = np.asarray(program(state.params, batch, state.carry).addressable_data(0))
        return FiniteTable(table, workers[: len(table)])

    return recompute


def judge(found: FiniteTable, step: int, repeated: bool) -> None:
    """Return if the program is to blame for the non-finite update `step`.

    Args:
        found: as from a `Recompute`.
        step: its number.
        repeated: whether an earlier attempt met it too. The weights have moved on by an update since, so a result
            that is finite now proves nothing in that case.

    Raises:
        CorruptionError: hardware is to blame; the message names the worker where that is known.
    """
    if found.table.all() and repeated:
        return
    if found.table.all():
        raise CorruptionError([f"some worker: update {step} was not finite, but is when it is computed again"])
    suspects = set[tuple[int, ...]]()
    for column in found.table.T:
        failed, fine = np.flatnonzero(~column), np.flatnonzero(column)
        if len(failed) and len(fine):
            odd = [failed, fine] if len(failed) == len(fine) else [min(failed, fine, key=len)]
            suspects.add(tuple(sorted({found.workers[i] for rows in odd for i in rows})))
    lines = [f"worker {' or '.join(map(str, who))}: in update {step}" for who in sorted(suspects)]
    if lines:
        raise CorruptionError([f"{line} it got NaN or infinity from rows from which others did not" for line in lines])


def _on_each_device(loss: CarryLossFn, cfg: AnyModel, mesh: Mesh, accumulation: int) -> Callable[..., jax.Array]:
    del cfg

    def finite(params: Params, batch: DeviceBatch, carry: Any) -> jax.Array:
        def total(params: Params) -> jax.Array:
            sums, _ = loss(params, batch, carry)
            return jnp.float32(train_step.loss_of(sums).total)

        value, gradients = jax.value_and_grad(total)(params)
        return jnp.isfinite(value) & jnp.isfinite(optax.tree_utils.tree_norm(gradients))

    def of_all_shards(params: Params, batch: DeviceBatch, carry: Any) -> jax.Array:
        everyone = lax.all_gather((batch, carry), meshes.MESH_AXES)

        def one(rows: tuple[DeviceBatch, Any]) -> jax.Array:
            if accumulation == 1:
                return finite(params, *rows)
            return lax.map(lambda part: finite(params, part, None), rows[0]).all()

        return lax.all_gather(lax.map(one, everyone), meshes.MESH_AXES)

    rows = meshes.partition_spec("batch") if accumulation == 1 else meshes.partition_spec(None, "batch")
    specs = (PartitionSpec(), rows, rows)
    return jax.shard_map(of_all_shards, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)


def _on_the_mesh(loss: CarryLossFn, cfg: AnyModel, mesh: Mesh, accumulation: int) -> Callable[..., jax.Array]:
    gradient = train_step.mean_gradient(loss, cfg, mesh, accumulation)

    def finite(params: Params, batch: DeviceBatch, carry: Any) -> jax.Array:
        gradients, metrics, _ = gradient(params, batch, carry)
        norm = optax.tree_utils.tree_norm(gradients)
        return (jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)).reshape(1, 1)

    return finite
