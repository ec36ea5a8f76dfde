"""Next-token prediction: what an update and an evaluation are. `updates.UpdateLoop` runs them."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from conf.formats import RunFileError
from conf.schema.training.loop import LmLoop, TextSamples
from conf.schema.training.loop_parts import MAX_DECODE_CHUNK
from conf.schema.training.model import Model
from conf.schema.training.refusals import BITS_PER_BYTE, EVALUATED, require
from conf.schema.training.run_yaml import RunFile
from trainer.checkpoint.manager import CheckpointManager
from trainer.data import batches
from trainer.distributed import mesh as meshes
from trainer.distributed.mesh import Batch, BatchSharding, DeviceBatch, shard_rows
from trainer.distributed.preemption import PreemptionNotice
from trainer.evaluation.model import TextModel
from trainer.evaluation.plugins import EvaluationPlugins
from trainer.loops.updates import UpdateLoop
from trainer.losses import lm
from trainer.models.weights import Params
from trainer.sampler import LogitsError, Sampler, SamplerSettings, StopCriteria
from trainer.step import nan_diagnosis, train_step
from trainer.step.batch_check import BatchCheck, read_by
from trainer.step.nan_diagnosis import DivergedError
from trainer.step.program import Program
from trainer.telemetry import startup_report, throughput
from trainer.telemetry.metrics import MetricsLogger

logger = logging.getLogger(__name__)


def run(experiment: RunFile, mesh: Mesh, log: MetricsLogger) -> None:
    """Train from the newest checkpoint, or from the seed, to the last step. Raises RunFileError before any work."""
    data = batches.Dataset(experiment.data)
    loop = _validated_loop(experiment, data)
    split = shard_rows(loop, mesh)
    stream = data.train_batches(loop, experiment.seed, split.rows)
    again = _read_again(experiment, loop, data, mesh)
    metrics = _evaluated(experiment, data)
    with (
        PreemptionNotice() as notice,
        closing(stream),
        closing(again),
        CheckpointManager(experiment.dir, experiment.checkpoint, metrics, log) as checkpoints,
    ):
        with log.phases.measure("compile"):
            compilation = startup_report.Compilation(programs(experiment, mesh))
        with log.phases.measure("restore or init"):  # while the programs compile
            first, state = _restore_or_init(experiment, mesh, checkpoints, (stream, again))
        log.resume(first)
        check = BatchCheck(experiment.checkpoint, mesh, again.__next__)
        updates = LmUpdates(experiment, loop, mesh, stream, checkpoints, log, notice, check)
        with log.phases.measure("compile"):
            updates.compile(compilation, data, split, state)
        log.phases.enter("updates")
        with jax.transfer_guard("disallow"):  # only explicit device_put and device_get may move data
            updates.run(state, first)


def _evaluated(experiment: RunFile, data: batches.Dataset) -> tuple[str, ...]:
    """Return the metrics by which a checkpoint can be the best. Raises RunFileError if its metric cannot be told."""
    if not isinstance(data.text_bytes, str):
        return EVALUATED[LmLoop]
    why, best = data.text_bytes, experiment.checkpoint.best
    if best is not None and best.metric == BITS_PER_BYTE:
        raise RunFileError(f"checkpoint.best.metric: {BITS_PER_BYTE} cannot be told, because {why}; use eval_loss")
    logger.warning("%s is left out: %s", BITS_PER_BYTE, why)
    return ("eval_loss",)


def programs(experiment: RunFile, mesh: Mesh) -> Iterator[Program]:
    """Yield the programs that a run compiles, with abstract arguments."""
    cfg, loop, opt = experiment.decoder, experiment.loop, experiment.optimizer
    assert isinstance(loop, LmLoop)
    split = shard_rows(loop, mesh)
    state, batch = train_step.abstract_state(cfg, opt, mesh), _abstract_batch(experiment, loop, split)
    yield Program(
        "update", train_step.build_update(lm.loss(cfg, loop), cfg, opt, mesh, split.accumulation), (state, batch)
    )
    text_bytes = jax.ShapeDtypeStruct((2, cfg.vocab_size), "int32", sharding=meshes.named_sharding(mesh))
    evaluate = jax.jit(lm.build_eval(cfg, split.accumulation))
    evaluated = train_step.eval_params(state)
    beside = (state.optimizer, () if evaluated is state.params else state.params)
    yield Program("eval", evaluate, (evaluated, text_bytes, batch), resident=beside)
    yield Program("resident", None, resident=state)


def _validated_loop(experiment: RunFile, data: batches.Dataset) -> LmLoop:
    loop = experiment.loop
    assert isinstance(loop, LmLoop)
    data.check_vocab_size(experiment.decoder.vocab_size)
    require(experiment)
    return loop


def _read_again(experiment: RunFile, loop: LmLoop, data: batches.Dataset, mesh: Mesh) -> batches.BatchStream:
    """Return the rows of the process that this one checks; nothing is read before the first of them is asked for."""
    rows = shard_rows(loop, mesh, read_by(jax.process_index())).rows
    return data.train_batches(loop, experiment.seed, rows, ahead=experiment.checkpoint.verify_data)


def _restore_or_init(
    experiment: RunFile, mesh: Mesh, checkpoints: CheckpointManager, streams: Sequence[batches.BatchStream]
) -> tuple[int, train_step.State]:
    """Return the number of updates and the state after them, with the data streams at the same position."""
    abstract = train_step.abstract_state(experiment.decoder, experiment.optimizer, mesh)
    if resumed := checkpoints.restore_latest(abstract):
        for stream in streams:
            stream.restore(resumed.position["data"])
        return resumed.step, resumed.state
    return 0, train_step.init_state(experiment.decoder, experiment.optimizer, mesh, jax.random.key(experiment.seed))


class LmUpdates(UpdateLoop[LmLoop]):
    """The updates of a language model."""

    def compile(
        self,
        compilation: startup_report.Compilation,
        data: batches.Dataset,
        split: BatchSharding,
        state: train_step.State,
    ) -> None:
        """Wait for everything that runs between the first and the last update. Nothing is compiled later."""
        cfg, loop = self.experiment.decoder, self.loop
        self.ready, began = compilation.wait(self.costs), time.perf_counter()
        if loop.text_samples.interval is not None:
            self.sample_interval = loop.text_samples.interval
            self.samples = TextSampler(loop.text_samples, data, cfg, self.mesh, self.experiment.seed)
            self.samples.generate(state.params)  # compiles its programs
        self.split, self.text_bytes = split, _text_bytes(data, cfg.vocab_size, self.mesh)
        self.untold = {"bits_per_byte"} if isinstance(data.text_bytes, str) else set[str]()
        self.held_out = data.validation_batches(loop, split.rows)
        self.flops = throughput.model_flops(cfg, loop.total_batch_tokens, loop.seq_len)
        ends = [] if data.eos_id is None else [data.eos_id]
        self.plugins = EvaluationPlugins(
            loop, self.log, lambda: TextModel(cfg, self.mesh, data.tokenizer, data.bos_ids, ends)
        )
        loss = train_step.without_carry(lm.loss(cfg, loop))
        self.recompute = nan_diagnosis.build_recompute(loss, cfg, self.mesh, split.accumulation)
        self.costs["compile_time"] += time.perf_counter() - began

    def place(self, batch: Batch) -> DeviceBatch:
        return self.split.to_devices(batch)

    def update(self, state: train_step.State, batch: DeviceBatch) -> tuple[train_step.State, dict[str, jax.Array]]:
        return self.ready["update"](state, batch)

    def evaluate(self, state: train_step.State, step: int, between: Callable[[], None]) -> dict[str, float]:
        parts: list[Any] = []
        for batch in self.held_out:
            evaluated = self.ready["eval"](train_step.eval_params(state), self.text_bytes, self.place(batch))
            parts.append(jax.device_get(evaluated))
            between()
        totals = jax.tree.map(lambda *values: float(math.fsum(values)), *parts)
        told = {name: parts for name, parts in totals.items() if name not in self.untold}
        return {f"eval_{name}": total / count if count else math.nan for name, (total, count) in told.items()}

    def rates(self, seconds: float) -> dict[str, float]:
        used = throughput.model_flops_utilization(self.flops, seconds, self.experiment.pod)
        return {"tokens_per_second": self.loop.total_batch_tokens / seconds} | used

    def sample(self, state: train_step.State, step: int) -> None:
        try:
            texts = self.samples.generate(train_step.eval_params(state))
        except LogitsError as error:
            raise DivergedError(f"after update {step}: {error}") from None
        self.log.log_text(step, "samples", "\n\n---\n\n".join(texts))


def _text_bytes(data: batches.Dataset, vocab_size: int, mesh: Mesh) -> jax.Array:
    """Return `data.text_bytes`, int32 [2, vocab_size], on all devices; 0 past the tokenizer's vocabulary."""
    padded = np.zeros((2, vocab_size), np.int32)
    if not isinstance(data.text_bytes, str):
        padded[:, : data.text_bytes.shape[1]] = data.text_bytes
    return jax.device_put(padded, meshes.named_sharding(mesh))


