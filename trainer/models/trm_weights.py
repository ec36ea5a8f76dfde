"""The weight table of the tiny recursive model. The weights of its layers are stacked on a leading axis."""

from collections.abc import Iterator

from jax.nn.initializers import Initializer, constant, truncated_normal, zeros

from conf.schema.training.puzzle import Trm
from trainer.models.weights import Params, Weight

TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a normal distribution that is cut off at two standard deviations."""


def weight_table(cfg: Trm) -> Params:
    """Return the tree of every `Weight`. The initial states are constants; the puzzle embedding is no parameter."""
    initial = Weight((cfg.dim,), (None,), _normal(1), trained=False, counted=False)
    table = {
        "embedding": Weight((cfg.vocab_size, cfg.dim), ("vocab", "embed"), _normal(cfg.dim)),
        "initial_h": initial,
        "initial_l": initial,
        "layers": {
            name: Weight((cfg.num_layers, *w.shape), ("layers", *w.axes), w.init)
            for name, w in [*_mixer_weights(cfg), *_swiglu(cfg, cfg.dim, "embed", "")]
        },
        "unembedding": Weight((cfg.vocab_size, cfg.dim), ("vocab", "embed"), _normal(cfg.dim)),
        "halt": Weight((cfg.dim, 2), ("embed", None), zeros),
        "halt_bias": Weight((2,), (None,), constant(-5.0)),
    }
    if cfg.puzzle_width:
        shape = (cfg.num_identifiers, cfg.puzzle_width)
        table["puzzle_embedding"] = Weight(shape, (None, None), zeros, counted=False)
    if cfg.position_embedding == "learned":
        table["position_embedding"] = Weight((cfg.length, cfg.dim), (None, "embed"), _normal(cfg.dim))
    return table


def _mixer_weights(cfg: Trm) -> Iterator[tuple[str, Weight]]:
    if cfg.mixer == "mlp":
        yield from _swiglu(cfg, cfg.length, None, "mixer_")
        return
    shape, axes = (cfg.dim, cfg.num_heads, cfg.dim // cfg.num_heads), ("embed", "heads", "head_dim")
    for name in ("query", "key", "value"):
        yield name, Weight(shape, axes, _normal(cfg.dim))
    yield "output", Weight((*shape[1:], cfg.dim), (*axes[1:], "embed"), _normal(cfg.dim))


def _swiglu(cfg: Trm, size: int, axis: str | None, prefix: str) -> Iterator[tuple[str, Weight]]:
    inner = cfg.inner_width(size)
    for name in ("gate", "up"):
        yield prefix + name, Weight((size, inner), (axis, "hidden"), _normal(size))
    yield f"{prefix}down", Weight((inner, size), ("hidden", axis), _normal(inner))


def _normal(fan_in: int) -> Initializer:
    """Return a normal distribution of variance 1 / fan_in, cut off at two standard deviations of the uncut one."""
    return truncated_normal(fan_in**-0.5 / TRUNCATED_STD)
