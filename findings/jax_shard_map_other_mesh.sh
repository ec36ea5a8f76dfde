#!/bin/sh
# A shard_map traced for one mesh takes the groups of its collectives from another mesh that is in force.
#
# jax 0.10.2, Python 3.11 (0.12.0.1 does the same); 2026-11-30. Four CPU devices; both meshes have the same axes.
#
# One would guess that `jax.sharding.use_abstract_mesh` in a function decides about its shard_map, whatever mesh the
# caller has set, or that two meshes of other sizes are an error. The shapes are those of the mesh in the function, the
# groups of devices those of the caller's `jax.set_mesh`: a sum over an axis that has one device there adds nothing, and
# the result, which is wrong, comes without a word. Where the sizes of a gather do not fit, the compiler refuses it.
#
# Seen:
#   sum of 0 to 7 over four devices: 28.0
#   the same in jax.set_mesh of the same mesh: 28.0
#   the same in jax.set_mesh of a mesh whose axis has one device: 1.0
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2
cat >"$folder/run.py" <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

AXES = ("data", "model")


def mesh(*sizes):
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto, AxisType.Auto))


split, whole = mesh(1, 4), mesh(4, 1)


def total(x):
    def of_part(part):
        return jax.lax.psum(part.sum(), "model")

    with jax.sharding.use_abstract_mesh(split.abstract_mesh):
        return jax.shard_map(of_part, in_specs=PartitionSpec("model"), out_specs=PartitionSpec())(x)


numbers = jnp.arange(8.0)
placed = jax.NamedSharding(split, PartitionSpec())
print("sum of 0 to 7 over four devices:", jax.jit(total, in_shardings=placed)(numbers))
with jax.set_mesh(split):
    print("the same in jax.set_mesh of the same mesh:", jax.jit(total)(numbers))
with jax.set_mesh(whole):
    print("the same in jax.set_mesh of a mesh whose axis has one device:", jax.jit(total)(numbers))
PYTHON
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 \
  "$folder/venv/bin/python" "$folder/run.py" 2>"$folder/errors" >"$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
sed -n 's/^#   //p' "$0" | diff - "$folder/seen"