def _abstract_batch(experiment: RunFile, loop: LmLoop, split: BatchSharding) -> dict[str, jax.ShapeDtypeStruct]:
    shape, sharding = split.shape(loop.seq_len), split.sharding
    types = batches.Dataset(experiment.data).batch_dtypes
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in types.items()}


class TextSampler:
    """The prompts of `loop.text_samples`, and the sampler that continues them.

    Uses the same randomness each time, to make texts of one run comparable. Raises RunFileError if prompt and
    continuation exceed the model's context.
    """

    def __init__(self, settings: TextSamples, data: batches.Dataset, cfg: Model, mesh: Mesh, seed: int) -> None:
        self._settings = settings
        self._tokenizer, begin = data.tokenizer, data.bos_ids
        encoded = [[*begin, *ids.tolist()] for ids in self._tokenizer.encode(settings.prompts)]
        longest = max(len(ids) for ids in encoded)
        if longest + settings.max_new_tokens > cfg.max_seq_len:
            raise RunFileError(
                f"loop.text_samples.max_new_tokens: a prompt of {longest} tokens plus {settings.max_new_tokens} "
                f"exceeds model.max_seq_len, {cfg.max_seq_len}"
            )
        if not all(encoded):
            raise RunFileError("loop.text_samples.prompts: a prompt is empty; each needs at least one token")
        sizes = SamplerSettings(longest, settings.max_new_tokens, slots=len(encoded), chunk=MAX_DECODE_CHUNK)
        self._sampler = Sampler(cfg, sizes, mesh, StopCriteria(() if data.eos_id is None else (data.eos_id,)))
        self._prompts, self._key = encoded, jax.random.key(seed)

    def generate(self, params: Params) -> list[str]:
        """Return each prompt with its continuation, as Markdown. All processes must call it, and all get the same."""
        copy, temperature = self._sampler.load_params(params), self._settings.temperature
        drawn = self._sampler.generate(copy, self._prompts, 1, self._key, temperature)
        said = [self._tokenizer.decode(f.tokens.tolist()) for f in sorted(drawn, key=lambda found: found.row)]
        return [
            f"{prompt}**{text}**".replace("\n", "  \n")
            for prompt, text in zip(self._settings.prompts, said, strict=True)
        ]
