"""Pack samples of one prompt into a row, [prompt | response | response | ...], to compute the prompt once.

The prompt is right-aligned and every response starts at a column of its own, so distances between tokens equal
distances between columns. This requires attention in plain products; the kernels do not support such rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.model import Model
from trainer.models import decoder, delta_net, weights
from trainer.models.attention import choose_kernel, in_window, masked_attention
from trainer.models.routes import Replay


class PromptGroup(NamedTuple):
    """Sizes of a group: samples per prompt, and tokens of the longest prompt and the longest response."""

    group_size: int
    prompt_length: int
    response_length: int


def prompt_group(cfg: Model, loop: GrpoLoop, width: int) -> PromptGroup | None:
    """Return the sizes for packing rows [B, width] that are ordered by group.

    Returns None to compute each row by itself: where padding would cost more than sharing saves, or the kernel requires
    it.
    """
    group = PromptGroup(loop.group_size, min(loop.max_prompt_length, width), min(loop.max_new_tokens, width))
    tokens = group.prompt_length + group.group_size * group.response_length
    is_less = tokens < group.group_size * width
    return group if is_less and choose_kernel(cfg, jax.default_backend()) == "plain" else None


def response_hidden_states(
    params: weights.Params,
    cfg: Model,
    tokens: jax.Array,
    starts: jax.Array,
    group: PromptGroup,
    replay: Replay | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the hidden states that predict the response tokens, [B, R, D], and these tokens, [B, R].

    tokens: [B, T], prompt and response concatenated, ordered by group; starts: int32 [B], where the responses begin;
    replay: of these rows; a prompt takes the routes of its first one.
    """
    samples, prompt, response = group
    rows, together = len(tokens), len(tokens) // samples
    own = _slice_rows(tokens, starts, response, (0, response))
    length = starts[::samples]
    asked = _slice_rows(tokens[::samples], length, prompt, (prompt, 0))
    if replay is not None:
        before = _slice_rows(replay.routes[::samples], length, prompt, (prompt, 0), fill=-1)
        each = _slice_rows(replay.routes, starts, response, (0, response), fill=-1)
        replay.routes = jnp.concatenate([before, each.reshape(together, -1, each.shape[2])], axis=1)
    begins = (prompt - length)[:, None]  # the column of the prompt's first token
    columns = jnp.concatenate([jnp.arange(prompt), jnp.tile(jnp.arange(prompt, prompt + response), samples)])
    x = decoder.forward(
        params,
        cfg,
        jnp.concatenate([asked, own.reshape(together, -1)], axis=1),
        jnp.maximum(columns[None] - begins, 0),
        attention=_shared_prompt_attention(cfg, group, begins),
        recurrence=_shared_prompt_recurrence(group, begins),
        replay=replay,
    )
    last = jnp.broadcast_to(x[:, None, prompt - 1 : prompt], (together, samples, 1, x.shape[-1]))
    earlier = x[:, prompt:].reshape(together, samples, response, -1)[:, :, :-1]
    return jnp.concatenate([last, earlier], axis=2).reshape(rows, response, -1), own


def scatter_to_columns(values: jax.Array, starts: jax.Array, width: int) -> jax.Array:
    """Move values of response tokens [B, R] to the tokens before them: [B, width - 1], 0 elsewhere."""

    def put(value: jax.Array, start: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(jnp.zeros(width - 1 + len(value), value.dtype), value, (start - 1,))

    return jax.vmap(put)(values, starts)[:, : width - 1]


def _shared_prompt_attention(cfg: Model, group: PromptGroup, begins: jax.Array) -> decoder.AttentionFn:
    """Return attention for packed rows whose prompts begin at columns [G, 1]; a response sees its prompt and itself."""
    samples, prompt, response = group
    columns = jnp.arange(prompt + response)
    is_token = columns >= begins

    def attend(
        query: jax.Array, key: jax.Array, value: jax.Array, window: int | None, sinks: jax.Array | None
    ) -> jax.Array:
        seen = in_window((columns[:, None] - columns[None, :])[None], window) & is_token[:, None]

        def whole(x: jax.Array) -> jax.Array:
            """Return each sample with its prompt before it, [B, P + R, ...]."""
            before = jnp.repeat(x[:, :prompt], samples, axis=0)
            return jnp.concatenate([before, each(x)], axis=1)

        def each(x: jax.Array) -> jax.Array:
            return x[:, prompt:].reshape(-1, response, *x.shape[2:])

        asked, known, said = (x[:, :prompt] for x in (query, key, value))
        before = masked_attention(asked, known, said, seen[:, :prompt, :prompt], cfg.attn_logit_softcap, sinks)
        own = jnp.repeat(seen[:, prompt:], samples, axis=0)
        mixed = masked_attention(each(query), whole(key), whole(value), own, cfg.attn_logit_softcap, sinks)
        return jnp.concatenate([before, mixed.reshape(len(query), -1, *query.shape[2:])], axis=1)

    return attend


def _shared_prompt_recurrence(group: PromptGroup, begins: jax.Array) -> delta_net.Recurrence:
    """Return the recurrence for such rows: each response goes on from the memory of its prompt."""
    samples, prompt, response = group
    is_token = jnp.arange(prompt) >= begins

    def recur(inputs: delta_net.Inputs, kernels: tuple[jax.Array, ...]) -> jax.Array:
        asked = jax.tree.map(lambda x: x[:, :prompt], inputs)
        each = jax.tree.map(lambda x: x[:, prompt:].reshape(-1, response, *x.shape[2:]), inputs)
        before, memory = delta_net.run(asked, kernels, counted=is_token)
        out, _ = delta_net.run(each, kernels, jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), memory))
        return jnp.concatenate([before, out.reshape(len(before), -1, *out.shape[2:])], axis=1)

    return recur


def _slice_rows(rows: jax.Array, starts: jax.Array, size: int, padding: tuple[int, int], fill: int = 0) -> jax.Array:
    """Return `size` columns of each row with padding before and after it, from that row's start."""
    rows = jnp.pad(rows, ((0, 0), padding, *((0, 0),) * (rows.ndim - 2)), constant_values=fill)
    return jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, size))(rows, starts)
