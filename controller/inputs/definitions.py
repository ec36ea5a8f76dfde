"""What a module defines, read from its syntax: which statement, in whichever module, and how it is called.

Nothing is imported here: modules may need JAX, which the controller does not load.
"""

import ast
import builtins
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from controller.core.text import nearest_names
from controller.inputs.modules import OURS, lock_text, locked_packages, meant_module, syntax_tree

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
MAKERS = frozenset(
    {"globals", "exec", "eval", "vars", "locals", "setattr", "builtins", "modules", "import_module", "__import__"}
    | {"__dict__", "__globals__", "__builtins__", "f_globals", "FunctionType"}
)
"""With one of these a module may give itself names that no statement shows."""
CATCHING = frozenset({"NameError", "Exception", "BaseException"})
OTHER_PYTHONS = frozenset({"TYPE_CHECKING", "version_info", "PY2", "PY3"})
"""What is asked before names are used that this Python may lack."""


class _Default:
    """Stands for a parameter's default, which is not evaluated."""

    def __repr__(self) -> str:
        return "…"


DEFAULT = _Default()


class DefinitionError(ValueError):
    """A module or a name in it does not exist, or cannot be used; the message says which."""


@dataclass(frozen=True)
class Definition:
    """A statement that defines a name, among all that its module defines."""

    name: str
    node: ast.stmt
    among: Mapping[str, ast.stmt]
    own: Path | None = None
    """File of the module, if it is one of the user's."""


def undefined_name(found: Definition) -> str:
    """Return the name that a definition, or what it uses of its module, reads and nobody defines, with its line.

    Empty if there is none, or in doubt: names may come from `from module import *`, or the module uses what makes some.
    """
    if found.own is None:
        return ""
    tree = parse(found.own)
    if {"*", *MAKERS} & {*_words(tree)}:
        return ""
    made = [child for node in tree.body for child in ([node] if isinstance(node, NAMED) else ast.walk(node))]
    among = {child.name: child for child in made if isinstance(child, NAMED)}
    outside = {name for node in tree.body for name in ([node.name] if isinstance(node, NAMED) else _bound(node))}
    for node in ast.walk(tree):  # a walrus may be in a default of a function
        outside |= {*node.names} if isinstance(node, ast.Global) else set()
        outside |= {*_bound(node.target)} if isinstance(node, ast.NamedExpr) else set()
    todo = [found.name]
    for definition in todo:  # it grows
        body = among[definition].body if definition in among else []
        inside = {*_bound(among[definition])} if body else set[str]()
        read = sorted((name for name in _read(body) if name.id not in inside), key=lambda name: name.lineno)
        for name in read:
            if name.id in outside or name.id in vars(builtins) or name.id.startswith("__") or name.id == "_":
                continue
            near = get_close_matches(name.id, inside | outside, n=1)
            cure = f"import {name.id}" if name.id in sys.stdlib_module_names else "import or define it"
            cure = f"did you mean {near[0]}?" if near and cure[-2:] == "it" else cure
            return f"uses {name.id} in line {name.lineno}, which is defined nowhere; {cure}"
        todo += dict.fromkeys(name.id for name in read if name.id not in todo)
    return ""


