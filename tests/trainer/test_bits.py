"""The helper that plants bad bits: it changes one copy only, wherever the array came from."""

import jax
import numpy as np
import pytest

from tests.trainer.bits import flip_bit, in_own_memory
from tests.trainer.conftest import make_mesh
from trainer.distributed import mesh as meshes


def test_copies_that_share_their_memory_are_refused_and_can_be_separated():
    room = np.ones(32, np.float32)
    start = -room.ctypes.data % 64 // 4
    shared = jax.device_put(room[start : start + 2], meshes.named_sharding(make_mesh(4, 1, 1)))
    with pytest.raises(AssertionError, match="copies share their memory"):
        flip_bit(shared, bit=9, shard=2)
    own = in_own_memory(shared)
    flip_bit(own, bit=9, shard=2)
    assert [bool((shard.data == 1).all()) for shard in own.addressable_shards] == [True, True, False, True]
