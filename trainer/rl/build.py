"""The parts of a GRPO run, made in the order in which they need each other, while its programs compile."""

from jax.sharding import Mesh

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.refusals import require
from conf.schema.training.run_yaml import RunFile
from trainer.checkpoint.manager import CheckpointManager
from trainer.data.prompting import Draw
from trainer.data.questions import load_questions
from trainer.distributed.mesh import check_accumulation
from trainer.distributed.preemption import PreemptionNotice
from trainer.environments.episodes import Episodes
from trainer.environments.pool import EnvironmentPool
from trainer.evaluation.accuracy import Evaluator
from trainer.evaluation.model import TextModel
from trainer.evaluation.plugins import EvaluationPlugins
from trainer.pretrained import store
from trainer.rewards.functions import check_columns, resolve
from trainer.rewards.pool import RewardPool
from trainer.rl import programs
from trainer.rl.remote.source import RemoteRollouts
from trainer.rl.rollouts import RolloutGenerator
from trainer.rl.state import Evaluations, StateSaver
from trainer.rl.telemetry import Telemetry
from trainer.step.batch_check import BatchCheck
from trainer.telemetry import startup_report
from trainer.telemetry.metrics import MetricsLogger
from trainer.tokenizer.loading import check_vocab_size


def validated_loop(experiment: RunFile, mesh: Mesh) -> GrpoLoop:
    """Return the loop. Raises RunFileError if its lengths, rows or rewards cannot be used."""
    loop = experiment.loop
    assert isinstance(loop, GrpoLoop)
    require(experiment)
    check_accumulation(loop, mesh)
    for name in (*loop.rewards, loop.accuracy_reward):
        resolve(name)
    return loop


class GrpoParts:
    """The parts of a run, and its state. episodes, remote: None without an environment, or without other samplers."""

    def __init__(
        self,
        experiment: RunFile,
        loop: GrpoLoop,
        mesh: Mesh,
        log: MetricsLogger,
        notice: PreemptionNotice,
        reward_pool: RewardPool,
        checkpoints: CheckpointManager,
        environments: EnvironmentPool | None,
    ) -> None:
        """Read the questions, compile everything, and restore the newest checkpoint or start from the seed.

        Raises RunFileError if questions, weights or model do not fit the loop.
        """
        self.experiment, self.loop, self.mesh, self.checkpoints = experiment, loop, mesh, checkpoints
        cfg, seed = experiment.decoder, experiment.seed
        self.questions = load_questions(experiment, loop)
        prompting = self.questions.prompt_encoder
        self.episodes = Episodes(loop, environments, prompting) if environments else None
        if self.episodes is not None:
            self.questions.open = self.episodes.open
        example = self.questions.train(Draw("rollout", 0), 1)[0].row or {}
        for name in (*loop.rewards, loop.accuracy_reward):
            check_columns(name, example)
        check_vocab_size(cfg.vocab_size, prompting.vocab_size, "data.tokenizer")
        if checkpoints.latest_step() is None:  # else they are not read again
            store.check_weights(cfg)
            store.check_weights(programs.reference_model(experiment))
        sampler = programs.build_sampler(cfg, loop, mesh, prompting)
        evaluator = Evaluator(loop, self.questions, sampler, reward_pool, seed, self.episodes)
        plugins = EvaluationPlugins(
            loop, log, lambda: TextModel(cfg, mesh, prompting.tokenizer, prompting.bos, prompting.stop_tokens)
        )
        batches = BatchCheck(experiment.checkpoint, mesh)  # every process has the whole batch
        self.telemetry = Telemetry(experiment, loop, log, batches)
        self.saver = StateSaver(checkpoints, notice, self.telemetry, batches)
        self.evaluations = Evaluations(loop, evaluator, plugins, log, checkpoints, self.telemetry, self.saver)
        listed = list(programs.all_programs(experiment, loop, mesh, sampler.programs))
        with log.phases.measure("compile"):
            compilation = startup_report.Compilation(listed)
        startup_report.probe_bucket(experiment.dir, mesh)
        startup_report.log_memory(listed, experiment.pod)
        with log.phases.measure("restore or init"):  # while the programs compile
            self.train_state = self.saver.restore_or_init(experiment, loop, mesh)
        with log.phases.measure("compile"):
            self.programs = programs.GrpoPrograms(loop, compilation.wait(self.telemetry.costs))
        watch = self.telemetry.stopwatch
        self.rollouts = RolloutGenerator(
            loop, mesh, seed, self.questions, sampler, self.programs, reward_pool, watch, self.episodes
        )
        self.remote = None
        if loop.sampler.is_remote or loop.replay is not None:
            self.remote = RemoteRollouts(experiment, loop, self.rollouts, sampler, log, watch)
