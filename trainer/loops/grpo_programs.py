"""The compiled programs of the GRPO loop: updates, the scores of a drawn batch, and the list of all for `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from conf.loop import GrpoLoop
from conf.optimizer import Optimizer
from conf.runfile import RunFile
from trainer import grpo, rollout, update, weights
from trainer import mesh as meshes
from trainer.program import Program, abstract_rows
from trainer.sampler.programs import Programs

Logprobs = Callable[[weights.Params, weights.Params, dict[str, jax.Array]], tuple[jax.Array, jax.Array]]
"""(policy, reference, batch) to the log-probabilities of the batch's tokens under each, [B, T - 1]."""


def updater(loss: update.Loss, experiment: RunFile, opt: Optimizer, mesh: Mesh) -> jax.stages.Wrapped:
    """`update.build`, on whole batches [B, ...]: where `loop.device_batch` is set, each device takes so many of its
    rows at a time."""
    assert isinstance(experiment.loop, GrpoLoop)
    parts = experiment.loop.accumulation(meshes.shards(mesh, "batch"))
    step = update.build(loss, experiment.model, opt, mesh, parts)
    if parts == 1:
        return step

    def dealt(x: jax.Array) -> jax.Array:
        """Every part has some rows of each device: none moves."""
        x = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
        return meshes.constrain(x, None, "batch", *(None,) * (x.ndim - 2))

    return jax.jit(lambda state, batch: step(state, jax.tree.map(dealt, batch)), donate_argnums=0)


def programs(experiment: RunFile, mesh: Mesh) -> Iterator[Program]:
    """What a run compiles, with its arguments as shapes."""
    cfg, loop, opt = experiment.model, experiment.loop, experiment.optimizer
    assert isinstance(loop, GrpoLoop)
    state, reference = update.abstract_state(cfg, opt, mesh), abstract_params(cfg, mesh)
    rows, width = loop.rows, loop.prompt_length + loop.response_length
    score = {"tokens": abstract_rows(mesh, (rows, width), "int32")}
    score["mask"] = abstract_rows(mesh, (rows, width - 1), "float32")
    scored = score | {name: abstract_rows(mesh, (rows,), "float32") for name in grpo.ROW_FIELDS}
    scored["sampler"] = score["mask"]
    batch = scored | dict.fromkeys(grpo.TOKEN_FIELDS, score["mask"])
    yield Program("update", updater(grpo.loss(cfg, loop), experiment, opt, mesh), (state, batch), beside=reference)
    if loop.warm_start_steps:
        yield Program("warm_start", updater(grpo.supervised_loss(cfg), experiment, opt, mesh), (state, score))
    yield Program(
        "logprob",
        logprobs(experiment, loop, mesh),
        (state.params, reference, scored),
        beside=state.optimizer,
    )
    yield from _sampler(experiment, loop, mesh, state, reference)
    yield Program("resident", None, beside=(state, reference))


def _sampler(experiment: RunFile, loop: GrpoLoop, mesh: Mesh, state: update.State, reference: Any) -> Iterator[Program]:
    """What draws responses, beside all that a run holds; evaluations draw with the same programs."""
    sampler = Programs(experiment.model, rollout.settings(loop), mesh, ends=(0,))
    yield Program("reshard", sampler.reshard, (state.params,), beside=(state.optimizer, reference))
    beside = (state, reference)
    for name, function, arguments, others in sampler.listed(loop.samples):
        yield Program(name, function, arguments, beside=(beside, others), turns=loop.sampler.chunk)


def logprobs(experiment: RunFile, loop: GrpoLoop, mesh: Mesh) -> Logprobs:
    """The jitted program that scores a batch under the policy that drew it and under the reference."""
    cfg = experiment.model

    def score(params: weights.Params, reference: weights.Params, batch: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        return tuple(grpo.logprobs(p, cfg, batch, loop.temperature)[0] for p in (params, reference))  # pyright: ignore[reportReturnType]

    if meshes.is_data_parallel(mesh):
        whole, rows = jax.sharding.PartitionSpec(), meshes.spec("batch")
        score = jax.shard_map(score, mesh=mesh, in_specs=(whole, whole, rows), out_specs=rows, check_vma=False)
    return jax.jit(score, out_shardings=meshes.named(mesh, "batch"))


def abstract_params(cfg: Any, mesh: Mesh) -> weights.Params:
    placed = weights.shardings(cfg, mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), weights.abstract(cfg), placed)
