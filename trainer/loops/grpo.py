"""GRPO after a supervised warm start: the loop, read from top to bottom.

A rollout draws a group of responses to each of its questions; the updates that follow move the policy towards those
that did better than their group. Questions, samples and shuffles are functions of (seed, number of the rollout), and a
checkpoint keeps what is drawn and not yet learnt from: a resume after any update goes on to the same parameters, bit
for bit.
"""

from __future__ import annotations

from collections import deque

import jax
from jax.sharding import Mesh

from conf.schema.training.loop import GrpoLoop, UnevenError
from conf.schema.training.run_yaml import RunFile, RunFileError
from trainer.checkpoint.manager import Checkpoints
from trainer.data import questions
from trainer.data.prompting import Prompting
from trainer.distributed import mesh as meshes
from trainer.distributed.preemption import Notice
from trainer.evaluation.accuracy import Evaluation
from trainer.models.weights import Params
from trainer.rewards.functions import resolve
from trainer.rewards.pool import Pool
from trainer.rl import batching
from trainer.rl.journal import Journal, Position, Standing
from trainer.rl.programs import Programs, abstract_reference, all_programs, frozen, programs, warm_optimizer
from trainer.rl.rollouts import Rollouts
from trainer.rl.warm_start import WarmStart
from trainer.step import train_step
from trainer.telemetry import startup_report
from trainer.telemetry.metrics import Metrics

__all__ = ["programs", "run"]


def run(experiment: RunFile, mesh: Mesh, log: Metrics) -> None:
    """Train from the newest checkpoint, or from the seed, to the last step. Raises RunFileError before any work."""
    loop = _checked(experiment, mesh)
    with (
        Notice() as notice,
        Pool(loop.reward_workers, loop.reward_timeout_seconds) as checks,
        Checkpoints(experiment.dir, experiment.checkpoint, metrics=("eval_accuracy",)) as checkpoints,
    ):
        Run(experiment, loop, mesh, log, checks, checkpoints, notice).run()


