"""Supervised warm start before GRPO, until the policy is right often enough for rewards to differ."""

from dataclasses import dataclass

from jax.sharding import Mesh

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile
from trainer.data.problem import Draw
from trainer.data.questions import QuestionSet
from trainer.distributed.runtime import shard_batch
from trainer.environments.episodes import Episodes
from trainer.rl import batching
from trainer.rl.evaluations import Evaluations
from trainer.rl.programs import GrpoPrograms
from trainer.rl.progress import Progress
from trainer.rl.state import StateSaver, TrainState
from trainer.rl.telemetry import Telemetry
from trainer.telemetry.startup_report import log_on_main


@dataclass(eq=False)
class WarmStart:
    """The warm-start phase, from the run's current progress to its end."""

    experiment: RunFile
    loop: GrpoLoop
    mesh: Mesh
    asked: QuestionSet
    programs: GrpoPrograms
    telemetry: Telemetry
    saver: StateSaver
    evaluations: Evaluations
    episodes: Episodes | None

    def run(self, train_state: TrainState) -> None:
        loop, telemetry, progress = self.loop, self.telemetry, train_state.progress
        if progress.warm_steps == 0:
            progress.accuracy_start = self._evaluate(train_state, "accuracy at the start")
            progress.accuracy_before = progress.accuracy_start
        while not self._is_done(progress):
            self.saver.save_if_preempted(train_state)
            self.saver.verify(train_state)
            with telemetry.stopwatch.measure("update_time"):
                questions = self.asked.train(Draw("warm_start", progress.warm_steps), loop.rows)
                worked = self.episodes.worked(questions) if self.episodes else None
                batch = batching.supervised_batch(questions, loop, worked)
                placed = shard_batch(batch, self.mesh)
                train_state.state, metrics = self.programs.warm_start(train_state.state, placed)
            progress.warm_steps += 1
            telemetry.record(progress, metrics, batch, rollout_metrics={})
            if progress.warm_steps % loop.warm_start_eval_interval == 0 or progress.warm_steps == loop.warm_start_steps:
                progress.accuracy_before = self._evaluate(train_state, "accuracy in the warm start")
            if self._is_done(progress):
                telemetry.end_phase(progress)
            if progress.total_steps % self.experiment.checkpoint.save_interval == 0:
                self.saver.save(train_state)
        progress.phase = "grpo"
        log_on_main(f"accuracy before GRPO: {progress.accuracy_before:.3f} on {loop.eval_prompts} held-out prompts")

    def _evaluate(self, train_state: TrainState, message: str) -> float:
        return self.evaluations.evaluate(train_state, "warm_start", message).accuracy

    def _is_done(self, progress: Progress) -> bool:
        loop = self.loop
        return (
            progress.accuracy_before >= loop.warm_start_target_accuracy or progress.warm_steps >= loop.warm_start_steps
        )
