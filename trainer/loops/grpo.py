"""GRPO after a supervised warm start: the loop, read from top to bottom.

A rollout draws a group of responses to each of its questions; the updates that follow move the policy towards those
that did better than their group. Questions, samples and shuffles are functions of (seed, rollout number), and a
checkpoint stores rollouts not yet trained on, so a run resumed after any update reaches the same parameters, bit for
bit.
"""

from contextlib import nullcontext
from functools import partial

from jax.sharding import Mesh

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.refusals import EVALUATED
from conf.schema.training.run_yaml import RunFile
from trainer.checkpoint.manager import CheckpointManager
from trainer.data.prompting import Draw, Question
from trainer.distributed.preemption import PreemptionNotice
from trainer.distributed.runtime import shard_batch
from trainer.environments.episodes import Episode, NothingFitsError
from trainer.environments.pool import EnvironmentPool
from trainer.models.weights import Params
from trainer.rewards.pool import RewardPool
from trainer.rl.build import GrpoParts, validated_loop
from trainer.rl.programs import abstract_reference, initial_reference, programs, supervised_batch
from trainer.rl.rollouts import staleness
from trainer.sampler import LogitsError
from trainer.step.nan_diagnosis import DivergedError
from trainer.telemetry.metrics import MetricsLogger
from trainer.telemetry.startup_report import format_transcripts, log_on_main

__all__ = ["programs", "run"]

MAX_REDRAWS = 8
"""Of the questions of one update of the warm start, where no worked episode fits."""
LEFT_OUT = {
    "questions_left_out": "questions are skipped: longer than loop.max_prompt_length",
    "solutions_left_out": "worked responses are not trained on: longer than loop.max_new_tokens",
    "bad_lines": "rows are skipped (data.on_bad_line)",
}
"""What is said of each count in `QuestionSet.left_out`."""


def run(experiment: RunFile, mesh: Mesh, log: MetricsLogger) -> None:
    """Train from the newest checkpoint, or from the seed, to the last step. Raises RunFileError before any work."""
    loop = validated_loop(experiment, mesh)
    with (
        PreemptionNotice() as notice,
        RewardPool(loop.reward_workers, loop.reward_timeout_seconds) as reward_pool,
        CheckpointManager(experiment.dir, experiment.checkpoint, EVALUATED[GrpoLoop], log) as checkpoints,
        EnvironmentPool(loop.environment) if loop.environment.name else nullcontext() as environments,
    ):
        parts = GrpoParts(experiment, loop, mesh, log, notice, reward_pool, checkpoints, environments)
        with parts.remote or nullcontext():
            try:
                _train(parts)
            except LogitsError as error:
                raise DivergedError(f"after update {parts.train_state.progress.total_steps}: {error}") from None


def _train(parts: GrpoParts) -> None:
    """Run what is left of both phases, then the final evaluation."""
    train_state, telemetry, questions = parts.train_state, parts.telemetry, parts.questions
    progress, phases = train_state.progress, telemetry.phases
    telemetry.resume(progress.total_steps)
    for name, count in questions.left_out.items():
        log_on_main(
            f"{count} {LEFT_OUT[name]}{f'; the first: {questions.bad_lines[0]}' if name == 'bad_lines' else ''}"
        )
    telemetry.skipped = questions.left_out
    if progress.total_steps == 0:
        parts.evaluations.log_baseline(train_state)
    if progress.phase == "warm_start":
        phases.enter("warm start")
        _warm_start(parts)
        reference = initial_reference(train_state.state.params, parts.experiment, parts.mesh)
        if reference:
            parts.checkpoints.save_reference(reference)
        train_state.reset_optimizer(parts.experiment, parts.mesh)
        telemetry.restart_clock()
    else:
        wanted = abstract_reference(parts.experiment, parts.mesh)
        reference = parts.checkpoints.restore_reference(wanted) if wanted else wanted
    phases.enter("updates")
    _policy_updates(parts, reference)
    phases.enter("end")
    if not parts.checkpoints.has_begun(progress.total_steps):
        parts.saver.save(train_state)
    parts.evaluations.summarize(train_state, **telemetry.left_out(progress))
    parts.saver.save(train_state)  # once more if it could not be written meanwhile