class Run:
    """One run of the loop: what it consists of, and its phases in their order."""

    def __init__(
        self,
        experiment: RunFile,
        loop: GrpoLoop,
        mesh: Mesh,
        log: Metrics,
        checks: Pool,
        checkpoints: Checkpoints,
        notice: Notice,
    ) -> None:
        self.experiment, self.loop, self.mesh, self.checkpoints = experiment, loop, mesh, checkpoints
        self.asked = questions.of(experiment, loop)
        prompting = self.asked.prompting
        _check_vocab(experiment, prompting)
        self.sampler = batching.build_sampler(experiment.model, loop, mesh, prompting)
        evaluation = Evaluation(loop, self.asked, self.sampler, checks, experiment.seed)
        self.journal = Journal(experiment, loop, log, checkpoints, notice, evaluation)
        listed = list(all_programs(experiment, loop, mesh, self.sampler.programs))
        startup_report.probe_bucket(experiment.dir, mesh)
        startup_report.tell_memory(listed, experiment.pod)
        self.programs = Programs(loop, startup_report.compile_all(listed, self.journal.costs))
        self.rollouts = Rollouts(
            loop, mesh, experiment.seed, self.asked, self.sampler, self.programs, checks, self.journal.watch
        )

    def run(self) -> None:
        at = self._start()
        self.journal.resume(at)
        if left_out := self.asked.too_long:
            self.journal.tell([f"{left_out} questions are longer than loop.max_prompt_length and never asked"])
        if at.position.total == 0:
            self.journal.tell_baseline(at)
        if at.position.phase == "warm_start":
            WarmStart(self.experiment, self.loop, self.mesh, self.asked, self.programs, self.journal).run(at)
            reference = frozen(at.state.params, self.experiment, self.mesh)
            if reference:
                self.checkpoints.save_reference(reference)
            at.state = self._renewed(at.state)
            self.journal.restart_clock()
        else:
            wanted = abstract_reference(self.experiment, self.mesh)
            reference = self.checkpoints.restore_reference(wanted) if wanted else wanted
        self._learn(at, reference)
        self.journal.save(at)
        self.journal.summarize(at, questions_left_out=self.asked.too_long)

    def _learn(self, at: Standing, reference: Params) -> None:
        """The updates of GRPO that are to come."""
        loop, journal, position = self.loop, self.journal, at.position
        if position.steps == 0:
            position.test_before = journal.test(at, "before")
        while position.steps < loop.steps:
            journal.heed(at)
            evaluates = position.steps % loop.eval_interval == 0
            if position.steps and evaluates:
                journal.evaluate(at, "eval", "accuracy")
            journal.verify(at)
            if position.steps % loop.updates_per_rollout == 0:
                self._draw_ahead(at, reference)
            batch, placed = at.ready[0].take()
            with journal.watch.spending("update_time"):
                at.state, metrics = self.programs.update(at.state, placed)
            position.steps += 1
            journal.note(at, metrics, batch, at.ready[0].facts)
            if not at.ready[0].batches:
                at.ready.popleft()
                journal.look()
            if self.checkpoints.due(position.total, evaluates=position.steps % loop.eval_interval == 0):
                journal.save(at)

    def _draw_ahead(self, at: Standing, reference: Params) -> None:
        """Draw the rollout that is learnt from next, and with `loop.async_depth` the one after it, whose rewards are
        then computed beside the updates."""
        loop, next_one = self.loop, at.position.steps // self.loop.updates_per_rollout
        last = loop.steps // loop.updates_per_rollout
        for number in range(next_one + len(at.ready), min(next_one + 1 + loop.async_depth, last)):
            drawn = self.rollouts.draw(at.state.params, reference, number, lambda: self.journal.heed(at))
            at.ready.append(drawn)
            self.journal.tokens["rollout"] += drawn.tokens
        at.ready[0].finish()
        if at.position.steps == 0:
            self.journal.tell(startup_report.transcripts(at.ready[0].examples))

    def _start(self) -> Standing:
        """Where the newest checkpoint stands, else a new run."""
        cfg, opt = self.experiment.model, self.experiment.optimizer
        resumed = self.checkpoints.resume(train_step.abstract_state(cfg, opt, self.mesh))
        if resumed is None:
            warm, key = warm_optimizer(opt, self.loop), jax.random.key(self.experiment.seed)
            return Standing(train_step.init_state(cfg, warm, self.mesh, key), Position(), deque())
        return self.journal.restored(resumed, self.mesh)

    def _renewed(self, state: train_step.State) -> train_step.State:
        """The same weights, with an optimizer that has seen nothing."""
        cfg, opt = self.experiment.model, self.experiment.optimizer
        shardings = train_step.state_shardings(cfg, opt, self.mesh)
        make = jax.jit(lambda p: train_step.fresh(p, cfg, opt), out_shardings=shardings, donate_argnums=0)
        return make(state.params)


def _checked(experiment: RunFile, mesh: Mesh) -> GrpoLoop:
    loop = experiment.loop
    if not isinstance(loop, GrpoLoop):
        raise TypeError(f"a grpo loop is wanted, not {loop.kind}")
    if (longest := loop.max_prompt_length + loop.max_new_tokens) > experiment.model.max_seq_len:
        raise RunFileError(
            f"loop.max_prompt_length and loop.max_new_tokens: together {longest} tokens, more than model.max_seq_len, "
            f"{experiment.model.max_seq_len}"
        )
    try:
        loop.accumulation(meshes.shards(mesh, "batch"))
    except UnevenError as error:
        raise RunFileError(str(error)) from None
    for name in loop.rewards:
        resolve(name)
    return loop


def _check_vocab(experiment: RunFile, prompting: Prompting) -> None:
    known, wanted = experiment.model.vocab_size, prompting.vocab
    if known < wanted:
        raise RunFileError(
            f"model.vocab_size: {known} ids are too few for data.tokenizer, which has {wanted}; take "
            f"at least {wanted}, or the tokenizer that belongs to the weights"
        )
