"""The parts of a GRPO run, made in the order in which they need each other, while its programs compile."""

from dataclasses import dataclass

from jax.sharding import Mesh

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile, RunFileError
from trainer.checkpoint.manager import CheckpointManager
from trainer.data.prompting import Draw
from trainer.data.questions import QuestionSet, load_questions
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
from trainer.rl import programs as grpo_programs
from trainer.rl.programs import GrpoPrograms
from trainer.rl.remote.source import RemoteRollouts
from trainer.rl.rollouts import RolloutGenerator
from trainer.rl.state import Evaluations, StateSaver, TrainState
from trainer.rl.telemetry import Telemetry
from trainer.step.batch_check import BatchCheck
from trainer.telemetry import startup_report
from trainer.telemetry.metrics import MetricsLogger
from trainer.tokenizer.loading import check_vocab_size


@dataclass(frozen=True, eq=False)
class GrpoParts:
    """The parts of a run, and its state. episodes, remote: where there is an environment, or samplers elsewhere."""

    experiment: RunFile
    loop: GrpoLoop
    mesh: Mesh
    checkpoints: CheckpointManager
    questions: QuestionSet
    episodes: Episodes | None
    telemetry: Telemetry
    saver: StateSaver
    evaluations: Evaluations
    train_state: TrainState
    programs: GrpoPrograms
    rollouts: RolloutGenerator
    remote: RemoteRollouts | None


def validated_loop(experiment: RunFile, mesh: Mesh) -> GrpoLoop:
    """Return the loop. Raises RunFileError if its lengths, rows or rewards cannot be used."""
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


def build_parts(
    experiment: RunFile,
    loop: GrpoLoop,
    mesh: Mesh,
    log: MetricsLogger,
    notice: PreemptionNotice,
    reward_pool: RewardPool,
    checkpoints: CheckpointManager,
    environments: EnvironmentPool | None,
) -> GrpoParts:
    """Read the questions, compile everything, and restore the newest checkpoint or start from the seed.

    Raises RunFileError if questions, weights or model do not fit the loop.
    """
    cfg = experiment.decoder
    questions = load_questions(experiment, loop)
    prompting = questions.prompt_encoder
    episodes = None
    if environments is not None:
        episodes = Episodes(loop, environments, prompting)
        questions.open = episodes.open
    example = questions.train(Draw("rollout", 0), 1)[0].row or {}
    for name in (*loop.rewards, loop.accuracy_reward):
        check_columns(name, example)
    check_vocab_size(cfg.vocab_size, prompting.vocab_size, "data.tokenizer")
    if checkpoints.latest_step() is None:  # else they are not read again
        store.check_weights(cfg)
        store.check_weights(grpo_programs.reference_model(experiment))
    sampler = grpo_programs.build_sampler(cfg, loop, mesh, prompting)
    evaluator = Evaluator(loop, questions, sampler, reward_pool, experiment.seed, episodes)
    plugins = EvaluationPlugins(
        loop, log, lambda: TextModel(cfg, mesh, prompting.tokenizer, prompting.bos, prompting.stop_tokens)
    )
    batches = BatchCheck(experiment.checkpoint, mesh)  # every process has the whole batch
    telemetry = Telemetry(experiment, loop, log, batches)
    saver = StateSaver(checkpoints, notice, telemetry, batches)
    listed = list(grpo_programs.all_programs(experiment, loop, mesh, sampler.programs))
    with log.phases.measure("compile"):
        compilation = startup_report.Compilation(listed)
    startup_report.probe_bucket(experiment.dir, mesh)
    startup_report.log_memory(listed, experiment.pod)
    with log.phases.measure("restore or init"):  # while the programs compile
        train_state = saver.restore_or_init(experiment, loop, mesh)
    with log.phases.measure("compile"):
        programs = GrpoPrograms(loop, compilation.wait(telemetry.costs))
    rollouts = RolloutGenerator(
        loop, mesh, experiment.seed, questions, sampler, programs, reward_pool, telemetry.stopwatch, episodes
    )
    remote = None
    if loop.sampler.is_remote or loop.replay is not None:
        remote = RemoteRollouts(experiment, loop, rollouts, sampler, log, telemetry.stopwatch)
    return GrpoParts(
        experiment=experiment,
        loop=loop,
        mesh=mesh,
        checkpoints=checkpoints,
        questions=questions,
        episodes=episodes,
        telemetry=telemetry,
        saver=saver,
        evaluations=Evaluations(loop, evaluator, plugins, log, checkpoints, telemetry, saver),
        train_state=train_state,
        programs=programs,
        rollouts=rollouts,
        remote=remote,
    )
