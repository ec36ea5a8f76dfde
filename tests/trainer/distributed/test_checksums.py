"""Checksums: the same on any mesh, other for any changed bit, and compared over copies."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.trainer.bits import flip_bit, in_own_memory
from tests.trainer.conftest import make_mesh
from trainer.distributed import checksums
from trainer.distributed.checksums import CorruptionError, ReplicaChecksums

SPECS = {
    "weights": PartitionSpec("fsdp", "tensor"),
    "half": PartitionSpec(("data", "fsdp")),
    "count": PartitionSpec(),
    "flags": PartitionSpec("data"),
}


def tree(mesh, **others):
    random = np.random.default_rng(0)
    values = {
        "weights": random.normal(size=(8, 6)).astype(np.float32),
        "half": jnp.asarray(random.normal(size=16), jnp.bfloat16),
        "count": np.int32(-5),
        "flags": random.random(8) < 0.5,
    } | others
    placed = {name: jax.device_put(value, NamedSharding(mesh, SPECS[name])) for name, value in values.items()}
    return {name: in_own_memory(array) for name, array in placed.items()}


def test_they_do_not_depend_on_the_mesh_but_on_every_bit():
    meshes = [make_mesh(*sizes) for sizes in [(8, 1, 1), (2, 2, 2), (1, 1, 1)]]
    sums = [ReplicaChecksums().compute(tree(mesh), "") for mesh in meshes]
    assert sums[0] == sums[1] == sums[2]
    weights = np.asarray(tree(make_mesh(1, 1, 1))["weights"])
    assert sums[0]["weights"] == int(weights.view(np.uint32).sum(dtype=np.uint32))
    assert sums[0]["count"] == 2**32 - 5
    assert len(set(sums[0].values())) == 4
    flipped = weights.copy()
    flipped.view(np.uint32)[3, 4] ^= np.uint32(1 << 31)
    after = ReplicaChecksums().compute(tree(meshes[1], weights=flipped), "")
    assert {name for name in after if sums[0][name] != after[name]} == {"weights"}


def test_copies_that_differ_are_told_by_worker_and_array():
    mesh = make_mesh(4, 2, 1)
    whole = tree(mesh)
    copies = [shard.data for shard in whole["weights"].addressable_shards]
    copies[5] = copies[5].at[0, 0].add(1.0)
    spoilt = jax.make_array_from_single_device_arrays((8, 6), whole["weights"].sharding, copies)
    with pytest.raises(CorruptionError) as error:
        ReplicaChecksums().compute(whole | {"weights": spoilt}, "after update 30")
    words = "hardware fault: worker 0: its copy of weights differs from the other workers' after update 30"
    assert str(error.value) == words


def test_where_no_majority_is_right_nobody_is_blamed_alone(monkeypatch):
    whole = tree(make_mesh(2, 1, 1))
    flip_bit(whole["weights"], bit=3, shard=1)
    monkeypatch.setattr(checksums, "_devices", lambda sharding: [SimpleNamespace(process_index=i) for i in (0, 1)])
    monkeypatch.setattr(checksums, "_replica_rows", lambda sharding, shape: [[0, 1]])
    with pytest.raises(CorruptionError) as error:
        ReplicaChecksums().compute({"weights": whole["weights"]}, "after update 30")
    words = "hardware fault: worker 0 or 1: their copies of weights differ after update 30, and no majority tells which"
    assert str(error.value).startswith(words)


def test_an_array_without_a_copy_is_compared_with_itself():
    watch, whole = ReplicaChecksums(), tree(make_mesh(1, 4, 2))
    watch.compute(whole, "after update 30")
    flip_bit(whole["weights"], bit=3, shard=6)
    with pytest.raises(CorruptionError) as error:
        watch.compute(whole, "after update 30")
    assert str(error.value) == "hardware fault: worker 0: weights changed at rest after update 30"
    other = tree(make_mesh(1, 4, 2), count=np.int32(7))
    watch.compute(other, "after update 31")