def _warm_start(parts: GrpoParts) -> None:
    """Train on worked responses until the policy is right often enough for rewards to differ."""
    loop, telemetry, saver, train_state = parts.loop, parts.telemetry, parts.saver, parts.train_state
    progress = train_state.progress

    def evaluate() -> float:
        return parts.evaluations.evaluate(train_state, "warm_start").accuracy

    def is_done() -> bool:
        is_right = progress.accuracy_before >= loop.warm_start_target_accuracy
        return is_right or progress.warm_steps >= loop.warm_start_steps

    if progress.warm_steps == 0:
        progress.accuracy_start = progress.accuracy_before = evaluate()
    while not is_done():
        saver.save_if_preempted(train_state)
        saver.compare_if_due(train_state)
        with telemetry.stopwatch.measure("update_time"):
            questions, worked = _worked_questions(parts)
            batch = supervised_batch(questions, loop, worked)
            placed = shard_batch(batch, parts.mesh)
            train_state.state, metrics = parts.programs.warm_start(train_state.state, placed)
        progress.warm_steps += 1
        telemetry.record(progress, metrics, batch, {}, partial(saver.diagnose, train_state))
        if progress.warm_steps % loop.warm_start_eval_interval == 0 or progress.warm_steps == loop.warm_start_steps:
            progress.accuracy_before = evaluate()
        if is_done():
            telemetry.end_phase(progress)
        if parts.checkpoints.should_save(progress.total_steps):
            saver.save(train_state)
    progress.phase = "grpo"
    log_on_main(f"accuracy before GRPO: {progress.accuracy_before:.3f} on {loop.eval_prompts} held-out prompts")


def _worked_questions(parts: GrpoParts) -> tuple[list[Question], list[Episode] | None]:
    """Return the questions of the next update of the warm start, with their worked episodes in an environment.

    Others replace them if none of these episodes may be trained on. Raises NothingFitsError if that goes on.
    """
    progress, attempt = parts.train_state.progress, 0
    while True:
        questions = parts.questions.train(Draw("warm_start", progress.warm_steps, attempt), parts.loop.rows)
        if not parts.episodes:
            return questions, None
        try:
            worked = parts.episodes.worked(questions)
        except NothingFitsError:
            attempt += 1
            if attempt > MAX_REDRAWS:
                raise
            progress.solutions_left_out += len(questions)
        else:
            progress.solutions_left_out += sum(not episode.tokens for episode in worked)
            return questions, worked


def _policy_updates(parts: GrpoParts, reference: Params) -> None:
    """Draw responses, score them, and move the policy, until the last step."""
    loop, telemetry, saver, train_state = parts.loop, parts.telemetry, parts.saver, parts.train_state
    progress, rollouts = train_state.progress, train_state.rollouts
    if progress.steps == 0:
        progress.test_before = parts.evaluations.test(train_state, "before")
    while progress.steps < loop.steps:
        saver.save_if_preempted(train_state)
        if progress.steps and progress.steps % loop.eval_interval == 0:
            parts.evaluations.evaluate(train_state, "eval")
        saver.compare_if_due(train_state)
        if progress.steps % loop.updates_per_rollout == 0:
            _prefetch_rollouts(parts, reference)
        batch, placed = rollouts[0].pop_batch()
        with telemetry.stopwatch.measure("update_time"):
            train_state.state, metrics = parts.programs.update(train_state.state, placed)
        progress.steps += 1
        rollout_metrics = rollouts[0].metrics | staleness(batch, progress.steps - 1)
        telemetry.record(progress, metrics, batch, rollout_metrics, partial(saver.diagnose, train_state))
        if not rollouts[0].batches:
            rollouts.popleft()
            telemetry.flush()
        evaluates = progress.steps % loop.eval_interval == 0
        if parts.checkpoints.should_save(progress.total_steps, evaluates=evaluates):
            saver.save(train_state)


def _prefetch_rollouts(parts: GrpoParts, reference: Params) -> None:
    """Draw the next rollout and `loop.async_depth` ones after it, unless samplers on other workers do that."""
    loop, saver, train_state = parts.loop, parts.saver, parts.train_state
    rollouts, steps = train_state.rollouts, train_state.progress.steps
    first, last = steps // loop.updates_per_rollout, loop.steps // loop.updates_per_rollout
    between = partial(saver.save_if_preempted, train_state)
    saver.compare_at_rest(train_state)
    draw, ahead = (parts.remote.fetch, 0) if parts.remote else (parts.rollouts.generate, loop.async_depth)
    for number in range(first + len(rollouts), min(first + 1 + ahead, last)):
        rollout = draw(train_state.state.params, reference, number, between, steps)
        rollouts.append(rollout)
        parts.telemetry.tokens["rollout"] += rollout.num_tokens
    rollouts[0].finish()
    saver.compare_at_rest(train_state)
    if steps == 0:
        log_on_main(*format_transcripts(rollouts[0].examples))
