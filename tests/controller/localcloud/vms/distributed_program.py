"""Runs on every worker of an emulated pod: a collective, then an Orbax checkpoint in the bucket, saved and restored."""

from __future__ import annotations

import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.distributed.initialize()
mesh = Mesh(np.array(jax.devices()), ("data",))
sharding = NamedSharding(mesh, PartitionSpec("data"))
whole = np.arange(8.0 * jax.device_count(), dtype=np.float32)
array = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(array)
assert float(total) == whole.sum()

with ocp.CheckpointManager(epath.Path(sys.argv[1])) as manager:
    manager.save(1, args=ocp.args.StandardSave({"array": array}))
    manager.wait_until_finished()
    like = {"array": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)}
    restored = manager.restore(1, args=ocp.args.StandardRestore(like))["array"]
for shard in restored.addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
print("processes", jax.process_count(), "devices", jax.device_count(), flush=True)
