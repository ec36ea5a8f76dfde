"""Extensions: what the config names as `module:name` exists and can be called, and the user's own checks."""

from collections.abc import Iterator
from pathlib import Path

from conf.extension import ExtensionError, call_problem, load
from conf.schema.config import Config
from conf.schema.training.loop import GrpoLoop
from controller.core.errors import ConfigError
from controller.core.finding import Issue, check
from controller.inputs.modules import DefinitionError, find_signature, module_files, on_search_path, taken_names
from controller.inputs.references import references, trainer_references

KEYS = (
    *(
        "loop.rewards",
        "loop.accuracy_reward",
        "loop.loss_type",
        "loop.loss",
        "loop.evaluations.NAME",
        "loop.run",
        "data.source",
    ),
    *("data.prompt.formatter", "optimizer.rule", "model.implementation", "notify.notifier", "code.checks"),
    "code.resources",
)


@check("extension", "error", *KEYS)
def extensions_exist(config: Config) -> Iterator[Issue]:
    """A module or function that is missing, or takes other arguments, fails only when the workers call it."""
    used = references(config)
    if not used:
        return
    try:
        files = module_files(config, Path.cwd())
    except ConfigError:
        return  # `modules` reports it
    on_workers = [*trainer_references(config)]
    here = config.env.packages == "image" and config.cloud.kind == "local"
    for use in used:
        try:
            signature = find_signature(use.reference, files, installed=here or use not in on_workers)
        except DefinitionError as error:
            yield Issue(f"{use.kind} {use.reference}: {error}", use.key)
            continue
        if signature is not None and (problem := call_problem(signature, use.kind, use.options)):
            yield Issue(f"{use.kind} {use.reference} {problem}", use.key)


@check("modules", "error", "code.modules")
def modules_can_be_shipped(config: Config) -> Iterator[Issue]:
    """The files of your modules are shipped under their own names, which must not be taken on the workers."""
    if config.program.kind != "trainer" or not references(config):
        return
    try:
        files = module_files(config, Path.cwd())
    except ConfigError as error:
        yield Issue(str(error).removeprefix("code.modules: "))
        return
    for path, owner in taken_names(files):
        yield Issue(f"{path} has a name of {owner}, which would be imported in its place; rename it")


@check("implementation", "error", "model.implementation")
def implementation_is_supported(config: Config) -> Iterator[Issue]:
    """A model of your own has no sampler: only the lm loop, without text samples, and loops of your own can use it."""
    if config.program.kind != "trainer" or getattr(config.model, "implementation", None) is None:
        return
    if isinstance(config.loop, GrpoLoop):
        yield Issue("the grpo loop samples with Slipway's decoder; use loop=lm or null")
    elif getattr(getattr(config.loop, "text_samples", None), "interval", None) is not None:
        yield Issue("text samples need Slipway's decoder; set loop.text_samples.interval=null")


@check("own_check", "error", "KEY")
def own_checks_pass(config: Config) -> Iterator[Issue]:
    """Rules of your own (`code.checks`), which only your project knows."""
    for reference in config.code.checks:
        with on_search_path(config, Path.cwd()):
            yield from _run_check(reference, config)


def _run_check(reference: str, config: Config) -> Iterator[Issue]:
    try:
        found = [*load("check", reference, "code.checks")(config)]
    except ExtensionError as error:
        yield Issue(str(error).removeprefix("code.checks: "), "code.checks")
        return
    except Exception as error:
        yield Issue(f"{reference} raised {error!r}", "code.checks")
        return
    for item in found:
        match item:
            case (str(key), str(message)):
                yield Issue(message, key)
            case _:
                yield Issue(f"{reference} must yield (key, message), not {item!r}", "code.checks")
