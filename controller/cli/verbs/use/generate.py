"""`slipway generate [RUN] --prompt TEXT`: responses of the policy of a run, on this machine (docs/use-weights.md)."""

from controller.cli.main import Command
from controller.cli.verbs.use.weights import open_weights, run_trainer, sampling_arguments
from controller.core.errors import ConfigError


def run(command: Command) -> int:
    flags = command.flags
    if bool(flags.prompt) == bool(flags.prompts):
        raise ConfigError("generate: give either --prompt TEXT or --prompts FILE.jsonl")
    asked = [word for text in flags.prompt for word in ("--prompt", text)]
    if flags.prompts:
        asked = ["--prompts", flags.prompts, "--column", flags.column]
    more = [*(["--out", flags.out] if flags.out else []), *(["--raw"] if flags.raw else [])]
    more += ["--json"] if flags.json else []
    with open_weights(command) as (session, weights):
        modules = session.plan.config.code.modules
    words = (*asked, "--samples", str(flags.samples), *more, *sampling_arguments(command))
    return run_trainer("trainer.generate", str(weights.folder), *words, modules=modules)
