"""`slipway chat [RUN]`: chat with a run's policy on this machine (docs/use-weights.md)."""

from controller.cli.main import Command
from controller.cli.verbs.use.weights import open_weights, run_trainer, sampling_arguments


def run(command: Command) -> int:
    with open_weights(command) as (session, weights):
        modules = session.plan.config.code.modules
    return run_trainer("trainer.chat", str(weights.folder), *sampling_arguments(command), modules=modules)
