"""Before GRPO: supervised updates on worked answers, until the policy is right often enough to see a difference."""

from __future__ import annotations

from jax.sharding import Mesh

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile
from trainer.data.questions import Asked
from trainer.distributed.runtime import place_batch
from trainer.rl import batching
from trainer.rl.journal import Journal, Position, Standing
from trainer.rl.programs import Programs


class WarmStart:
    """The phase, from wherever a run stands in it to its end."""

    def __init__(
        self,
        experiment: RunFile,
        loop: GrpoLoop,
        mesh: Mesh,
        asked: Asked,
        programs: Programs,
        journal: Journal,
    ) -> None:
        self._experiment, self._loop, self._mesh = experiment, loop, mesh
        self._asked, self._programs, self._journal = asked, programs, journal

    def run(self, at: Standing) -> None:
        loop, journal, position = self._loop, self._journal, at.position
        if position.warm_steps == 0:
            position.accuracy_start = journal.evaluate(at, "warm_start", "accuracy at the start")
            position.accuracy_before = position.accuracy_start
        while not self._over(position):
            journal.heed(at)
            with journal.watch.spending("update_time"):
                drawn = batching.supervised(self._asked.train(position.warm_steps, loop.rows), loop)
                at.state, metrics = self._programs.warm_start(at.state, place_batch(drawn, self._mesh))
            position.warm_steps += 1
            journal.note(at, metrics, drawn, facts={})
            if position.warm_steps % loop.warm_start_eval_interval == 0 or position.warm_steps == loop.warm_start_steps:
                position.accuracy_before = journal.evaluate(at, "warm_start", "accuracy in the warm start")
            if self._over(position):
                journal.end_phase(at)
            if position.total % self._experiment.checkpoint.save_interval == 0:
                journal.save(at)
        position.phase = "grpo"
        journal.tell([f"accuracy before GRPO: {position.accuracy_before:.3f} on {loop.eval_prompts} held-out prompts"])

    def _over(self, position: Position) -> bool:
        loop = self._loop
        return (
            position.accuracy_before >= loop.warm_start_target_accuracy or position.warm_steps >= loop.warm_start_steps
        )
