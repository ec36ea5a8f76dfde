"""Every row of the global batch is on one device, and each process reads one range of rows."""

import math
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from conf.formats import RunFileError
from conf.schema.training.loop import LmLoop
from conf.schema.training.settings import Mesh
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from trainer.distributed import mesh as meshes


def loop(rows: int, micro_batch_size: int | None) -> LmLoop:
    sizes = {"total_batch_tokens": rows * 3, "seq_len": 3, "micro_batch_size": micro_batch_size}
    return LmLoop(**load_group("loop/lm") | sizes)


@pytest.mark.parametrize(
    ("sizes", "micro_batch_size"), [((8, 1, 1), 2), ((2, 2, 2), 2), ((1, 1, 8), None), ((1, 2, 2, 2), 2)]
)
def test_a_batch_is_on_the_devices_whole(sizes, micro_batch_size):
    split = meshes.shard_rows(loop(32, micro_batch_size), make_mesh(*sizes))
    assert split.rows == range(32)
    tokens = np.arange(96, dtype=np.int32).reshape(32, 3)
    with jax.transfer_guard("disallow"):
        placed = split.to_devices({"tokens": tokens})["tokens"]
    assert placed.shape == split.shape(3)
    assert placed.sharding == split.sharding
    found = np.asarray(placed).reshape(-1, 3)
    np.testing.assert_array_equal(found[np.argsort(found[:, 0])], tokens)
    parts = math.prod(sizes) // sizes[2]
    assert split.accumulation == (1 if micro_batch_size is None else 16 // parts)
    assert {shard.data.size for shard in placed.addressable_shards} == {96 // parts}


@pytest.mark.parametrize(
    ("processes", "tensor", "expert", "ranges"),
    [
        ([0, 0, 1, 1], 1, 1, [range(8), range(8, 16)]),
        ([0, 1, 1, 0], 1, 1, [range(8), range(8, 16)]),  # as a mesh may order devices
        ([0, 1, 0, 1], 2, 1, [range(16), range(16)]),  # both hold a half of each device's weights
        ([0, 0, 1, 1], 1, 4, [range(8), range(8, 16)]),
        ([0, 0, 1, 1], 2, 2, [range(16), range(16)]),  # the second process has the other half of the heads
        ([0, 1, 0, 1], 2, 2, [range(8), range(8, 16)]),
    ],
)
def test_a_process_reads_one_range_of_rows(monkeypatch, processes, tensor, expert, ranges):
    placed = np.array([Mock(process_index=process) for process in processes], object)
    shape = {"data": 4 // tensor // expert, "fsdp": 1, "tensor": tensor, "expert": expert}
    mesh = SimpleNamespace(shape=shape, devices=placed.reshape(tuple(shape.values())))
    found = []
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        found.append(meshes.shard_rows(loop(16, None), mesh).rows)
    assert found == ranges


def test_rows_that_cannot_be_split_are_refused():
    with pytest.raises(RunFileError, match=r"loop\.total_batch_tokens: 12 rows of 3 tokens .* use 24 or 48"):
        meshes.shard_rows(loop(12, None), make_mesh(8, 1, 1))


def test_minus_one_is_what_is_left_and_rows_are_split_over_all_axes_but_tensor():
    ones = dict.fromkeys(("fsdp", "tensor", "expert"), 1)
    assert meshes.axis_sizes(Mesh(data=2, fsdp=-1, tensor=2), 8) == {"data": 2, "fsdp": 2, "tensor": 2, "expert": 1}
    assert meshes.axis_sizes(Mesh(data=2, fsdp=1, tensor=2, expert=-1), 8)["expert"] == 2
    assert meshes.build_mesh(Mesh(data=-1, fsdp=1, tensor=1)).shape == {"data": 8} | ones
    built = meshes.build_mesh(Mesh(data=2, fsdp=2, tensor=2))
    rows = ("data", "fsdp", "expert")
    assert meshes.partition_spec("batch", None, "hidden") == PartitionSpec(rows, None, "tensor")
    assert meshes.partition_spec("embed", "hidden") == PartitionSpec(("fsdp", "expert"), "tensor")
    assert meshes.partition_spec("experts", "embed", "hidden") == PartitionSpec("expert", "fsdp", "tensor")
    assert meshes.num_shards(built, "batch") == 4
    with jax.set_mesh(built):
        assert meshes.rows_per_device(8) == 2


@pytest.mark.parametrize("sizes", [(2, 2, 1), (-1, 3, 1), (16, 1, 1)])
def test_a_product_that_is_not_the_devices_is_refused(sizes):
    data, fsdp, tensor = sizes
    with pytest.raises(RunFileError, match=r"does not make 8 devices; change mesh\.data, mesh\.fsdp or mesh\.tensor"):
        meshes.build_mesh(Mesh(data=data, fsdp=fsdp, tensor=tensor))


def test_constrain_counts_only_where_a_partitioner_works():
    x = jnp.zeros((8, 4))
    assert meshes.constrain(x, "batch", None) is x
    built = meshes.build_mesh(Mesh(data=8, fsdp=1, tensor=1))
    with jax.set_mesh(built):
        split = jax.jit(lambda x: meshes.constrain(x, "batch", None))(x)
        assert split.addressable_shards[0].data.shape == (1, 4)
        rows = meshes.partition_spec("batch")
        apart = jax.shard_map(lambda x: meshes.constrain(x, "batch", None), in_specs=rows, out_specs=rows)
        assert apart(split).shape == (8, 4)
