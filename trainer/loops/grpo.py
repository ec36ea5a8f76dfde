"""GRPO after a supervised warm start: the loop, read from top to bottom.

A rollout draws a group of responses to each of its questions; the updates that follow move the policy towards those
that did better than their group. Questions, samples and shuffles are functions of (seed, rollout number), and a
checkpoint stores rollouts not yet trained on, so a run resumed after any update reaches the same parameters, bit for
bit.
"""

from collections import deque
from contextlib import nullcontext

import jax
from jax.sharding import Mesh

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile, RunFileError
from trainer.checkpoint.manager import CheckpointManager
from trainer.data import questions
from trainer.data.prompting import Draw
from trainer.distributed.mesh import check_accumulation
from trainer.distributed.preemption import PreemptionNotice
from trainer.distributed.runtime import shard_batch
from trainer.environments.episodes import Episodes
from trainer.environments.pool import EnvironmentPool
from trainer.evaluation.accuracy import Evaluator
from trainer.evaluation.model import TextModel
from trainer.evaluation.plugins import EvaluationPlugins
from trainer.models.weights import Params
from trainer.pretrained import store
from trainer.rewards.functions import check_columns, resolve
from trainer.rewards.pool import RewardPool
from trainer.rl import programs as grpo_programs
from trainer.rl.programs import programs, supervised_batch
from trainer.rl.remote.source import RemoteRollouts
from trainer.rl.rollouts import RolloutGenerator, staleness
from trainer.rl.state import Evaluations, StateSaver, TrainState
from trainer.rl.telemetry import Progress, Telemetry
from trainer.step import train_step
from trainer.step.batch_check import BatchCheck
from trainer.telemetry import startup_report
from trainer.telemetry.metrics import MetricsLogger
from trainer.tokenizer.loading import check_vocab_size

__all__ = ["programs", "run"]


def run(experiment: RunFile, mesh: Mesh, log: MetricsLogger) -> None:
    """Train from the newest checkpoint, or from the seed, to the last step. Raises RunFileError before any work."""
    loop = _validated_loop(experiment, mesh)
    with (
        PreemptionNotice() as notice,
        RewardPool(loop.reward_workers, loop.reward_timeout_seconds) as reward_pool,
        CheckpointManager(experiment.dir, experiment.checkpoint, ("eval_accuracy",), log) as checkpoints,
        EnvironmentPool(loop.environment) if loop.environment.name else nullcontext() as environments,
    ):
        trainer = GrpoTrainer(experiment, loop, mesh, log, reward_pool, checkpoints, notice, environments)
        with trainer.remote or nullcontext():
            trainer.run()


