"""The mesh: sizes, what is left, and clear words where it does not work out."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from conf.schema.training.run_yaml import RunFileError
from conf.schema.training.settings import Mesh
from trainer.distributed import mesh


def test_minus_one_is_what_is_left_and_rows_are_split_over_data_and_fsdp():
    assert mesh.axis_sizes(Mesh(data=2, fsdp=-1, tensor=2), 8) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert mesh.build_mesh(Mesh(data=-1, fsdp=1, tensor=1)).shape == {"data": 8, "fsdp": 1, "tensor": 1}
    built = mesh.build_mesh(Mesh(data=2, fsdp=2, tensor=2))
    assert mesh.partition_spec("batch", None, "hidden") == PartitionSpec(("data", "fsdp"), None, "tensor")
    assert mesh.num_shards(built, "batch") == 4
    with jax.set_mesh(built):
        assert mesh.rows_per_device(8) == 2


@pytest.mark.parametrize("sizes", [(2, 2, 1), (-1, 3, 1), (16, 1, 1)])
def test_a_product_that_is_not_the_devices_is_refused(sizes):
    data, fsdp, tensor = sizes
    with pytest.raises(RunFileError, match=r"does not make 8 devices; change mesh\.data, mesh\.fsdp or mesh\.tensor"):
        mesh.build_mesh(Mesh(data=data, fsdp=fsdp, tensor=tensor))


def test_constrain_counts_only_where_a_partitioner_works():
    x = jnp.zeros((8, 4))
    assert mesh.constrain(x, "batch", None) is x
    built = mesh.build_mesh(Mesh(data=8, fsdp=1, tensor=1))
    with jax.set_mesh(built):
        split = jax.jit(lambda x: mesh.constrain(x, "batch", None))(x)
        assert split.addressable_shards[0].data.shape == (1, 4)
        rows = mesh.partition_spec("batch")
        apart = jax.shard_map(lambda x: mesh.constrain(x, "batch", None), in_specs=rows, out_specs=rows)
        assert apart(split).shape == (8, 4)
