"""Who is to blame for a loss that is not finite: the program, or the hardware of one worker.

Devices that compute the same thing must get the same result. So where every device holds all weights, each of them
computes the loss and the gradient of every device's rows, without any exchange of results: NaN on some devices only,
from the same rows, is a fault of hardware, and NaN on all of them is the program's. On other meshes the update is
computed once more, which finds a fault that does not repeat itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from conf.schema.training.model import AnyModel
from trainer.distributed import mesh as meshes
from trainer.distributed.batch import DeviceBatch
from trainer.distributed.checksums import CorruptionError
from trainer.models.weights import Params
from trainer.step import train_step
from trainer.step.train_step import CarryLossFn


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
