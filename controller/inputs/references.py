"""Where a config names the user's own functions and classes, as `module:name`."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from conf.schema.config import Config
from conf.schema.training.data import CustomDocuments
from conf.schema.training.environment import ENVIRONMENTS
from conf.schema.training.evaluations import BUILT_IN
from conf.schema.training.loop import GRPO_LOSSES, REWARDS, CustomLoop, GrpoLoop, LmLoop
from conf.schema.training.model import Model
from conf.schema.training.optimizer import CustomOptimizer
from conf.schema.training.prompts import CustomQuestions, QuestionData


class Use(NamedTuple):
    """A function or class that a config names. kind: as in `conf.extension.PROTOCOLS`."""

    kind: str
    key: str
    reference: str
    options: Mapping[str, Any] = {}


def references(config: Config) -> list[Use]:
    """Return everything of the user's own that the config names."""
    return [*trainer_references(config), *controller_references(config)]


def controller_references(config: Config) -> Iterator[Use]:
    """Yield what runs on the machine that drives the run."""
    for reference in config.code.checks:
        yield Use("check", "code.checks", reference)
    for reference in config.code.resources:
        yield Use("resource kind", "code.resources", reference)
    if config.notify.notifier is not None:
        yield Use("notifier", "notify.notifier", config.notify.notifier)


def trainer_references(config: Config) -> Iterator[Use]:
    """Yield what runs on the workers."""
    if config.program.kind != "trainer":
        return
    data, loop, opt, model = config.data, config.loop, config.optimizer, config.model
    if isinstance(data, CustomQuestions | CustomDocuments):
        kind = "questions" if isinstance(data, CustomQuestions) else "documents"
        yield Use(kind, "data.source", data.source, data.options)
    if isinstance(data, QuestionData) and data.prompt.formatter is not None:
        yield Use("prompt", "data.prompt.formatter", data.prompt.formatter)
    if isinstance(opt, CustomOptimizer):
        yield Use("optimizer rule", "optimizer.rule", opt.rule, opt.options)
    if isinstance(model, Model) and model.implementation is not None:
        yield Use("model family", "model.implementation", model.implementation)
    yield from (use for use in evaluations(config) if use.reference not in BUILT_IN.values())
    match loop:
        case GrpoLoop():
            yield from (Use("reward", "loop.rewards", name) for name in loop.rewards if name not in REWARDS)
            if loop.accuracy_reward not in REWARDS:
                yield Use("reward", "loop.accuracy_reward", loop.accuracy_reward)
            if (own := loop.environment.name) is not None and own not in ENVIRONMENTS:
                reference = loop.environment.reference or own
                yield Use("environment", "loop.environment.name", reference, loop.environment.options)
            if loop.loss_type not in GRPO_LOSSES:
                yield Use("policy loss", "loop.loss_type", loop.loss_type, loop.loss_options)
            if loop.teacher is not None and loop.teacher.implementation is not None:
                yield Use("model family", "loop.teacher.implementation", loop.teacher.implementation)
        case LmLoop() if loop.loss != "cross_entropy":
            yield Use("token loss", "loop.loss", loop.loss, loop.loss_options)
        case CustomLoop():
            yield Use("loop", "loop.run", loop.run, loop.options)


def evaluations(config: Config) -> Iterator[Use]:
    """Yield the functions of `loop.evaluations`, those that are shipped too."""
    if config.program.kind == "trainer":
        for name, wanted in getattr(config.loop, "evaluations", {}).items():
            yield Use("evaluation", f"loop.evaluations.{name}", wanted.reference, wanted.options)
