#!/bin/sh
# To replicate an array over a TPU slice, a jitted program holds it twice: as gathered, and as its result.
#
# jax 0.10.2, libtpu 0.0.52, Python 3.11; 2026-12-01. The TPU compiler needs no TPU; it is a download of 590 MB.
#
# One would guess that `jax.jit` of a function that returns its argument, with replicated `out_shardings`, needs the
# result and each device's own part of the argument, so 1.1 times the array on eight devices: the all-gather could write
# the result where it stays. It needs temporary memory of the array's size beside them, even if the part is a block of
# rows and nothing changes its place. In one program for many arrays nearly all of these exist together: a copy of all
# weights of a model takes twice its size, and a model that would fit with one copy does not. Several programs, each
# for some of the arrays, need that memory for their own ones only.
#
# Seen:
#   one array of 768 MiB, split by its rows: result 768 MiB, temporaries 768 MiB
#   one array of 768 MiB, split by its columns: result 768 MiB, temporaries 768 MiB
#   six arrays of 128 MiB in one program: result 768 MiB, temporaries 640 MiB
#   one of the six in a program of its own: result 128 MiB, temporaries 128 MiB
#
# Exits 0 while that is what happens (to multiples of 128 MiB), and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 libtpu==0.0.52
cat >"$folder/run.py" <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
mesh = Mesh(np.array(devices), ("devices",))
rows, columns = PartitionSpec("devices", None), PartitionSpec(None, "devices")
MIB = 2**20


def needs(what, arrays, width, split):
    given = [jax.ShapeDtypeStruct((262144, width), jnp.bfloat16, sharding=NamedSharding(mesh, split))] * arrays
    replicated = NamedSharding(mesh, PartitionSpec())
    memory = jax.jit(lambda *own: own, out_shardings=replicated).lower(*given).compile().memory_analysis()
    sizes = memory.output_size_in_bytes, memory.temp_size_in_bytes
    result, temporaries = (128 * round(size / MIB / 128) for size in sizes)
    print(f"{what}: result {result} MiB, temporaries {temporaries} MiB")


needs("one array of 768 MiB, split by its rows", 1, 1536, rows)
needs("one array of 768 MiB, split by its columns", 1, 1536, columns)
needs("six arrays of 128 MiB in one program", 6, 256, columns)
needs("one of the six in a program of its own", 1, 256, columns)
PYTHON
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5litepod-8 \
  "$folder/venv/bin/python" "$folder/run.py" 2>"$folder/errors" >"$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
sed -n 's/^#   //p' "$0" | diff - "$folder/seen"
