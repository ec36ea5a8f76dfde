"""The user's own modules, which a config names as `module:name`: where it does, their files, and what they import.

Nothing is imported here: modules may need JAX, which the controller does not load.
"""

import ast
import difflib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import conf
from conf.extension import MODULES_FOLDER
from conf.schema.config import Config
from conf.schema.forms import escape_line
from conf.schema.training.data import CustomDocuments, CustomQuestions, QuestionData
from conf.schema.training.loop import GRPO_LOSSES, REWARDS, CustomLoop, GrpoLoop, LmLoop
from conf.schema.training.loop_parts import ENVIRONMENTS
from conf.schema.training.model import Model
from conf.schema.training.optimizer import CustomOptimizer
from conf.schema.training.settings import BUILT_IN, TRACKERS
from controller.core.errors import ConfigError


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
    yield from (Use("tracker", "logging.trackers", name) for name in config.logging.trackers if name not in TRACKERS)
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


OURS = ("conf", "controller", "slipway", "trainer")
OTHER_NAMES = {
    *("PIL", "absl", "antlr4", "attr", "google", "grpc", "grpc_status", "opentelemetry", "orbax", "proto", "yaml"),
}
"""Import names of packages in the lock that are not the packages' names."""
DEFAULT_FOLDER = "slipway"
TRACKERS_FOLDER = ".slipway_modules"
"""Folder of the shipped code with the user's modules beside a program of their own, which trackers import."""


def module_files(config: Config, folder: Path) -> dict[str, Path]:
    """Return the Python files of `code.modules` by their path below the folder on the module search path.

    Args:
        config: its `code.modules` are relative to `folder`.
        folder: the user's current folder.

    Raises:
        ConfigError: a folder is missing, or two of them have the same file.
    """
    import pathspec

    spec = pathspec.GitIgnoreSpec.from_lines(config.code.exclude)
    found: dict[str, Path] = {}
    for root in module_folders(config, folder):
        for path in sorted(python_files(root)):
            relative = path.relative_to(root)
            if spec.match_file(relative.as_posix()):
                continue
            if relative.as_posix() in found:
                message = f"{found[relative.as_posix()]} and {path} would be the same module; rename one"
                raise ConfigError(f"code.modules: {message}")
            found[relative.as_posix()] = path
    return found


def module_folders(config: Config, folder: Path) -> Iterator[Path]:
    """Yield the folders of `code.modules`, which are relative to `folder`. Raises ConfigError if one is missing."""
    for name in config.code.modules:
        root = folder / Path(name).expanduser()
        try:
            exists = root.is_dir()
        except OSError as error:  # the name is too long
            raise ConfigError(f"code.modules: {escape_line(name)}: {error.strerror}; set another folder") from None
        if not exists and name != DEFAULT_FOLDER:
            raise ConfigError(f"code.modules: there is no folder {root}; set the folders with your Python files")
        yield root


def python_files(root: Path) -> Iterator[Path]:
    """Yield the Python files in a folder, also through links; hidden folders, such as a `.venv`, are left out."""
    for place, folders, names in os.walk(root, followlinks=True):
        above = {os.path.realpath(place), *map(str, Path(os.path.realpath(place)).parents)}  # such links have no end
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        folders[:] = [name for name in folders if os.path.realpath(Path(place, name)) not in above]
        for name in names:
            path = Path(place, name)
            if name[0] != "." and name.endswith(".py") and path.is_file():
                yield path


@contextmanager
def on_search_path(config: Config, *folders: Path) -> Iterator[None]:
    """Make the modules of `code.modules` in these folders importable, behind everything else.

    Only what runs on the machine that drives the run is imported: checks and notifiers.
    """
    added = [str(place) for folder in folders for name in config.code.modules if (place := folder / name).is_dir()]
    added += [str(place) for folder in folders if (place := folder / MODULES_FOLDER).is_dir()]
    sys.path.extend(added)
    try:
        yield
    finally:
        for entry in added:
            sys.path.remove(entry)


def shipped_modules(config: Config, folder: Path) -> dict[str, Path]:
    """Return the files of `module_files` by their path in the shipped code; none if the config names nothing in them.

    A run without modules of the user's own stays the same run, whatever else is in the folder.
    """
    is_trainer = config.program.kind == "trainer"
    if not (references(config) if is_trainer else [*trainer_references(config)]):
        return {}
    return {
        f"{MODULES_FOLDER if is_trainer else TRACKERS_FOLDER}/{name}": path
        for name, path in module_files(config, folder).items()
    }


