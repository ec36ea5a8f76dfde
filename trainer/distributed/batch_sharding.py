"""Assignment of global batch rows to devices.

Rows are assigned in process order, not in the mesh's order, which may be optimized for the network. Each process
therefore reads one contiguous range of rows.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conf.schema.training.loop import LmLoop, UnevenError
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
        devices: devices with different rows, over all processes.
        lots: rows of each device (jax.Device) of this process: the first lot, the second, ...
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
        return meshes.named_sharding(self.mesh, *self._leading_axes)

    def shape(self, sequence: int) -> tuple[int, ...]:
        at_a_time = self.micro_batch_rows * self.num_devices
        return (at_a_time, sequence) if self.accumulation == 1 else (self.accumulation, at_a_time, sequence)

    def to_devices(self, batch: Batch) -> DeviceBatch:
        """Place this process's rows, [rows, T] each, on its devices as part of the global arrays."""
        size, sharding = self.micro_batch_rows * self.accumulation, self.sharding
        starts = [lot * size - self.rows.start for lot in self.row_block_of_device.values()]

        def put(values: np.ndarray) -> jax.Array:
            parts = [values[start : start + size] for start in starts]
            if self.accumulation > 1:
                parts = [part.reshape(self.accumulation, self.micro_batch_rows, -1) for part in parts]
            parts = jax.device_put(parts, list(self.row_block_of_device))
            return jax.make_array_from_single_device_arrays(self.shape(values.shape[1]), sharding, parts)

        return {name: put(values) for name, values in batch.items()}

    @property
    def _leading_axes(self) -> tuple[str | None, ...]:
        return ("batch",) if self.accumulation == 1 else (None, "batch")


def shard_rows(loop: LmLoop, mesh: Mesh, process: int | None = None) -> BatchSharding:
    """Return the sharding of the loop's batches over a mesh, as a process sees it; None is this one.

    Raises RunFileError if it would be uneven.
    """
    parts = meshes.num_shards(mesh, "batch")
    try:
        accumulation = loop.accumulation(parts)
    except UnevenError as error:
        raise RunFileError(str(error)) from None
    assert mesh.devices is not None, "a mesh of real devices"
    holders = list(mesh.devices.reshape(parts, -1))  # devices of each part, in the order of the batch axes
    owners = [{device.process_index for device in part} for part in holders]
    in_order = sorted(range(parts), key=lambda part: (min(owners[part]), part))
    this = jax.process_index() if process is None else process
    own = {device: lot for lot, part in enumerate(in_order) for device in holders[part] if device.process_index == this}
    rows, lots = loop.rows // parts, own.values() or (0,)
    held = range(min(lots) * rows, (max(lots) + 1) * rows)
    return BatchSharding(mesh, accumulation, rows // accumulation, parts, own, held)


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds in full."""
    return NamedSharding(mesh, PartitionSpec())
