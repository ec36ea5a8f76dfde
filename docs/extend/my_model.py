"""Model family: gated averages of the past in place of attention, as an associative scan over the sequence."""

import jax
import jax.numpy as jnp
from jax.nn.initializers import normal, ones


class GatedAverage:
    """h[t] = g[t] h[t-1] + (1 - g[t]) v[t], after minGRU (https://arxiv.org/abs/2410.01201)."""

    def weights(self, cfg):
        """Return (shape, logical axes, initializer) of each weight; layers are stacked."""
        square, small = (cfg.num_layers, cfg.dim, cfg.dim), normal(cfg.dim**-0.5)
        axes = ("layers", "embed", None)
        return {
            "embedding": ((cfg.vocab_size, cfg.dim), ("vocab", "embed"), small),
            "layers": dict.fromkeys(("gate", "value", "output"), (square, axes, small)),
            "scale": ((cfg.dim,), ("embed",), ones),
            "unembedding": ((cfg.vocab_size, cfg.dim), ("vocab", "embed"), small),
        }

    def forward(self, params, cfg, tokens, positions, segments):
        """Return hidden states [B, T, dim] for tokens [B, T]; a new document starts from zero."""
        x = params["embedding"][tokens]
        fresh = (positions == 0)[..., None]

        def layer(x, w):
            gate = jnp.where(fresh, 0.0, jax.nn.sigmoid(x @ w["gate"]))
            pairs = gate, (1 - gate) * (x @ w["value"])
            _, state = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), pairs, axis=1)
            return x + jnp.tanh(state) @ w["output"], None

        x, _ = jax.lax.scan(layer, x, params["layers"])
        return x * params["scale"] * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
