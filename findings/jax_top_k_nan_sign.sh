#!/bin/sh
# jax.lax.top_k takes a NaN for the greatest or for the least, by its sign.
#
# jax 0.10.2 (CPU), Python 3.11; 2026-11-28. The two least of [1, NaN, 3, 2], asked for as the two greatest of the negative.
#
# One would guess that a NaN is at the same end for all of them, as NumPy sorts it last and `jnp.argmax` returns it in
# either case: a sampler or a filter that looks for NaN in what `top_k` returns then sees each. `top_k` goes by the total
# order of IEEE 754, in which the sign bit of a NaN counts, and negation sets it: the NaN is at one end for x and at the
# other one for -x. `jnp.argsort` puts both last.
#
# Seen (positions):
#    x: top_k [1, 2], argsort [0, 3, 2, 1], argmax 1
#   -x: top_k [0, 3], argsort [2, 3, 0, 1], argmax 1
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
cat >"$folder/look.py" <<'PYTHON'
import jax
import jax.numpy as jnp

x = jnp.array([1.0, jnp.nan, 3.0, 2.0])
for name, values in ((" x", x), ("-x", -x)):
    top, order = jax.lax.top_k(values, 2)[1], jnp.argsort(values)
    print(f"{name}: top_k {top.tolist()}, argsort {order.tolist()}, argmax {int(jnp.argmax(values))}")
PYTHON
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/look.py" | tee "$folder/seen"
cat >"$folder/expected" <<'SEEN'
 x: top_k [1, 2], argsort [0, 3, 2, 1], argmax 1
-x: top_k [0, 3], argsort [2, 3, 0, 1], argmax 1
SEEN
cmp "$folder/seen" "$folder/expected"
