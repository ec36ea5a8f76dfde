"""A conversation keeps its cache between turns: of the next prompt, only what is new is computed.

A row that ended stays in its slot until another row takes it. Tokens that were decoded before the host saw the end are
taken back. Recurrent memories and counts of penalties take nothing back: such a row is computed anew, as is one whose
slot was taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from conf.schema.training.layer_kinds import layer_kind, source_layer
from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes
from trainer.models import attention, decoder, delta_net, per_layer, routes
from trainer.models.weights import Params
from trainer.sampler import cache as caches
from trainer.sampler.cache import CACHE_AXES, KVCache, turned
from trainer.sampler.decode import Said, Slots
from trainer.sampler.settings import SamplerSettings


@dataclass(frozen=True)
class KeptRow:
    """A row that ended. number: as drawn; back: tokens that its slot has after these; takes_back: if they can go."""

    number: int
    tokens: list[int]
    back: int
    takes_back: bool
    routes: np.ndarray | None = None

    def rest(self, prompt: Sequence[int]) -> tuple[int, list[int]] | None:
        """Return how many tokens to take back, and those to compute for a prompt; None if it must be computed whole.

        At least one is computed: the response is drawn from its hidden state.
        """
        known, back = len(self.tokens), self.back
        if len(prompt) == known:
            known, back = known - 1, back + 1
        possible = self.takes_back or not back
        return (back, [*prompt[known:]]) if possible and [*prompt[: len(self.tokens)]] == self.tokens else None


@dataclass
class Conversations:
    """What the slots hold between turns: of one copy of the weights. rows: by slot."""

    copy: Params | None = None
    slots: Slots | None = None
    cache_length: int = 0
    rows: dict[int, KeptRow] = field(default_factory=dict)

    def take(self, copy: Params) -> "Conversations":
        """Return it and forget it; without rows if the weights are others."""
        found = Conversations(self.copy, self.slots, self.cache_length, self.rows)
        self.copy = self.slots = None
        self.rows = {}
        return found if found.copy is copy else Conversations()


def extend(
    cfg: Model, settings: SamplerSettings, copy: Params, slots: Slots, tokens: jax.Array, rows: jax.Array
) -> tuple[Slots, jax.Array | None]:
    """Append tokens to kept rows, which are in flight then; return the slots, and the routes of the tokens, or None.

    tokens: int32 [slots, width], padded on the right with any token; rows: int32 [3, slots], how many there are, 0 for
    a slot that stays as it is; how many tokens are taken back before; and the row's number.
    """
    (count, width), (counts, back, numbers) = tokens.shape, rows
    taken, counted = counts > 0, jnp.arange(width) < counts[:, None]
    begins, ends = slots.position - back, slots.end - back
    positions = begins[:, None] + jnp.arange(width)
    rings = dict(zip(caches.layers_with_rings(cfg), zip(*slots.cache[:2], strict=True), strict=True))
    memories = dict(zip(caches.recurrent_layers(cfg), slots.cache.memories, strict=True))
    used: dict[int, decoder.KeysAndValues] = {}
    chosen: list[jax.Array] = []

    def append(ring: jax.Array, new: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
        """Return the ring with the new tokens, and all tokens that were in it and these, [slots, size + width, ...]."""
        size = ring.shape[axis]
        by_age = jax.vmap(lambda row, end: turned(row, end % size, axis - 1))(ring, ends)
        whole = jnp.concatenate([by_age, jnp.moveaxis(new, 1, axis).astype(ring.dtype)], axis)
        held = jax.vmap(lambda row, n: lax.dynamic_slice_in_dim(row, n, size, axis - 1))(whole, counts)
        later = jnp.where(taken[:, None, None, None], turned(held, -slots.step % size, axis), ring)
        return meshes.constrain(later, *CACHE_AXES), jnp.moveaxis(whole, axis, 1)

    first = x = decoder.embed(copy, cfg, tokens, positions)
    own_input = per_layer.layer_input(copy, cfg, tokens)
    for i, weights in enumerate(copy["layers"]):
        kind, source = layer_kind(cfg, i), source_layer(cfg, i)

        def attend(
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
            window: int | None,
            sinks: jax.Array | None,
            i: int = i,
            own: bool = not kind.shares,
        ) -> jax.Array:
            if own:
                parts = zip(rings[i], (key, value), caches.places_axes(), strict=True)
                (keys, key), (values, value) = (append(*part) for part in parts)
                rings[i], used[i] = (keys, values), (key, value)
            size = key.shape[1] - width
            places = jnp.arange(size + width)
            near = attention.in_window(size + jnp.arange(width)[:, None] - places, window)
            seen = near & (places >= size - begins[:, None])[:, None]
            return attention.masked_attention(query, key, value, seen, cfg.attn_logit_softcap, sinks)

        def recall(inputs: delta_net.Inputs, kernels: tuple[jax.Array, ...], i: int = i) -> jax.Array:
            out, memories[i] = delta_net.run(inputs, kernels, memories[i], counted=counted)
            return out

        shared = used[source] if kind.shares else None
        x = decoder.decoder_layer(
            x, first, weights, cfg, positions, kind, attend, recurrence=recall, shared=shared, own_input=own_input,
            choose=routes.recorder(chosen),
        )  # fmt: skip
    last = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    said = slots.said
    if said is not None:
        known = (said.prompt | (said.response > 0)).at[jnp.arange(count)[:, None], tokens].max(counted)
        each = taken[:, None]
        said = Said(jnp.where(each, known, said.prompt), jnp.where(each, 0, said.response))
    keys, values = (tuple(ring[part] for ring in rings.values()) for part in (0, 1))
    later = slots._replace(
        hidden=jnp.where(taken[:, None], decoder.final_hidden(last, copy, cfg), slots.hidden),
        position=jnp.where(taken, begins + counts, slots.position),
        num_generated=jnp.where(taken, 0, slots.num_generated),
        row=jnp.where(taken, numbers, slots.row),
        active=taken | slots.active,
        cache=KVCache(keys, values, tuple(memories.values())),
        said=said,
        end=jnp.where(taken, slots.step, slots.end),
    )
    return later, routes.joined(chosen, cfg, count, width) if settings.returns_routes else None
