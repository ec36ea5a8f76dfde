"""The loss and evaluation metrics of next-token prediction.

Both are sums over tokens with their divisors, so they add up over any split of the batch.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from conf.schema.training.loop import LmLoop
from conf.schema.training.model import Model
from trainer.distributed.batch import DeviceBatch
from trainer.extension import load_extension
from trainer.losses import residual_stability, token_logprobs
from trainer.models import decoder, maha
from trainer.models.weights import Params
from trainer.step.metric_sums import Mean, MetricSums
from trainer.step.train_step import LossFn

EvalFn = Callable[[Params, jax.Array, DeviceBatch], MetricSums]
"""Maps (weights, bytes of each token [vocab], batch) to metric sums."""


def loss(cfg: Model, loop: LmLoop | None = None) -> LossFn:
    """Return the loss of the weighted targets: the cross-entropy in nats, or the user's own (`loop.loss`).

    A batch holds `tokens`, `targets` and `weights` [B, T], plus `segments` and `positions` if documents share a row.
    """
    if loop is not None and loop.loss != "cross_entropy":
        return _own_loss(cfg, loop)

    def sums(params: Params, batch: DeviceBatch) -> MetricSums:
        hidden = _hidden_states(params, cfg, batch)
        nats = token_logprobs.cross_entropy(hidden, params, batch["targets"], batch["weights"], cfg)
        return _components(cfg, nats, nats, batch["weights"].sum())

    return sums


def _own_loss(cfg: Model, loop: LmLoop) -> LossFn:
    own = load_extension("token loss", loop.loss, "loop.loss", loop.loss_options)

    def sums(params: Params, batch: DeviceBatch) -> MetricSums:
        hidden, weight = _hidden_states(params, cfg, batch), batch["weights"]
        logprobs, entropy = token_logprobs.token_logprobs(hidden, params, batch["targets"], cfg)
        terms = own(logprobs, entropy)
        lm_loss = -(logprobs * weight).sum()
        return _components(cfg, (terms * weight).sum(), lm_loss, weight.sum()) | {
            "lm_loss": Mean(lm_loss, weight.sum())
        }

    return sums


def _components(cfg: Model, objective: jax.Array, lm_loss: jax.Array, total: jax.Array) -> MetricSums:
    """Return the loss, and of a model with attention at several scales what it consists of.

    objective, lm_loss, total: sums over tokens of the loss without the penalty, of the cross-entropy, of the weights.
    """
    if cfg.attention_form != "maha":
        return {"loss": Mean(objective, total)}
    sparsity = maha.sparsity_penalty(cfg) * total
    return {
        "loss": Mean(objective + sparsity, total),
        "lm_loss": Mean(lm_loss, total),
        "sparsity": Mean(sparsity, total),
    }


def build_eval(cfg: Model, accumulation: int) -> EvalFn:
    """Return a function that computes a batch's loss and its bits per byte of text, excluding special tokens.

    accumulation: above 1 the batch is [A, B / A, T], and its parts are computed sequentially.
    """

    def part(params: Params, token_bytes: jax.Array, batch: DeviceBatch) -> MetricSums:
        stability: MetricSums = {}
        if cfg.residual == "plain":
            hidden = _hidden_states(params, cfg, batch)
        else:
            given = batch["tokens"], _positions_of(batch), batch.get("segments")
            hidden, stability = residual_stability.forward(params, cfg, *given)
        logprobs, _ = token_logprobs.token_logprobs(hidden, params, batch["targets"], cfg)
        nats = -logprobs * batch["weights"]
        stands_for = token_bytes[batch["targets"]]
        in_text = jnp.where(stands_for > 0, nats, 0).sum()
        return stability | {
            "loss": Mean(nats.sum(), batch["weights"].sum()),
            "bits_per_byte": Mean(in_text, math.log(2) * (stands_for * batch["weights"]).sum()),
        }

    def parts(params: Params, token_bytes: jax.Array, batch: DeviceBatch) -> MetricSums:
        sums = lax.map(lambda piece: part(params, token_bytes, piece), batch)
        return jax.tree.map(lambda x: x.sum(axis=0), sums)

    return part if accumulation == 1 else parts


def _hidden_states(params: Params, cfg: Model, batch: DeviceBatch) -> jax.Array:
    return decoder.forward(params, cfg, batch["tokens"], _positions_of(batch), batch.get("segments"))


def _positions_of(batch: DeviceBatch) -> jax.Array:
    positions, tokens = batch.get("positions"), batch["tokens"]
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
