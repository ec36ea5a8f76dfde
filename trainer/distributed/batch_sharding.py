"""Assignment of global batch rows to devices.

Rows are assigned in process order, not in the mesh's order, which may be optimized for the network. Each process
therefore reads one contiguous range of rows.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from conf.schema.base import UnevenError
from conf.schema.training.loop import GrpoLoop, LmLoop
from conf.schema.training.puzzle import PuzzleLoop
from conf.schema.training.run_yaml import RunFileError
from trainer.distributed import mesh as meshes
from trainer.distributed.batch import Batch, DeviceBatch


@dataclass(frozen=True)
class BatchSharding:
    """Sharding of global batches.

    Attributes:
        mesh: the mesh to shard over.
        accumulation: parts that an update computes sequentially.
        micro_batch_rows: rows that a device computes at a time.
        num_devices: with different rows, over all processes.
        row_block_of_device: block of rows, from 0, by device (jax.Device) of this process.
        rows: rows of the global batch that this process holds.
    """

    mesh: Mesh
    accumulation: int
    micro_batch_rows: int
    num_devices: int
    row_block_of_device: dict[Any, int]
    rows: range

    @property
    def sharding(self) -> NamedSharding:
        """Return the sharding of an array [B, ...], or [A, B / A, ...] with accumulation A above 1."""
        return meshes.named_sharding(self.mesh, *(("batch",) if self.accumulation == 1 else (None, "batch")))

    def shape(self, sequence: int) -> tuple[int, ...]:
        at_a_time = self.micro_batch_rows * self.num_devices
        return (at_a_time, sequence) if self.accumulation == 1 else (self.accumulation, at_a_time, sequence)

    def to_devices(self, batch: Batch) -> DeviceBatch:
        """Place this process's rows, [rows, T] each, on its devices as part of the global arrays."""
        size, sharding = self.micro_batch_rows * self.accumulation, self.sharding
        starts = [block * size - self.rows.start for block in self.row_block_of_device.values()]

        def put(values: np.ndarray) -> jax.Array:
            parts = [values[start : start + size] for start in starts]
            if self.accumulation > 1:
                parts = [part.reshape(self.accumulation, self.micro_batch_rows, -1) for part in parts]
            parts = jax.device_put(parts, list(self.row_block_of_device))
            return jax.make_array_from_single_device_arrays(self.shape(values.shape[1]), sharding, parts)

        return {name: put(values) for name, values in batch.items()}


def check_accumulation(loop: LmLoop | GrpoLoop | PuzzleLoop, mesh: Mesh) -> int:
    """Return the parts that an update computes sequentially. Raises RunFileError if they would be uneven."""
    try:
        return loop.accumulation(meshes.num_shards(mesh, "batch"))
    except UnevenError as error:
        raise RunFileError(str(error)) from None


def shard_rows(loop: LmLoop, mesh: Mesh, process: int | None = None) -> BatchSharding:
    """Return the sharding of the loop's batches over a mesh, as a process sees it; None is this one.

    Raises RunFileError if it would be uneven.
    """
    parts, accumulation = meshes.num_shards(mesh, "batch"), check_accumulation(loop, mesh)
    assert mesh.devices is not None, "a mesh of real devices"
    holders = list(mesh.devices.reshape(parts, -1))  # devices of each part, in the order of the batch axes
    owners = [{device.process_index for device in part} for part in holders]
    in_order = sorted(range(parts), key=lambda part: (min(owners[part]), part))
    this = jax.process_index() if process is None else process
    own = {device: i for i, part in enumerate(in_order) for device in holders[part] if device.process_index == this}
    rows, blocks = loop.rows // parts, own.values() or (0,)
    held = range(min(blocks) * rows, (max(blocks) + 1) * rows)
    return BatchSharding(mesh, accumulation, rows // accumulation, parts, own, held)