def _words(tree: ast.AST) -> Iterator[str]:
    """Yield the names, attributes and imports in a syntax tree."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word):
                yield word
            case ast.alias(name=words):
                yield from words.split(".")
            case _:
                pass


def _bound(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a syntax tree gives a meaning in any of its scopes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.MatchMapping(rest=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name.partition(".")[0]
            case _ if isinstance(name := getattr(node, "name", None), str):  # def, class, except, case, type parameter
                yield name
            case _:
                pass


def _read(body: Iterable[ast.AST]) -> Iterator[ast.Name]:
    """Yield the names that statements read. Not those of annotations, nor where a NameError may be caught."""
    todo = [*body]
    for node in todo:  # it grows
        skipped = {"annotation", "returns"}
        match node:
            case ast.Name(ctx=ast.Load()):
                yield node
            case ast.Try() | ast.TryStar() if any(map(_may_catch, node.handlers)):
                skipped |= {"body"}
            case ast.With() if CATCHING & {word for item in node.items for word in _words(item)}:
                skipped |= {"body"}
            case ast.If() if OTHER_PYTHONS & {*_words(node.test)}:
                skipped |= {"body", "orelse"}
            case _:
                pass
        for field, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            todo += [child for child in children if isinstance(child, ast.AST) and field not in skipped]


def _may_catch(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler may catch a NameError. An attribute, as json.JSONDecodeError, is another error."""
    for kind in handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]:
        error = vars(builtins).get(kind.id) if isinstance(kind, ast.Name) else None
        is_other = isinstance(error, type) and not issubclass(NameError, error)
        if not is_other and not isinstance(kind, ast.Attribute):
            return True
    return False


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file. Raises DefinitionError if it is no Python."""
    try:
        return syntax_tree(path)
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else " is no Python"
        raise DefinitionError(f"{path}{where}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # such as a null byte; nested too deeply
        raise DefinitionError(f"{path} is no Python: {error}") from None


def find_definition(reference: str, files: Mapping[str, Path], *, installed: bool) -> Definition | None:
    """Return what defines the name of `module:name`, in whichever module that is; None if only an import could tell.

    Args:
        reference: `module:name`.
        files: as from `module_files`.
        installed: whether the program uses this machine's Python packages.

    Raises:
        DefinitionError: there is no such module or name, or the module cannot be imported.
    """
    module, _, name = reference.partition(":")
    return _Finder(files, installed).find(module, name, frozenset())


def find_signature(
    reference: str, files: Mapping[str, Path], *, installed: bool, of_class: bool = False
) -> inspect.Signature | None:
    """Return the signature of what `module:name` means; None if only an import could tell.

    `of_class`: return what a class is called with, if it is one; the rest as for `find_definition`.
    """
    found = find_definition(reference, files, installed=installed)
    return found and signature_of(found, of_class=of_class)


def signature_of(found: Definition, *, of_class: bool = False) -> inspect.Signature | None:
    """Return the signature of a definition; None if only an import could tell."""
    if isinstance(found.node, ast.ClassDef):
        return _class_signature(found.node) if of_class else None
    value = getattr(found.node, "value", None)
    if isinstance(value, ast.Lambda) and isinstance(found.node, ast.Assign | ast.AnnAssign):
        return _signature(value.args)
    if isinstance(found.node, FUNCTION) and not found.node.decorator_list:
        return _signature(found.node.args)
    return None


@dataclass(frozen=True)
class _Finder:
    files: Mapping[str, Path]
    installed: bool

    def find(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> Definition | None:
        path = self.source(module)
        if path is None or (module, name) in seen:
            return None
        tree, is_own = parse(path), path in self.files.values()
        if is_own:
            self._require_imports(module, path, tree)
        if not is_own and not self._is_of_workers(module.partition(".")[0]):
            return None
        defined = {defined: node for node in tree.body for defined in defined_names(node)}
        seen |= {(module, name)}
        if name not in defined:
            return self._elsewhere(module, name, path, defined, seen)
        node = defined[name]
        if isinstance(node, ast.ImportFrom):
            alias = next(each for each in node.names if (each.asname or each.name) == name)
            return self._followed(_target(node, module, path), alias.name, seen)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in defined:
            return self.find(module, node.value.id, seen) if node.value.id != name else None
        return Definition(name, node, defined, path if is_own else None)

    def source(self, module: str) -> Path | None:
        """Return the file of a module; None if it is in a package whose files only an import could find."""
        relative = module.replace(".", "/")
        for name in (f"{relative}.py", f"{relative}/__init__.py"):
            if name in self.files:
                return self.files[name]
        top, _, rest = module.partition(".")
        inside = rest.replace(".", "/")
        if rest and {f"{inside}.py", f"{inside}/__init__.py"} & self.files.keys():
            raise DefinitionError(f"no module {module}: the folders of code.modules are no packages; use {rest}:NAME")
        known = top in OURS or top in sys.stdlib_module_names or top in locked_packages()
        meant = meant_module(module, self.files).replace("?", ":NAME?")
        absent = f"no module {module} in the folders of code.modules"
        if not known and not self.installed:
            names = ", ".join(sorted(name.removesuffix(".py") for name in self.files))
            there = f"modules there: {names}" if names else "there are none"
            raise DefinitionError(f"{absent}, which are shipped; {meant or there}")
        spec = None if top == "__main__" else importlib.util.find_spec(top)
        if spec is None and known and not self.installed:
            return None  # in the lock, and not on a laptop that only launches
        if spec is None:
            raise DefinitionError(f"{absent}; {meant}" if meant else f"{absent}, and no package {top} is installed")
        if not rest:
            return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
        for place in spec.submodule_search_locations or ():
            for name in (f"{inside}.py", f"{inside}/__init__.py"):
                if (Path(place) / name).is_file():
                    return Path(place) / name
        if top in OURS:
            raise DefinitionError(f"{top} has no module {rest}")
        return None

    def _is_of_workers(self, top: str) -> bool:
        """Return whether the workers have a package as it is here: all of this machine's, or the lock's version."""
        if self.installed or top in OURS or top in sys.stdlib_module_names:
            return True
        try:
            return f"\n{top}=={version(top)} " in f"\n{lock_text()}"
        except PackageNotFoundError:
            return False

    def _elsewhere(
        self, module: str, name: str, path: Path, defined: Mapping[str, ast.stmt], seen: frozenset[tuple[str, str]]
    ) -> Definition | None:
        """Look for a name in what a module imports with `*`. Raises DefinitionError if it is nowhere."""
        is_unknown = "__getattr__" in defined and _may_be_made(name, path, defined)
        for node in [node for key, node in defined.items() if key.startswith("*") and isinstance(node, ast.ImportFrom)]:
            target = _target(node, module, path)
            try:
                if (found := self.find(target, name, seen)) is not None:
                    return found
                is_unknown = True
            except DefinitionError as error:
                if "defines no" not in str(error):
                    is_unknown = True
        if is_unknown:
            return None
        own = [n for n, node in defined.items() if isinstance(node, ast.FunctionDef | ast.ClassDef) and n[0] != "_"]
        if path not in self.files.values():
            own = nearest_names(name, {n for n in defined if n[0] not in "_*"}).split(", ")
        raise DefinitionError(f"{path} defines no {name}; it defines {', '.join(filter(None, own)) or 'no function'}")

    def _followed(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> Definition | None:
        try:
            return self.find(module, name, seen)
        except DefinitionError:
            if self._is_own(module):
                raise
            return None  # what a package leaves to an import, or `absent_imports` reports

    def _is_own(self, module: str) -> bool:
        relative = module.replace(".", "/")
        return bool({f"{relative}.py", f"{relative}/__init__.py"} & self.files.keys())

    def _require_imports(self, module: str, path: Path, tree: ast.Module) -> None:
        """Raise DefinitionError for an import of a module of the user's own that cannot work."""
        for node in tree.body:
            if not isinstance(node, ast.ImportFrom):
                continue
            target = _target(node, module, path)
            if not self._is_own(target) or target == module:
                if node.level and not any(name.startswith(f"{target.replace('.', '/')}/") for name in self.files):
                    raise DefinitionError(f"{path}, line {node.lineno}: there is no module {target}")
                continue
            inner = self.source(target)
            known = {n for statement in parse(inner).body for n in defined_names(statement)} if inner else set[str]()
            if inner is None or "__getattr__" in known or any(n.startswith("*") for n in known):
                continue
            for alias in node.names:
                if alias.name not in {*known, "*"} and not self._is_own(f"{target}.{alias.name}"):
                    raise DefinitionError(f"{path}, line {node.lineno}: {target} defines no {alias.name}")


