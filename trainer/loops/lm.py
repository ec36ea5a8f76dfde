"""Next-token prediction on text: the loop, read from top to bottom.

Left out so far: packing of documents, gradient accumulation, averaged weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from conf.data import TextData
from conf.decoder import Model
from conf.loop import LmLoop, UnevenError
from conf.runfile import RunFile, RunFileError
from trainer import chunked, model, update, weights
from trainer import mesh as meshes
from trainer.checkpoint import Checkpoints
from trainer.data import text
from trainer.distributed import place_batch
from trainer.metrics import Metrics
from trainer.program import Program, abstract_rows


def run(experiment: RunFile, mesh: Mesh, log: Metrics) -> None:
    """Train from the newest checkpoint, or from the seed, to the last step. Raises RunFileError before any work."""
    cfg, loop, corpus = _check(experiment, mesh)
    checkpoints = Checkpoints(experiment.dir, experiment.checkpoint, metrics=("eval_loss",))
    first, state = _start(experiment, mesh, checkpoints)
    log.resume(first)

    def place(step: int) -> update.Batch:
        return place_batch(text.train_batch(corpus, experiment.seed, step, loop.rows, loop.sequence), mesh)

    started = time.perf_counter()
    loss = _loss(cfg)
    train = update.build(loss, cfg, experiment.optimizer, mesh).lower(state, place(first)).compile()
    evaluate = _evaluation(loss, corpus, loop, mesh)
    costs = {"compile_time": time.perf_counter() - started}

    clock, timed = time.perf_counter(), 0
    for step in range(first, loop.steps):
        if step and step % loop.eval_every == 0:  # after its checkpoint, and again by whoever resumes at it
            eval_loss = evaluate(state.params)
            log.log(step, "eval", eval_loss=eval_loss)
            checkpoints.score(step, eval_loss=eval_loss)
            clock, timed = time.perf_counter(), 0
        checkpoints.verify(step, state)
        state, metrics = train(state, place(step))
        done, timed = step + 1, timed + 1
        if done % experiment.logging.every == 0 or done == loop.steps:
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            seconds = (time.perf_counter() - clock) / timed
            speed = {"step_time": seconds, "tokens_per_second": loop.total_batch_tokens / seconds}
            log.log(done, "train", **values, **speed, **costs, steps_total=loop.steps)
            clock, timed, costs = time.perf_counter(), 0, {}
        if checkpoints.due(done, evaluates=done % loop.eval_every == 0) or done == loop.steps:
            log.upload()
            checkpoints.save(done, state, {"phase": "train"})
    eval_loss = evaluate(state.params)
    log.log(loop.steps, "eval", eval_loss=eval_loss)
    checkpoints.score(loop.steps, eval_loss=eval_loss)
    log.summarize(eval_loss=eval_loss, steps=loop.steps)
    checkpoints.close()


def programs(experiment: RunFile, mesh: Mesh) -> Iterator[Program]:
    """What a run compiles, with its arguments as shapes."""
    cfg, loop = experiment.model, experiment.loop
    assert isinstance(loop, LmLoop)
    state = update.abstract_state(cfg, experiment.optimizer, mesh)
    tokens = abstract_rows(mesh, (loop.rows, loop.sequence), "int32")
    batch = {"tokens": tokens, "targets": tokens}
    yield Program("update", update.build(_loss(cfg), cfg, experiment.optimizer, mesh), (state, batch))
    yield Program("eval", jax.jit(_loss(cfg)), (state.params, batch), beside=state.optimizer)


def _check(experiment: RunFile, mesh: Mesh) -> tuple[Model, LmLoop, text.Text]:
    cfg, loop, data = experiment.model, experiment.loop, experiment.data
    if not isinstance(loop, LmLoop):
        raise TypeError(f"an lm loop is wanted, not {loop.kind}")
    if not isinstance(data, TextData):
        raise RunFileError(f"data.kind: the lm loop reads text, not {data.kind}")
    if cfg.vocab < text.VOCAB:
        raise RunFileError(f"model.vocab: {cfg.vocab} ids are too few for bytes; at least {text.VOCAB}")
    try:
        loop.accumulation(meshes.shards(mesh, "batch"))
    except UnevenError as error:
        raise RunFileError(str(error)) from None
    return cfg, loop, text.load(data, loop.sequence)


def _start(experiment: RunFile, mesh: Mesh, checkpoints: Checkpoints) -> tuple[int, update.State]:
    """Updates done, and the state after them."""
    abstract = update.abstract_state(experiment.model, experiment.optimizer, mesh)
    if resumed := checkpoints.resume(abstract):
        return resumed.step, resumed.state
    return 0, update.init_state(experiment.model, experiment.optimizer, mesh, jax.random.key(experiment.seed))


def _loss(cfg: Model) -> update.Loss:
    def loss(params: weights.Params, batch: update.Batch) -> update.Sums:
        tokens, targets = batch["tokens"], batch["targets"]
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = model.forward(params, cfg, tokens, positions)
        weights = jnp.ones(targets.shape, jnp.float32)
        return {"loss": (chunked.cross_entropy(hidden, params, targets, weights, cfg), weights.sum())}

    return loss


def _evaluation(loss: update.Loss, corpus: text.Text, loop: LmLoop, mesh: Mesh) -> Callable[[weights.Params], float]:
    """A function from weights to the mean loss over the validation batches, nats per token."""
    score = jax.jit(loss)

    def evaluate(params: weights.Params) -> float:
        batches = (text.validation_batch(corpus, i, loop.rows, loop.sequence) for i in range(loop.eval_batches))
        sums = [jax.device_get(score(params, place_batch(batch, mesh)))["loss"] for batch in batches]
        return float(sum(total for total, _ in sums) / sum(count for _, count in sums))

    return evaluate
