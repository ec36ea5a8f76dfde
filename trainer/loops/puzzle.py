"""Deep supervision on puzzles: what an update and an evaluation are. `updates.UpdateLoop` runs them."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from conf.formats import RunFileError
from conf.schema.training.data import PuzzleData
from conf.schema.training.loop_parts import PuzzleLoop, Trm
from conf.schema.training.refusals import EVALUATED, require
from conf.schema.training.run_yaml import RunFile
from trainer.checkpoint.manager import CheckpointManager
from trainer.distributed import mesh as meshes
from trainer.distributed import runtime
from trainer.distributed.mesh import Batch, DeviceBatch, check_accumulation
from trainer.distributed.preemption import PreemptionNotice
from trainer.evaluation import puzzles
from trainer.evaluation.model import PuzzleModel
from trainer.evaluation.plugins import EvaluationPlugins
from trainer.evaluation.puzzles import draw_puzzle
from trainer.loops.updates import UpdateLoop
from trainer.losses import puzzle
from trainer.models.weights import Params
from trainer.puzzles.dataset import EvalBatch, PuzzleDataset
from trainer.step import nan_diagnosis, train_step
from trainer.step.batch_check import BatchCheck
from trainer.step.program import Program, abstract_rows
from trainer.telemetry import startup_report, throughput
from trainer.telemetry.metrics import MetricsLogger

Solved = tuple[dict[str, np.ndarray], np.ndarray, list[np.ndarray]]
"""Results per puzzle, ratings, and inputs, labels and answers of the shown boards."""

EXPLORATION_KEY = 1 << 32
"""Added to the seed, so that halting and data draw different random numbers."""


def run(experiment: RunFile, mesh: Mesh, log: MetricsLogger) -> None:
    """Train from the newest checkpoint, or from the seed, to the last step. Raises RunFileError before any work."""
    cfg, loop = _sections(experiment, mesh)
    assert isinstance(experiment.data, PuzzleData)
    dataset = PuzzleDataset.open(experiment.data.path)
    _check(cfg, loop, dataset)
    stream = PuzzleStream(dataset, loop, experiment.seed)
    opened = CheckpointManager(experiment.dir, experiment.checkpoint, EVALUATED[PuzzleLoop], log)
    with PreemptionNotice() as notice, opened as checkpoints:
        with log.phases.measure("compile"):
            compilation = startup_report.Compilation(programs(experiment, mesh))
        with log.phases.measure("restore or init"):  # while the programs compile
            first, state = _restore_or_init(experiment, cfg, loop, mesh, checkpoints, stream)
        log.resume(first)
        check = BatchCheck(experiment.checkpoint, mesh)  # every process has the whole batch
        updates = PuzzleUpdates(experiment, loop, mesh, stream, checkpoints, log, notice, check)
        with log.phases.measure("compile"):
            updates.compile(compilation, cfg)
        log.phases.enter("updates")
        with jax.transfer_guard("disallow"):  # only explicit device_put and device_get may move data
            updates.run(state, first)


def programs(experiment: RunFile, mesh: Mesh) -> Iterator[Program]:
    """Yield the programs that a run compiles, with abstract arguments: an update for each T and n of the curriculum."""
    cfg, loop = _sections(experiment, mesh)
    state, batch = _abstract_state(experiment, cfg, loop, mesh), _abstract_batch(cfg, loop, mesh)
    for cycles in reversed(all_cycles(cfg, loop)):
        now = cfg.model_copy(update=dict(zip(("h_cycles", "l_cycles"), cycles, strict=True)))
        update = train_step.build_carry_update(
            puzzle.loss(now, loop), now, experiment.optimizer, mesh, _shardings(state.carry)
        )
        yield Program(_update_name(cfg, cycles), update, (state, batch))
    evaluated = train_step.eval_params(state)
    beside = (state.optimizer, state.carry, () if evaluated is state.params else state.params)
    puzzle_batch = {name: x for name, x in batch.items() if name != "min_steps"}
    rows, everywhere = meshes.named_sharding(mesh, "batch"), meshes.named_sharding(mesh)
    placed = {**dict.fromkeys(("exact", "halt", "cells", "nats"), rows), "boards": everywhere}
    evaluate = jax.jit(puzzle.build_eval(cfg, loop, loop.boards), out_shardings=placed)
    yield Program("eval", evaluate, (evaluated, puzzle_batch), beside)
    yield Program("resident", None, resident=state)


class PuzzleStream:
    """The batches of the updates: a function of (seed, iteration), and the same on every process."""

    def __init__(self, dataset: PuzzleDataset, loop: PuzzleLoop, seed: int) -> None:
        self.dataset, self._loop, self._seed = dataset, loop, seed
        self.iteration = 0

    def __next__(self) -> Batch:
        inputs, labels, ids = self.dataset.train_batch(self._seed, self.iteration, self._loop.batch_size)
        least = exploration(self._loop, self._seed, self.iteration)
        self.iteration += 1
        return {"inputs": inputs, "labels": labels, "ids": ids, "min_steps": least}

    def position(self) -> dict[str, int]:
        return {"iteration": self.iteration}

    def left_out(self) -> dict[str, dict[str, int]]:
        return {}


def exploration(loop: PuzzleLoop, seed: int, iteration: int) -> np.ndarray:
    """Return the steps before which each row must not halt, int32 [batch]: 0, or by chance 2 to all of them."""
    share = loop.halt_exploration
    if loop.halt_exploration_final is not None:
        share += (loop.halt_exploration_final - share) * iteration / max(1, loop.steps - 1)
    bits = np.random.Philox(key=[seed + EXPLORATION_KEY, iteration]).random_raw(2 * loop.rows)
    explores = (bits[: loop.rows] >> np.uint64(11)) * 2.0**-53 < share
    steps = 2 + bits[loop.rows :] % np.uint64(max(1, loop.supervision_steps - 1))
    return np.where(explores, steps, 0).astype(np.int32)


def cycles_of(cfg: Trm, loop: PuzzleLoop, iteration: int) -> tuple[int, int]:
    """Return T and n of an update."""
    first, last = loop.curriculum, (cfg.h_cycles, cfg.l_cycles)
    if first is None:
        return last
    done = min(1.0, iteration * loop.batch_size / loop.puzzles / first.epochs)
    start = (first.h_cycles, first.l_cycles)
    h, l = (math.floor(a + (b - a) * done + 1e-9) for a, b in zip(start, last, strict=True))  # noqa: E741
    return h, l


def all_cycles(cfg: Trm, loop: PuzzleLoop) -> list[tuple[int, int]]:
    """Return every T and n of a run, in order; the last is the model's own."""
    if loop.curriculum is None:
        return [(cfg.h_cycles, cfg.l_cycles)]
    length = -(-loop.curriculum.epochs * loop.puzzles // loop.batch_size)
    seen = [cycles_of(cfg, loop, i) for i in range(min(loop.steps, length) + 1)]
    return list(dict.fromkeys([*seen, (cfg.h_cycles, cfg.l_cycles)]))


def _restore_or_init(
    experiment: RunFile, cfg: Trm, loop: PuzzleLoop, mesh: Mesh, checkpoints: CheckpointManager, stream: PuzzleStream
) -> tuple[int, train_step.State]:
    """Return the number of updates and the state after them, with the stream at the same position."""
    abstract = _abstract_state(experiment, cfg, loop, mesh)
    if resumed := checkpoints.restore_latest(abstract):
        stream.iteration = resumed.position["data"]["iteration"]
        return resumed.step, resumed.state
    state = train_step.init_state(cfg, experiment.optimizer, mesh, jax.random.key(experiment.seed))
    made = jax.jit(lambda: puzzle.initial_carry(cfg, loop.rows), out_shardings=_shardings(abstract.carry))
    return 0, state._replace(carry=made())


class PuzzleUpdates(UpdateLoop[PuzzleLoop]):
    """The updates of a recursive model."""

    stream: PuzzleStream

    def compile(self, compilation: startup_report.Compilation, cfg: Trm) -> None:
        """Wait for everything that runs between the first and the last update. Nothing is compiled later."""
        loop, self.cfg, self.dataset = self.loop, cfg, self.stream.dataset
        self.ready = compilation.wait(self.costs)
        self.plugins = EvaluationPlugins(loop, self.log, lambda: PuzzleModel(cfg, loop, self.mesh, self.dataset))
        self.recompute = nan_diagnosis.build_recompute(puzzle.loss(cfg, loop), cfg, self.mesh)

    def place(self, batch: Batch) -> DeviceBatch:
        with jax.transfer_guard("allow"):  # each device gets its rows of what every process has
            return runtime.shard_batch(batch, self.mesh)

    def update(self, state: train_step.State, batch: DeviceBatch) -> tuple[train_step.State, dict[str, jax.Array]]:
        cycles = cycles_of(self.cfg, self.loop, self.stream.iteration - 1)  # the batch has just been read
        return self.ready[_update_name(self.cfg, cycles)](state, batch)

    def rates(self, seconds: float) -> dict[str, float]:
        flops = self.loop.batch_size * self.cfg.update_flops
        used = throughput.model_flops_utilization(flops, seconds, self.experiment.pod)
        return {"examples_per_second": self.loop.batch_size / seconds} | used

    def evaluate(self, state: train_step.State, step: int, between: Callable[[], None]) -> dict[str, float]:
        """Solve test puzzles, and a few of the training puzzles, with the averaged weights if there are any."""
        loop, last = self.loop, step == self.loop.steps
        count = loop.eval_puzzles_final if last else loop.eval_puzzles
        params = train_step.eval_params(state)
        solved, ratings, boards = self.solve(params, self.dataset.test_batches(loop.batch_size, count), between)
        found = puzzles.puzzle_metrics(solved, ratings)
        self._show(step, boards)
        if last and state.average is not None:
            raw, ratings, _ = self.solve(state.params, self.dataset.test_batches(loop.batch_size, count), between)
            found["eval_unaveraged_exact_accuracy"] = puzzles.puzzle_metrics(raw, ratings)["eval_exact_accuracy"]
        if loop.eval_train_puzzles:
            originals = self.dataset.original_batches(loop.batch_size, loop.eval_train_puzzles)
            solved, _, _ = self.solve(params, originals, between)
            found["eval_train_exact_accuracy"] = float(solved["exact"][:, -1].mean())
            found["eval_gap"] = found["eval_train_exact_accuracy"] - found["eval_exact_accuracy"]
        return found

    def solve(self, params: Params, batches: Iterator[EvalBatch], between: Callable[[], None]) -> Solved:
        """Return the results of all puzzles, and the boards of the first ones."""
        parts, ratings, boards = [], [], []
        for batch in batches:
            placed = self.place({"inputs": batch.inputs, "labels": batch.labels, "ids": batch.ids})
            found = dict(self.ready["eval"](params, placed))
            shown = np.asarray(jax.device_get(found.pop("boards").addressable_data(0)))
            with jax.transfer_guard("allow"):
                parts.append({name: runtime.gather_batch(x)[: batch.size] for name, x in found.items()})
            ratings.append(batch.ratings[: batch.size])
            if not boards:
                n = min(self.loop.boards, batch.size)
                boards = [batch.inputs[:n], batch.labels[:n], shown[:, :n]]
            between()
        return {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}, np.concatenate(ratings), boards

    def _show(self, step: int, boards: list[np.ndarray]) -> None:
        inputs, labels, answers = boards
        shown = [puzzles.board(self.dataset, inputs[i], labels[i], answers[:, i]) for i in range(len(inputs))]
        for i, board in enumerate(shown):
            self.log.log_picture(step, f"boards/{i + 1}", draw_puzzle(board))
        self.log.log_transcripts(step, "eval", [puzzles.board_transcript(board) for board in shown])


def _sections(experiment: RunFile, mesh: Mesh) -> tuple[Trm, PuzzleLoop]:
    """Return model and loop. Raises RunFileError if they do not belong together or the devices cannot split them."""
    cfg, loop = experiment.model, experiment.loop
    assert isinstance(loop, PuzzleLoop)
    if not isinstance(cfg, Trm) or not isinstance(experiment.data, PuzzleData):
        raise RunFileError("model.kind: loop.kind=puzzle needs model.kind=trm and data.kind=puzzles")
    require(experiment)
    check_accumulation(loop, mesh)
    return cfg, loop


def _check(cfg: Trm, loop: PuzzleLoop, dataset: PuzzleDataset) -> None:
    """Raise RunFileError unless the sizes of the config are those of the data."""
    facts = {
        "model.vocab_size": (cfg.vocab_size, dataset.vocabulary),
        "model.seq_len": (cfg.seq_len, dataset.cells),
        "model.num_identifiers": (cfg.num_identifiers, dataset.identifiers),
        "loop.puzzles": (loop.puzzles, dataset.splits["train"]["groups"]),
    }
    if wrong := [f"{key}: is {a}, but {b} in {dataset.path}" for key, (a, b) in facts.items() if a != b]:
        raise RunFileError("\n".join(wrong))


def _update_name(cfg: Trm, cycles: tuple[int, int]) -> str:
    return "update" if cycles == (cfg.h_cycles, cfg.l_cycles) else f"update_{cycles[0]}x{cycles[1]}"


def _abstract_state(experiment: RunFile, cfg: Trm, loop: PuzzleLoop, mesh: Mesh) -> train_step.State:
    shapes = jax.eval_shape(lambda: puzzle.initial_carry(cfg, loop.rows))
    carry = jax.tree.map(lambda x: abstract_rows(mesh, x.shape, x.dtype), shapes)
    return train_step.abstract_state(cfg, experiment.optimizer, mesh)._replace(carry=carry)


def _abstract_batch(cfg: Trm, loop: PuzzleLoop, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    cells, rows = (loop.rows, cfg.seq_len), (loop.rows,)
    shapes = {"inputs": cells, "labels": cells, "ids": rows, "min_steps": rows}
    return {name: abstract_rows(mesh, shape, "int32") for name, shape in shapes.items()}


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)