class GrpoTrainer:
    """One run of the loop: its components and its phases in order."""

    def __init__(
        self,
        experiment: RunFile,
        loop: GrpoLoop,
        mesh: Mesh,
        log: MetricsLogger,
        reward_pool: RewardPool,
        checkpoints: CheckpointManager,
        notice: PreemptionNotice,
        environments: EnvironmentPool | None,
    ) -> None:
        self.experiment, self.loop, self.mesh, self.checkpoints = experiment, loop, mesh, checkpoints
        self.phases = log.phases
        self.questions = questions.load_questions(experiment, loop)
        prompting = self.questions.prompt_encoder
        self.episodes = Episodes(loop, environments, prompting) if environments else None
        if self.episodes is not None:
            self.questions.open = self.episodes.open
        example = self.questions.train(Draw("rollout", 0), 1)[0].row or {}
        for name in (*loop.rewards, loop.accuracy_reward):
            check_columns(name, example)
        check_vocab_size(experiment.decoder.vocab_size, prompting.vocab_size, "data.tokenizer")
        if checkpoints.latest_step() is None:  # else they are not read again
            store.check_weights(experiment.decoder)
            store.check_weights(grpo_programs.reference_model(experiment))
        self.sampler = grpo_programs.build_sampler(experiment.decoder, loop, mesh, prompting)
        evaluation = Evaluator(loop, self.questions, self.sampler, reward_pool, experiment.seed, self.episodes)
        batches = BatchCheck(experiment.checkpoint, mesh)  # every process has the whole batch
        self.telemetry = Telemetry(experiment, loop, log, batches, lambda: self.saver.diagnose(self.train_state))
        self.saver = StateSaver(checkpoints, notice, self.telemetry, batches)
        text = (prompting.tokenizer, prompting.bos, prompting.stop_tokens)
        plugins = EvaluationPlugins(loop, log, lambda: TextModel(experiment.decoder, mesh, *text))
        self.evaluations = Evaluations(loop, evaluation, plugins, log, checkpoints, self.telemetry, self.saver)
        listed = list(grpo_programs.all_programs(experiment, loop, mesh, self.sampler.programs))
        with log.phases.measure("compile"):
            compilation = startup_report.Compilation(listed)
        startup_report.probe_bucket(experiment.dir, mesh)
        startup_report.log_memory(listed, experiment.pod)
        with log.phases.measure("restore or init"):  # while the programs compile
            self.train_state = self._restore_or_init()
        with log.phases.measure("compile"):
            self.programs = grpo_programs.GrpoPrograms(loop, compilation.wait(self.telemetry.costs))
        stopwatch = self.telemetry.stopwatch
        self.rollouts = RolloutGenerator(
            loop,
            mesh,
            experiment.seed,
            questions=self.questions,
            sampler=self.sampler,
            programs=self.programs,
            reward_pool=reward_pool,
            stopwatch=stopwatch,
            episodes=self.episodes,
        )
        is_remote = loop.sampler.is_remote or loop.replay is not None
        self.remote = (
            RemoteRollouts(experiment, loop, self.rollouts, self.sampler, log, stopwatch) if is_remote else None
        )

    def run(self) -> None:
        train_state = self.train_state
        self.telemetry.resume(train_state.progress.total_steps)
        if left_out := self.questions.num_too_long:
            startup_report.log_on_main(f"{left_out} questions are skipped: longer than loop.max_prompt_length")
        if bad := self.questions.bad_lines:
            startup_report.log_on_main(f"{len(bad)} rows are skipped (data.on_bad_line); the first: {bad[0]}")
        if train_state.progress.total_steps == 0:
            self.evaluations.log_baseline(train_state)
        if train_state.progress.phase == "warm_start":
            self.phases.enter("warm start")
            self._warm_start(train_state)
            reference = grpo_programs.initial_reference(train_state.state.params, self.experiment, self.mesh)
            if reference:
                self.checkpoints.save_reference(reference)
            train_state.state = self._reset_optimizer(train_state.state)
            self.telemetry.restart_clock()
        else:
            wanted = grpo_programs.abstract_reference(self.experiment, self.mesh)
            reference = self.checkpoints.restore_reference(wanted) if wanted else wanted
        self.phases.enter("updates")
        self._train(train_state, reference)
        self.phases.enter("end")
        self.saver.save(train_state)
        skipped = {"questions_left_out": self.questions.num_too_long, "bad_lines": len(self.questions.bad_lines)}
        self.evaluations.summarize(train_state, **{name: count for name, count in skipped.items() if count})

    def _warm_start(self, train_state: TrainState) -> None:
        """Train on worked responses until the policy is right often enough for rewards to differ."""
        loop, telemetry, progress = self.loop, self.telemetry, train_state.progress

        def evaluate(message: str) -> float:
            return self.evaluations.evaluate(train_state, "warm_start", message).accuracy

        def is_done() -> bool:
            is_right = progress.accuracy_before >= loop.warm_start_target_accuracy
            return is_right or progress.warm_steps >= loop.warm_start_steps

        if progress.warm_steps == 0:
            progress.accuracy_start = progress.accuracy_before = evaluate("accuracy at the start")
        while not is_done():
            self.saver.save_if_preempted(train_state)
            self.saver.verify(train_state)
            with telemetry.stopwatch.measure("update_time"):
                asked = self.questions.train(Draw("warm_start", progress.warm_steps), loop.rows)
                worked = self.episodes.worked(asked) if self.episodes else None
                batch = supervised_batch(asked, loop, worked)
                placed = shard_batch(batch, self.mesh)
                train_state.state, metrics = self.programs.warm_start(train_state.state, placed)
            progress.warm_steps += 1
            telemetry.record(progress, metrics, batch, rollout_metrics={})
            if progress.warm_steps % loop.warm_start_eval_interval == 0 or progress.warm_steps == loop.warm_start_steps:
                progress.accuracy_before = evaluate("accuracy in the warm start")
            if is_done():
                telemetry.end_phase(progress)
            if progress.total_steps % self.experiment.checkpoint.save_interval == 0:
                self.saver.save(train_state)
        progress.phase = "grpo"
        accuracy = f"{progress.accuracy_before:.3f} on {loop.eval_prompts} held-out prompts"
        startup_report.log_on_main(f"accuracy before GRPO: {accuracy}")

    def _train(self, train_state: TrainState, reference: Params) -> None:
        loop, telemetry, progress = self.loop, self.telemetry, train_state.progress
        if progress.steps == 0:
            progress.test_before = self.evaluations.test(train_state, "before")
        while progress.steps < loop.steps:
            self.saver.save_if_preempted(train_state)
            evaluates = progress.steps % loop.eval_interval == 0
            if progress.steps and evaluates:
                self.evaluations.evaluate(train_state, "eval", "accuracy")
            self.saver.verify(train_state)
            if progress.steps % loop.updates_per_rollout == 0:
                self._prefetch_rollouts(train_state, reference)
            batch, placed = train_state.rollouts[0].pop_batch()
            with telemetry.stopwatch.measure("update_time"):
                train_state.state, metrics = self.programs.update(train_state.state, placed)
            progress.steps += 1
            behind = staleness(batch, progress.steps - 1)
            telemetry.record(progress, metrics, batch, train_state.rollouts[0].metrics | behind)
            if not train_state.rollouts[0].batches:
                train_state.rollouts.popleft()
                telemetry.flush()
            if self.checkpoints.should_save(progress.total_steps, evaluates=progress.steps % loop.eval_interval == 0):
                self.saver.save(train_state)

    def _prefetch_rollouts(self, train_state: TrainState, reference: Params) -> None:
        """Draw the next rollout and `loop.async_depth` ones after it, unless samplers on other workers do that."""
        loop, next_one = self.loop, train_state.progress.steps // self.loop.updates_per_rollout
        rollouts, last = train_state.rollouts, loop.steps // loop.updates_per_rollout

        def between() -> None:
            self.saver.save_if_preempted(train_state)

        self.saver.verify_at_rest(train_state)
        draw, ahead = (self.remote.fetch, 0) if self.remote else (self.rollouts.generate, loop.async_depth)
        for number in range(next_one + len(rollouts), min(next_one + 1 + ahead, last)):
            rollout = draw(train_state.state.params, reference, number, between, train_state.progress.steps)
            rollouts.append(rollout)
            self.telemetry.tokens["rollout"] += rollout.num_tokens
        rollouts[0].finish()
        self.saver.verify_at_rest(train_state)
        if train_state.progress.steps == 0:
            startup_report.log_on_main(*startup_report.format_transcripts(rollouts[0].examples))

    def _restore_or_init(self) -> TrainState:
        """Restore the newest checkpoint, or start a new run."""
        cfg, opt = self.experiment.decoder, self.experiment.optimizer
        if restored := self.saver.restore(train_step.abstract_state(cfg, opt, self.mesh), self.mesh):
            return restored
        warm, key = opt.with_constant_lr(self.loop.warm_start_lr), jax.random.key(self.experiment.seed)
        return TrainState(train_step.init_state(cfg, warm, self.mesh, key), Progress(), deque())

    def _reset_optimizer(self, state: train_step.State) -> train_step.State:
        cfg, opt = self.experiment.decoder, self.experiment.optimizer
        shardings = train_step.state_shardings(cfg, opt, self.mesh)
        make = jax.jit(lambda p: train_step.new_state(p, cfg, opt), out_shardings=shardings, donate_argnums=0)
        return make(state.params)


def _validated_loop(experiment: RunFile, mesh: Mesh) -> GrpoLoop:
    loop = experiment.loop
    assert isinstance(loop, GrpoLoop)
    if (longest := loop.max_prompt_length + loop.max_new_tokens) > experiment.decoder.max_seq_len:
        raise RunFileError(
            f"loop.max_prompt_length and loop.max_new_tokens: their sum, {longest}, exceeds model.max_seq_len, "
            f"{experiment.decoder.max_seq_len}"
        )
    check_accumulation(loop, mesh)
    for name in (*loop.rewards, loop.accuracy_reward):
        resolve(name)
    return loop
