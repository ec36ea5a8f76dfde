"""The kinds of a decoder's layers: their sizes, whose keys and values they take, and which weights they have.

Layers of different kinds may have weights of different shapes, or lack some. Those of one shape are stacked under a
name of their own, over the layers that have them only: `query` and `query_global`, `up` and `up_wide`.
"""

from collections.abc import Iterable
from typing import NamedTuple

from conf.schema.training.model import Model


class LayerKind(NamedTuple):
    """What sets the shapes of a layer's weights, and what it computes with them."""

    letter: str
    """Of `model.attention_pattern`."""
    shares: bool = False
    """Whether it takes the keys and values of an earlier layer, see `source_layer`."""

    @property
    def is_local(self) -> bool:
        return self.letter in "Ll"

    @property
    def is_recurrent(self) -> bool:
        """Whether it is a `DeltaNet`, which has no keys and values of single tokens."""
        return self.letter == "D"

    @property
    def is_rotated(self) -> bool:
        return self.letter.isupper()


OF_HEADS, OF_KEYS, OF_MLP = ("query", "key", "value", "output"), ("key", "value"), ("gate", "up", "down")
"""First words of the names of weights that layers of another kind may have otherwise, or not at all."""
MARKS = ("global", "wide")
OF_DELTA_NET = "delta"
"""First word of the names of weights that only recurrent layers have, in place of `OF_HEADS`."""
DELTA_CHUNK = 64
"""Tokens that a recurrent layer computes together in whole rows."""


def layer_kind(cfg: Model, layer: int) -> LayerKind:
    pattern = cfg.attention_pattern
    return LayerKind(pattern[layer % len(pattern)], layer >= cfg.num_layers - cfg.num_kv_shared_layers)


def layer_kinds(cfg: Model) -> list[LayerKind]:
    """Return the kind of every layer."""
    return [layer_kind(cfg, layer) for layer in range(cfg.num_layers)]


def sized(cfg: Model, kind: LayerKind) -> Model:
    """Return the model with the sizes of a layer of this kind."""
    sizes: dict[str, int] = {}
    if not kind.is_local:
        given = {"head_dim": cfg.global_head_dim, "num_kv_heads": cfg.num_global_kv_heads}
        sizes |= {name: size for name, size in given.items() if size is not None}
    if kind.shares and cfg.use_double_wide_mlp:
        sizes["mlp_dim"] = 2 * cfg.mlp_dim
    return cfg.model_copy(update=sizes) if sizes else cfg


def source_layer(cfg: Model, layer: int) -> int:
    """Return the layer whose keys and values a layer computes with: the last one with its letter that has its own."""
    if not layer_kind(cfg, layer).shares:
        return layer
    letter = layer_kind(cfg, layer).letter
    return max(i for i in range(cfg.num_layers) if layer_kind(cfg, i) == LayerKind(letter))


def has_own_values(cfg: Model, kind: LayerKind) -> bool:
    """Return whether values have a projection of their own."""
    return not kind.shares and (kind.is_local or not cfg.attention_k_eq_v)


def stack_name(cfg: Model, name: str, kind: LayerKind) -> str | None:
    """Return the stack that holds a weight of a layer of this kind, None if such layers lack it."""
    first, *rest = name.split("_")
    if (first in OF_HEADS and kind.is_recurrent) or (first == OF_DELTA_NET and not kind.is_recurrent):
        return None
    if (first in OF_KEYS and kind.shares) or (first == "value" and not has_own_values(cfg, kind)):
        return None
    has_sizes = cfg.global_head_dim is not None or cfg.num_global_kv_heads is not None
    if first in OF_HEADS and has_sizes and not kind.is_local:
        return "_".join((first, "global", *rest))
    if first in OF_MLP and kind.shares and cfg.use_double_wide_mlp:
        return "_".join((first, "wide", *rest))
    return name


def plain_name(stack: str) -> str:
    """Return what a layer calls the weight of a stack."""
    first, *rest = stack.split("_")
    return "_".join((first, *(rest[1:] if first in (*OF_HEADS, *OF_MLP) and rest[:1] and rest[0] in MARKS else rest)))


def holders(cfg: Model, stack: str, layers: Iterable[int]) -> list[int]:
    """Return those of the layers whose weights are in a stack, in its order."""
    name = plain_name(stack)
    return [layer for layer in layers if stack_name(cfg, name, layer_kind(cfg, layer)) == stack]


def stack_names(cfg: Model, name: str) -> list[str]:
    """Return the stacks of a weight, that of the first layers first."""
    found = (stack_name(cfg, name, kind) for kind in layer_kinds(cfg))
    return list(dict.fromkeys(stack for stack in found if stack is not None))


def attended_entries(cfg: Model, sequence: int) -> int:
    """Return the entries of queries times the tokens that they may attend to, over all layers, ignoring causality.

    Each stands for two products. Those of a recurrent layer are counted as they are, and halved.
    """

    def of_layer(kind: LayerKind) -> int:
        if kind.is_recurrent:
            return _delta_products(cfg) // 2
        size = sized(cfg, kind)
        return size.num_heads * size.head_dim * (min(sequence, cfg.sliding_window) if kind.is_local else sequence)

    return sum(map(of_layer, layer_kinds(cfg)))


def _delta_products(cfg: Model) -> int:
    """Return the products of a token in a recurrent layer: within its chunk, and with each head's matrix."""
    assert cfg.delta_net is not None, "a model with recurrent layers"
    keys, values = cfg.delta_net.key_head_dim, cfg.delta_net.value_head_dim
    # inverting a chunk's system takes 12 products of its size, 2 a doubling, and 2 backward: in all 14 thirds of others
    inverse = 14 * DELTA_CHUNK**2 // 3
    return cfg.delta_net.num_value_heads * (DELTA_CHUNK * (3 * keys + 2 * values) + 3 * keys * values + inverse)
