"""Extensions: what the config names as `module:name` exists and can be called, and the user's own checks."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from conf.extension import ExtensionError, load, wants_model
from conf.schema.config import Config
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.loop_parts import ENVIRONMENTS, VERIFIERS_QUESTIONS, PuzzleLoop
from conf.schema.training.settings import BUILT_IN
from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.finding import Issue, check
from controller.inputs.definitions import Definition, DefinitionError, find_definition, signature_of
from controller.inputs.modules import (
    Use,
    absent_imports,
    evaluations,
    meant_module,
    module_files,
    module_folders,
    on_search_path,
    references,
    taken_names,
    trainer_references,
)
from controller.inputs.protocols import caution, misfit
from controller.plan.build import Plan
from controller.resources.software import Venv

LM_EVAL = re.compile(r"^lm[-_.]eval\b", re.MULTILINE | re.IGNORECASE)
VERIFIERS = re.compile(r"^verifiers\b(?!-)(.*)", re.MULTILINE | re.IGNORECASE)
UNKNOWN = re.compile(r"==(?!\s*0\.(1\.1[4-9]|[2-4]\b))")
"""After the name of verifiers: a version that Slipway does not know."""
KEYS = (
    *(
        "loop.rewards",
        "loop.accuracy_reward",
        "loop.loss_type",
        "loop.loss",
        "loop.environment.name",
        "loop.evaluations.NAME",
        "loop.run",
        "data.source",
    ),
    *(
        "data.prompt.formatter",
        "optimizer.rule",
        "model.implementation",
        "loop.teacher.implementation",
        "notify.notifier",
        "code.checks",
    ),
    *("code.resources", "logging.trackers"),
)


@check("extension", "error", *KEYS, also="warning")
def extensions_exist(config: Config) -> Iterator[Issue]:
    """A module or function that is missing, or takes other arguments, fails only when the workers call it."""
    shipped = [use for use in evaluations(config) if use.reference in BUILT_IN.values()]
    environment = getattr(config.loop, "environment", None)
    if environment is not None and environment.name in ENVIRONMENTS:
        shipped.append(Use("environment", "loop.environment.name", environment.reference, environment.options))
    used = [*references(config), *shipped]
    if not used:
        return
    try:
        files = module_files(config, Path.cwd())
    except ConfigError:
        return  # `modules` reports it
    on_workers = [*trainer_references(config), *shipped]
    here = config.env.packages == "image" and config.cloud.kind == "local"
    yield from _absent_packages(config, on_workers, files)
    for use in used:
        try:
            found = find_definition(use.reference, files, installed=here or use not in on_workers)
        except DefinitionError as error:
            if not _may_be_installed(use, config, files):
                yield Issue(f"{use.kind} {use.reference}: {error}", use.key)
            continue
        yield from _misfits(use, found, config)


def _misfits(use: Use, found: Definition | None, config: Config) -> Iterator[Issue]:
    """Yield why what a config names cannot be used as its kind."""
    signature = signature_of(found) if found else None
    problem = misfit(found, use.kind, use.options, use.reference) if found else ""
    said = f"{use.kind} {use.reference} {problem}" if problem else ""
    if not signature and use.reference.partition(":")[0] in sys.stdlib_module_names:
        said = said or _load_problem(use)  # a function that is not written in Python may still be inspected
    if said:
        yield Issue(said, use.key)
    elif found and (doubt := caution(found, use.kind)):
        yield Issue(f"{use.kind} {use.reference} {doubt}", use.key, "warning")
    elif use.kind == "evaluation" and signature and not (wants_model(signature) or isinstance(config.loop, GrpoLoop)):
        yield Issue(f"{use.reference}: only the grpo loop has answers; call the first parameter `model`", use.key)


def _load_problem(use: Use) -> str:
    try:
        load(use.kind, use.reference, use.key, use.options)
    except ExtensionError as error:
        return str(error).removeprefix(f"{use.key}: ")
    return ""


def _absent_packages(config: Config, uses: list[Use], files: Mapping[str, Path]) -> Iterator[Issue]:
    """Yield what modules import and the workers lack, where it is known what those have."""
    of_machine = config.env.packages == "image" if config.cloud.kind == "local" else config.cloud.kind == "here"
    if not of_machine and config.env.packages != "lock":
        return
    lacking = "this machine has no such package" if of_machine else "env.packages=lock does not install it"
    told = dict[tuple[str, str], str]()
    for use in uses:
        relative = use.reference.partition(":")[0].replace(".", "/")
        for name in (f"{relative}.py", f"{relative}/__init__.py"):
            for absent in absent_imports(files[name], files, locked=not of_machine) if name in files else ():
                told.setdefault(absent, use.key)
    for (words, module), key in told.items():
        meant = meant_module(module, files)
        if " lies outside of " in meant:
            yield Issue(f"{words}, and {meant}", key)
            continue
        cure = "" if of_machine else "name it in env.requirements, with env.packages=requirements"
        yield Issue("; ".join(filter(None, [f"{words}, and {lacking}", meant, cure])), key)


def _may_be_installed(use: Use, config: Config, files: Mapping[str, Path]) -> bool:
    """Return whether an environment of verifiers may be a taskset, or a package that `env.requirements` names."""
    environment = getattr(config.loop, "environment", None)
    module = getattr(environment, "verifiers_module", None)
    if use.kind != "environment" or module is None:
        return False
    is_own = f"{module}.py" in files or f"{module}/__init__.py" in files
    return (config.env.packages == "requirements" and not is_own) or _is_taskset(module, files)


def _is_taskset(module: str, files: Mapping[str, Path]) -> bool:
    """Return whether a module is a taskset of verifiers 0.4: one of the library's own, or one with `__all__`."""
    library = find_spec("verifiers")
    if library is not None and library.origin and (Path(library.origin).parent / "v1/tasksets" / module).is_dir():
        return True
    try:
        find_definition(f"{module}:__all__", files, installed=True)
    except DefinitionError:
        return False
    return True


