"""Log-probabilities, entropy and cross-entropy without an array of [batch, sequence, vocab].

Logits exist for `model.logit_chunk` positions of each sequence at a time and are recomputed in the backward pass.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes
from trainer.models.attention import soft_cap
from trainer.models.decoder import uncapped_logits, unembedding_matrix
from trainer.models.layers import map_chunks
from trainer.models.weights import Params


def token_logprobs(
    hidden: jax.Array, params: Params, targets: jax.Array, cfg: Model, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Return each target's log-probability and each distribution's entropy, in nats: two float32 arrays [B, T].

    hidden: [B, T, D] from `decoder.forward`; targets: [B, T] token ids. Logits are divided by `temperature`, which
    gives the distribution that a sampler at that temperature draws from. Both results are differentiable.
    """

    def statistics(logits: jax.Array, _: jax.Array, is_target: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
        mean = jnp.sum(jnp.exp(logits - total[..., None]) * logits, axis=-1)
        return chosen - total, total - mean

    return _map_logits(statistics, hidden, params, targets, cfg, temperature)


def target_scores(hidden: jax.Array, params: Params, targets: jax.Array, cfg: Model) -> tuple[jax.Array, jax.Array]:
    """Return each target's log-probability in nats, float32, and whether it is the likeliest token, bool: [B, T].

    Tokens are ranked before the soft cap, which keeps their order. XLA's tanh does not: it errs by several units in the
    last place, and differently at each optimization level, so that logits near the cap would change places.
    """

    def statistics(logits: jax.Array, uncapped: jax.Array, is_target: jax.Array) -> tuple[jax.Array, jax.Array]:
        likeliest = uncapped.argmax(axis=-1, keepdims=True) == jnp.arange(uncapped.shape[-1])
        chosen = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
        return chosen - jax.nn.logsumexp(logits, axis=-1), (likeliest & is_target).any(axis=-1)

    return _map_logits(statistics, hidden, params, targets, cfg)


def _map_logits(
    statistics: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    hidden: jax.Array,
    params: Params,
    targets: jax.Array,
    cfg: Model,
    temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Return two statistics of each position's logits [B, n, vocab].

    They also get the logits before soft cap and temperature, and where its target is.
    """
    # On a mesh, each device holds a shard of the vocabulary and also scores its neighbours' rows. Only one chunk's
    # hidden states move, and neither the output layer nor its gradient is ever whole on a device. A vocabulary that
    # the devices do not divide gets rows of zeros here, whose logits are masked; the weights keep their shape.
    padding = meshes.padding("logits", cfg.vocab_size)
    table = jnp.pad(unembedding_matrix(params, cfg, hidden.dtype), ((0, padding), (0, 0)))
    table = meshes.constrain(meshes.constrain(table, "vocab", "embed"), "logits", None)
    table = table.astype(jnp.float32)  # the type in which the gradients of the chunks are added up
    all_ids = jnp.arange(cfg.vocab_size + padding)

    def score(table: jax.Array, states: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        states, ids = meshes.constrain(states, "rows", None, None), meshes.constrain(ids, "rows", None)
        uncapped = uncapped_logits(states, table.astype(states.dtype))
        logits = soft_cap(uncapped, cfg.final_logit_softcap) / temperature
        if padding:
            least = jnp.finfo(logits.dtype).min
            uncapped, logits = (jnp.where(all_ids < cfg.vocab_size, x, least) for x in (uncapped, logits))
        uncapped, logits = (meshes.constrain(x, "rows", None, "logits") for x in (uncapped, logits))
        first, second = statistics(logits, uncapped, ids[..., None] == all_ids)
        return meshes.constrain(first, "batch", None), meshes.constrain(second, "batch", None)

    with jax.named_scope("token_logprobs"):
        return map_chunks(lambda states, ids: score(table, states, ids), cfg.logit_chunk, hidden, targets)


def cross_entropy(hidden: jax.Array, params: Params, targets: jax.Array, weights: jax.Array, cfg: Model) -> jax.Array:
    """Return the sum over tokens of weight times negative log-probability of the target, in nats: a float32 scalar.

    hidden: [B, T, D]; targets: [B, T] token ids; weights: [B, T], 0 where a token does not count.
    """
    logprobs, _ = token_logprobs(hidden, params, targets, cfg)
    return -jnp.sum(logprobs * weights)
