#!/bin/sh
# print(x) of a JAX array of 1 MiB shows none of its values; f"{x}" shows them.
#
# jax 0.12.0.1 (CPU), Python 3.13; 2026-11-29. Zeros of float32: 262,143 of them, and one more.
#
# One would guess that `str` and `format` of an array are the same text, as for NumPy's arrays and as up to jax 0.10.2,
# with the first and last three values of a long array. From 1 MiB on `str` and `repr` name only shape and type, while an
# f-string still fetches the whole array and shows values: a log line that is changed from one to the other loses its
# numbers, or begins to copy from the device.
#
# Seen:
#   262143: str [0. 0. 0. ... 0. 0. 0.], format [0. 0. 0. ... 0. 0. 0.]
#   262144: str Array(shape=(262144,), dtype=float32), format [0. 0. 0. ... 0. 0. 0.]
#
# PYTHON is an interpreter of 3.12 or later. Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.13}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.12.0.1 jaxlib==0.12.0.1
cat >"$folder/look.py" <<'PYTHON'
import jax.numpy as jnp

for n in (2**18 - 1, 2**18):
    x = jnp.zeros(n, jnp.float32)
    print(f"{n}: str {str(x)}, format {x}")
PYTHON
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/look.py" | tee "$folder/seen"
cat >"$folder/expected" <<'SEEN'
262143: str [0. 0. 0. ... 0. 0. 0.], format [0. 0. 0. ... 0. 0. 0.]
262144: str Array(shape=(262144,), dtype=float32), format [0. 0. 0. ... 0. 0. 0.]
SEEN
cmp "$folder/seen" "$folder/expected"