def _target(node: ast.ImportFrom, module: str, path: Path) -> str:
    """Return the module from which a statement imports. Raises DefinitionError if it has no such parent."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    package = parts if path.name == "__init__.py" else parts[:-1]
    if len(package) < node.level:
        written = f"from {node.module} import …" if node.module else "import …"
        dots = "." * node.level
        raise DefinitionError(
            f"{path}, line {node.lineno}: `from {dots}{node.module or ''} import …` needs a package around {module}, "
            f"which has none; write `{written}`"
        )
    above = package[: len(package) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _may_be_made(name: str, path: Path, defined: Mapping[str, ast.stmt]) -> bool:
    """Return whether `__getattr__` may make a name: the module lists none, or names it somewhere."""
    written = re.search(rf"\b{re.escape(name)}\b", path.read_text("utf-8", "replace"))
    return "__all__" not in defined or written is not None


def defined_names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module's body may define; `*MODULE` stands for all of a module."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            yield f"*{'.' * node.level}{node.module or ''}"
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
        case ast.Assign(targets=targets):
            yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
            for child in ast.iter_child_nodes(node):
                for statement in [child] if isinstance(child, ast.stmt) else getattr(child, "body", ()):
                    yield from defined_names(statement)
        case _:
            pass


def _class_signature(node: ast.ClassDef) -> inspect.Signature | None:
    """Return the signature with which a class that derives from no other is called; None as in `signature_of`."""
    if node.decorator_list or node.bases or node.keywords:
        return None
    made = [n for n in node.body if isinstance(n, FUNCTION) and n.name == "__init__"]
    return signature_of_method(made[-1]) if made else inspect.Signature()


def signature_of_method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature | None:
    """Return the signature of a method without its object; None as in `signature_of`."""
    if node.decorator_list:
        return None
    found = _signature(node.args)
    return found.replace(parameters=[*found.parameters.values()][1:])


def _signature(given: ast.arguments) -> inspect.Signature:
    made, empty = list[inspect.Parameter](), inspect.Parameter.empty
    plain = [*((a, inspect.Parameter.POSITIONAL_ONLY) for a in given.posonlyargs)]
    plain += [(a, inspect.Parameter.POSITIONAL_OR_KEYWORD) for a in given.args]
    first_default = len(plain) - len(given.defaults)
    for i, (argument, kind) in enumerate(plain):
        made.append(inspect.Parameter(argument.arg, kind, default=DEFAULT if i >= first_default else empty))
    if given.vararg:
        made.append(inspect.Parameter(given.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        value = empty if default is None else DEFAULT
        made.append(inspect.Parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default=value))
    if given.kwarg:
        made.append(inspect.Parameter(given.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(made)
