#!/bin/sh
# A save by Orbax's PyTreeCheckpointHandler rewrites a manifest several times; without a bound on bytes it does so once.
#
# orbax-checkpoint 0.12.8, tensorstore 0.1.86, jax 0.10.2 (CPU), Python 3.11; 2026-11-30. A pytree of 40 arrays.
#
# One would guess that the bound on concurrent bytes, 96 GB by default, changes nothing for arrays of a few MB, and that
# one save is one commit of the OCDBT database. But the handler writes in a transaction only if there is no bound at all;
# with one, arrays are committed as they arrive, and each commit replaces manifest.ocdbt. In a bucket that is slow:
# Cloud Storage takes about one change of an object a second (https://cloud.google.com/storage/quotas), answers 429 to
# others, and TensorStore waits for a second or more before it tries again. A save of a few kB then takes seconds.
# `save_concurrent_gb=None` means the 96 GB again; BasePyTreeCheckpointHandler as `handler_impl` has no bound.
#
# Seen (how many commits the default makes depends on the machine):
#   default: more than one commit
#   no bound: 1 commit
#
# PYTHON is an interpreter of 3.11 or later. Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet orbax-checkpoint==0.12.8 tensorstore==0.1.86 jax==0.10.2 jaxlib==0.10.2
cat >"$folder/look.py" <<'PYTHON'
import sys
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import tensorstore as ts

state = {f"w{i}": jnp.ones((64 * (i % 5 + 1), 64)) for i in range(40)}
unbounded = ocp.PyTreeCheckpointHandler(handler_impl=ocp.BasePyTreeCheckpointHandler())
for name, handler in {"default": ocp.PyTreeCheckpointHandler(), "no bound": unbounded}.items():
    folder = Path(sys.argv[1]) / name.replace(" ", "_")
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(state))
    database = ts.KvStore.open(f"file://{folder}/ocdbt.process_0/").result()
    commits = ts.ocdbt.dump(database).result()["versions"][-1]["generation_number"]
    print(f"{name}: {'1 commit' if commits == 1 else 'more than one commit'}")
PYTHON
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/look.py" "$folder" | tee "$folder/seen"
cat >"$folder/expected" <<'SEEN'
default: more than one commit
no bound: 1 commit
SEEN
cmp "$folder/seen" "$folder/expected"
