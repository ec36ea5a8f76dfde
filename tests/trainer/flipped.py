"""The trainer, but one bit of worker 1's copy of a weight is another one after three updates, as of bad memory."""

from typing import Any

import jax
import numpy as np

from trainer import main
from trainer.checkpoint.manager import CheckpointManager

verify = CheckpointManager.verify_replicas


def flip_bit(array: jax.Array) -> jax.Array:
    copies = []
    for shard in array.addressable_shards:
        values = np.array(shard.data)
        values.view(np.uint32).flat[0] ^= 1
        copies.append(jax.device_put(values, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, copies)


def verify_corrupted(checkpoints: CheckpointManager, step: int, state: Any) -> None:
    if step == 3 and jax.process_index() == 1:
        with jax.transfer_guard("allow"):
            embedding = flip_bit(state.params["embedding"])
        state = state._replace(params=state.params | {"embedding": embedding})
    verify(checkpoints, step, state)


if __name__ == "__main__":
    CheckpointManager.verify_replicas = verify_corrupted
    main.main()