def meant_module(module: str, files: Iterable[str]) -> str:
    """Return which module was meant by a name that none has, or where else its file lies; empty if nobody knows.

    files: names of the files of `code.modules`, relative to its folders.
    """
    stem = module.removesuffix(".py").lower()
    names = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in sorted(files)}
    same = [name for name in names if stem.rpartition(".")[2] == name.lower().rpartition(".")[2]]
    outside = module.removesuffix(".py").replace(".", "/")
    if not same:
        if (inside := Path(DEFAULT_FOLDER, f"{outside}.py")).is_file():
            return f"{inside} is not among them: code.exclude leaves it out, or code.modules lacks {DEFAULT_FOLDER}"
        is_file = Path(f"{outside}.py").is_file()
        if is_file or any(Path(outside).glob("*.py")):
            bare = ", and name it without .py" if module.endswith(".py") else ""
            return (
                f"{outside}{'.py' if is_file else '/'} lies outside of code.modules; move it to {DEFAULT_FOLDER}/{bare}"
            )
    near = same or difflib.get_close_matches(stem, [*names, *locked_packages()], n=1, cutoff=0.8)
    return f"did you mean {near[0]}?" if near else ""


def lacking_imports(source: Path | str, folder: Path, *, locked: bool) -> Iterator[str]:
    """Yield each package that a program's file or text imports and the workers lack, and what was meant or cures it.

    folder: where its imports begin. locked: as of `absent_imports`.
    """
    lacking = "this machine, whose packages the workers have, has no such package"
    lacking = "env.packages=lock does not install it; name it in env.requirements" if locked else lacking
    for absent, module in absent_imports(source, files := modules_in(folder), locked=locked):
        hint = re.sub("^.* lies outside .*", "", meant_module(module, files))
        yield "; ".join(filter(None, [f"{absent}, and {lacking}", hint]))


def absent_imports(source: Path | str, files: Mapping[str, Path], *, locked: bool) -> Iterator[tuple[str, str]]:
    """Yield each package that a module of the user's own imports and the workers lack: the line's words, its name.

    Only what is imported in any case: at the top level of the module, and of further ones of the user's own.

    Args:
        source: one of `files`, which are as from `module_files`, or the text behind -c.
        files: modules of the user's own, by their places.
        locked: whether workers have what env.packages=lock installs; else they have this machine's packages.
    """
    seen, left = {source}, [source]
    known = {"__main__", *OURS, *sys.stdlib_module_names, *(locked_packages() if locked else ())}
    while left:
        source = left.pop()
        try:
            tree = ast.parse(source) if isinstance(source, str) else syntax_tree(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # `find_signature` reports it
        for node in tree.body:
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                modules = [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for module in modules:
                top, relative = module.partition(".")[0], module.replace(".", "/")
                own = {files[name] for name in (f"{relative}.py", f"{relative}/__init__.py") if name in files}
                left += own - seen
                seen |= own
                if own or top in known or any(name.startswith(f"{top}/") for name in files):
                    continue
                if locked or not is_importable(top):
                    yield f"{'-c' if isinstance(source, str) else source}, line {node.lineno}: imports {top}", top


def syntax_tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file that Python can compile.

    Raises:
        SyntaxError: it cannot; some errors, such as two parameters of one name, only the compiler finds.
        ValueError, RecursionError, MemoryError: there is a null byte, or it is nested too deeply.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    with warnings.catch_warnings(action="ignore"):
        compile(tree, str(path), "exec", dont_inherit=True)
    return tree


def is_importable(module: str) -> bool:
    """Return whether this machine has a module of that name."""
    try:
        return module != "__main__" and importlib.util.find_spec(module) is not None
    except ValueError:  # of a module without a file of its own
        return False


def taken_names(files: Mapping[str, Path]) -> Iterator[tuple[Path, str]]:
    """Yield the files whose module would not be found, because another of that name comes first, and that other."""
    seen: set[str] = set()
    for relative, path in files.items():
        top = Path(relative).parts[0].removesuffix(".py")
        if top in seen:
            continue
        seen.add(top)
        if top in OURS or top in sys.stdlib_module_names:
            yield path, "Slipway" if top in OURS else "Python's standard library"
        elif top in locked_packages():
            yield path, f"the package {top}"


def lock_text() -> str:
    """Return the requirements that env.packages=lock installs."""
    return (Path(conf.__file__).parent / "requirements.txt").read_text()


def locked_packages() -> set[str]:
    """Return the import names of the packages that env.packages=lock installs."""
    lines = lock_text().splitlines()
    return {line.partition("==")[0].replace("-", "_").lower() for line in lines if line[:1].isalnum()} | OTHER_NAMES


def modules_in(folder: Path) -> dict[str, Path]:
    """Return the modules that a program finds in a folder, by their path; of a folder without `__init__.py`, `NAME/`.

    As much as `absent_imports` has to know.
    """
    found = {f"{path.name}/": path for path in folder.iterdir() if path.is_dir()}
    found |= {path.name: path for path in folder.glob("*.py")}
    return found | {f"{path.parent.name}/{path.name}": path for path in folder.glob("*/__init__.py")}
