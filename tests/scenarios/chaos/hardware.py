"""A user's module: its import plants the faults of hardware that `FAULTS` lists in the trainer's process."""

import ctypes
import json
import os
import time
from typing import Any

import jax
import numpy as np

from trainer.loops.updates import UpdateLoop

PLANTED = {
    (fault["attempt"], fault["step"]): fault
    for fault in json.loads(os.environ.get("FAULTS", "[]"))
    if str(fault["worker"]) == os.environ["TPU_WORKER_ID"]
}
ATTEMPT = int(os.environ["SLIPWAY_ATTEMPT"])
after_checkpoint = UpdateLoop._after_checkpoint


def nothing(model: Any) -> dict[str, float]:
    """An evaluation, because the trainer imports those."""
    return {"planted": float(len(PLANTED))}


def memory_of(array: jax.Array) -> np.ndarray:
    """The first shard of this process, as it lies in memory."""
    data = jax.block_until_ready(array.addressable_shards[0].data)
    return np.frombuffer((ctypes.c_uint8 * data.nbytes).from_address(data.unsafe_buffer_pointer()), np.uint32)


class Flipping:
    """A stream in whose next batch a bit is flipped."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.done = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __next__(self) -> Any:
        batch = dict(next(self.stream))
        if not self.done:
            batch["tokens"] = batch["tokens"].copy()
            batch["tokens"][0, 0] ^= 1
            self.done = True
        return batch


class Slow(Flipping):
    """A stream on a worker whose host is slow."""

    def __next__(self) -> Any:
        time.sleep(3.0)  # much longer than a step takes on a busy machine
        return next(self.stream)


def strike(loop: UpdateLoop, step: int, state: Any) -> None:
    """Run before update `step + 1`, after the checks that are due."""
    after_checkpoint(loop, step, state)
    fault = PLANTED.get((ATTEMPT, step))
    if fault is None:
        return
    print(f"planted: {fault}", flush=True)
    match fault["what"]:
        case "weight":
            memory_of(jax.tree.leaves(state.params)[0])[5] ^= np.uint32(1 << 12)
        case "moment":
            large = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim > 1]
            memory_of(large[-1])[3] ^= np.uint32(1 << 20)
        case "nan":
            memory_of(jax.tree.leaves(state.params)[0]).view(np.float32)[:] = np.nan
        case "data":
            loop.stream = Flipping(loop.stream)
        case "slow":
            loop.stream = Slow(loop.stream)


UpdateLoop._after_checkpoint = strike
