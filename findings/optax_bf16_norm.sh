#!/bin/sh
# optax clips gradients in bfloat16 by a norm that is too small, the more so the more arrays they are.
#
# optax 0.2.8, jax 0.10.2 (CPU), Python 3.11; 2026-11-28. `optax.clip_by_global_norm(1.0)` on gradients of 1,000,000 ones in
# bfloat16, split into equal arrays, as the weights of a model that does not stack its layers are.
#
# The norm is 1,000. One would guess that it is taken in float32, as torch's clip_grad_norm_ does on request and as XLA does
# within an array; or that the error is that of one rounding, 0.4 %. The squares of the arrays are added in bfloat16: a
# running sum takes no more from an addend below half of its last place, and stands still. Under `jax.jit` it is the same.
#
# Seen (arrays, the norm by optax.tree.norm, the true norm of what clip_by_global_norm(1.0) lets through):
#      1  1000.0  1.00
#    100   960.0  1.05
#    200   936.0  1.07
#   1000   512.0  1.95
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet optax==0.2.8 jax==0.10.2 jaxlib==0.10.2
cat >"$folder/clip.py" <<'PYTHON'
import jax
import jax.numpy as jnp
import optax

clip = optax.clip_by_global_norm(1.0)
for count in (1, 100, 200, 1000):
    gradients = {str(i): jnp.ones((1_000_000 // count,), jnp.bfloat16) for i in range(count)}
    norm = jax.jit(optax.tree.norm)(gradients)
    clipped, _ = jax.jit(lambda tree: clip.update(tree, clip.init(tree)))(gradients)
    let_through = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), clipped))
    print(f"{count:4} {float(norm):7.1f}  {float(let_through):.2f}")
PYTHON
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/clip.py" | tee "$folder/seen"
cat >"$folder/expected" <<'SEEN'
   1  1000.0  1.00
 100   960.0  1.05
 200   936.0  1.07
1000   512.0  1.95
SEEN
cmp "$folder/seen" "$folder/expected"