@check("evaluation", "error", "loop.evaluations.NAME")
def evaluations_are_possible(config: Config) -> Iterator[Issue]:
    """An evaluation that cannot work would be an alert of a billed run, which goes on without it."""
    own = getattr(config.model, "implementation", None) is not None
    for name, wanted in getattr(config.loop, "evaluations", {}).items():
        key = f"loop.evaluations.{name}"
        if wanted.run in BUILT_IN and isinstance(config.loop, PuzzleLoop):
            yield Issue(f"{wanted.run} is for language models; use a function of your own", key)
        elif wanted.run == "code" and own:
            yield Issue("code generates text, for which model.implementation has no sampler", key)
        emulated = config.env.packages == "image" and config.cloud.kind == "local"
        if wanted.run == "lm_eval" and emulated and find_spec("lm_eval") is None:
            why = "the emulated workers use this machine's packages, which lack lm_eval"
            yield Issue(f"{why}: pip install 'slipway-tpu[evals]'", key)


@check("lm_eval", "error", "loop.evaluations.NAME", of_plan=True)
def lm_eval_is_installed(plan: Plan, context: Context) -> Iterator[Issue]:
    """The evaluation lm_eval needs lm-evaluation-harness on worker 0. The lock has it; other environments may not."""
    del context
    for name, wanted in getattr(plan.config.loop, "evaluations", {}).items():
        if wanted.run != "lm_eval":
            continue
        key = f"loop.evaluations.{name}"
        for venv in (resource for resource in plan.resources if isinstance(resource, Venv)):
            if venv.packages == "requirements" and venv.requirements and not LM_EVAL.search(venv.requirements):
                yield Issue("lm_eval is not in env.requirements; add it, or use env.packages=lock, which has it", key)


@check("verifiers", "error", "loop.environment.name", "data.source")
def verifiers_environment_is_possible(config: Config) -> Iterator[Issue]:
    """An environment of the library verifiers asks the questions of its own data set, and needs the library."""
    environment = getattr(config.loop, "environment", None)
    is_used = environment is not None and environment.verifiers_module is not None
    has_questions = getattr(config.data, "source", None) == VERIFIERS_QUESTIONS
    key = "loop.environment.name"
    if config.program.kind != "trainer" or not (is_used or has_questions):
        return
    if not has_questions:
        yield Issue("an environment of verifiers asks the questions of its own data set; set data=verifiers", key)
    elif not is_used:
        yield Issue("data=verifiers needs an environment of verifiers; set verifiers:ENVIRONMENT_ID", key)
    emulated = config.env.packages == "image" and config.cloud.kind == "local"
    if emulated and find_spec("verifiers") is None:
        why = "the emulated workers use this machine's packages, which lack verifiers"
        yield Issue(f"{why}: pip install 'slipway-tpu[verifiers]'", key)


@check("verifiers_package", "error", "loop.environment.name", of_plan=True)
def verifiers_is_installed(plan: Plan, context: Context) -> Iterator[Issue]:
    """An environment of the library verifiers needs it on every worker. The lock does not have it."""
    del context
    environment = getattr(plan.config.loop, "environment", None)
    if environment is None or environment.verifiers_module is None:
        return
    for venv in (resource for resource in plan.resources if isinstance(resource, Venv)):
        if venv.packages == "lock":
            yield Issue("the lock has no verifiers; set env.packages=requirements", "loop.environment.name")
        elif venv.packages == "requirements" and venv.requirements:
            found = VERIFIERS.search(venv.requirements)
            if found is None or UNKNOWN.search(found[1]):
                said = (
                    f"{found[0]} in env.requirements is unknown here" if found else "env.requirements lacks verifiers"
                )
                yield Issue(f"{said}; write verifiers>=0.1.14,<0.5", "loop.environment.name")


@check("modules", "error", "code.modules")
def modules_can_be_shipped(config: Config) -> Iterator[Issue]:
    """The files of your modules are shipped under their own names, which must not be taken on the workers."""
    is_used = references(config) if config.program.kind == "trainer" else [*trainer_references(config)]
    try:
        folders = [*module_folders(config, Path.cwd())]
        files = module_files(config, Path.cwd()) if folders and is_used else {}
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
    told = [issue.message for issue in extensions_exist.function(config)] if config.code.checks else []
    for reference in config.code.checks:
        if any(message.startswith((f"check {reference}:", f"check {reference} ")) for message in told):
            continue
        with on_search_path(config, Path.cwd()):
            yield from _run_check(reference, config)


def _run_check(reference: str, config: Config) -> Iterator[Issue]:
    try:
        found = load("check", reference, "code.checks")(config)
        if isinstance(found, str) or not isinstance(found, Iterable):
            yield Issue(f"{reference} must yield (key, message), and returned {found!r:.80}", "code.checks")
            return
        found = [*found]
    except ExtensionError as error:
        yield Issue(str(error).removeprefix("code.checks: "), "code.checks")
        return
    except (Exception, SystemExit) as error:
        yield Issue(f"{reference} raised {error!r}", "code.checks")
        return
    for item in found:
        match item:
            case (str(key), str(message)):
                yield Issue(message, key)
            case _:
                yield Issue(f"{reference} must yield (key, message), not {item!r}", "code.checks")
