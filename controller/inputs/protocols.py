"""Whether what a config names as `module:name` fits the protocol of its kind: its form, its methods, what it returns.

By the Protocols of `conf.extension` alone, so that a new kind is judged too.
"""

import ast
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType, NoneType, UnionType
from typing import Any

from conf.environment import Environment
from conf.extension import PROTOCOLS, ModelFamily, OwnStep, TrackedRun, call_problem
from controller.inputs.definitions import FUNCTION, Definition, signature_of, signature_of_method, undefined_name

CLASSES: Mapping[str, type] = {
    "environment": Environment,
    "resource kind": OwnStep,
    "model family": ModelFamily,
    "tracker": TrackedRun,
}
"""Kinds that are classes, by what their objects must have."""
OPTIONAL = frozenset({"apis"})
"""Attributes that may be left out."""
PLAIN_BASES = frozenset({"object", "ABC", "Protocol", "Generic"})
"""Bases that bring no methods."""
BUILTINS: Mapping[str, type] = {
    **{each.__name__: each for each in (str, bytes, int, float, bool, list, dict, tuple, set)},
    **{"List": list, "Dict": dict, "Tuple": tuple, "Set": set, "None": NoneType, "repr": str},
}
LITERALS: Mapping[type[ast.expr], type] = {
    **{ast.List: list, ast.ListComp: list, ast.Tuple: tuple, ast.Set: set, ast.SetComp: set},
    **{ast.Dict: dict, ast.DictComp: dict, ast.JoinedStr: str, ast.GeneratorExp: GeneratorType},
}
OF_TEXTS = frozenset({"format", "join", "strip", "lower", "upper", "replace"})
"""Methods of a text that return one."""
OF_TRL = frozenset({"prompts", "completions"})
"""Names of what TRL gives its reward functions: lists. https://huggingface.co/docs/trl/grpo_trainer."""
FOREIGN_REWARDS: Mapping[tuple[str, ...], str] = {
    ("prompts", "completions"): "TRL",
    **dict.fromkeys((("data_source", "solution_str"), ("data_sources", "solution_strs")), "verl"),
    ("queries", "prompts"): "OpenRLHF",
    ("task_info", "action"): "rLLM",
}
"""First two parameters of the rewards of other tools, which mean none of ours.

https://verl.readthedocs.io/en/latest/preparation/reward_function.html, https://github.com/OpenRLHF/OpenRLHF,
https://www.mintlify.com/rllm-org/rllm/guides/reward-functions
"""
OF_ANSWER = frozenset({"answer", "label", "target", "ground_truth", "solution", "reference", "gold"})


def misfit(found: Definition, kind: str, options: Iterable[str], reference: str = "") -> str:
    """Return why what a module defines cannot be used as this kind with these options; empty if it may be."""
    signature = signature_of(found, of_class=True)
    form = "" if kind == "check" else _form_problem(found, kind)  # `own_check` calls those
    is_function = isinstance(found.node, FUNCTION) and kind != "model family"
    call = call_problem(signature, kind, options, reference) if signature is not None else ""
    if is_function and next(iter(signature.parameters if signature else ()), "") == "self":
        return "takes self, which is for methods; remove it"
    if kind == "reward" and signature is not None and (foreign := foreign_reward(signature)):
        return foreign
    return (call or form if is_function else form or call) or undefined_name(found)


def _form_problem(found: Definition, kind: str) -> str:
    """Return why what a module defines is nothing of this kind, whatever it is called with."""
    node = found.node
    if isinstance(node, ast.ClassDef):
        return _class_problem(found, node, kind)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        is_called = _literal(node.value) in (None, NoneType)
        return "" if is_called else f"is {ast.unparse(node.value or node)[:40]}, which cannot be called"
    if isinstance(node, ast.Import):
        return "is a module, which cannot be called" if kind != "model family" else ""
    if not isinstance(node, FUNCTION):
        return ""
    if kind == "model family":
        return "is a function; it must be a class without arguments, or an object, with weights and forward"
    wanted = _returned(PROTOCOLS[kind].__call__) if kind not in CLASSES else Any
    return _function_problem(node, wanted, is_plain=not node.decorator_list)


def foreign_reward(signature: inspect.Signature) -> str:
    """Return what a reward is called with that is written for another tool; empty if it is for none that is known."""
    names = (*signature.parameters,)
    tool = FOREIGN_REWARDS.get(names[:2], "")
    return f"is called with (response, answer), each a text, not with {tool}'s ({', '.join(names)})" if tool else ""


def caution(found: Definition, kind: str) -> str:
    """Return what is probably wrong with what a module defines, and is not certain; else empty."""
    node = found.node
    if kind not in CLASSES and isinstance(node, ast.FunctionDef) and not node.decorator_list:
        own, wanted = [*_own_nodes(node)], _returned(PROTOCOLS[kind].__call__)
        returns = any(isinstance(each, ast.Return) and each.value for each in own)
        yields = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in own)
        if returns and not yields and not _fits(NoneType, wanted) and not _ends(node.body):
            return f"returns nothing where it gets to its end; it must return {_words(wanted)}"
    return _reward_caution(found) if kind == "reward" else ""


def _ends(body: Sequence[ast.stmt]) -> bool:
    """Return whether statements always return or raise, as far as their form says; what may is taken to."""
    match body[-1] if body else None:
        case ast.If(body=then, orelse=other):
            return _ends(then) and _ends(other)
        case ast.With(body=inner):
            return _ends(inner)
        case ast.Try(body=inner, handlers=handlers, orelse=other, finalbody=last):
            return _ends(last) or (_ends(other or inner) and all(_ends(each.body) for each in handlers))
        case ast.Expr(value=ast.Call(func=called)):
            return "exit" in _name(called) or "fail" in _name(called)
        case ast.Return() | ast.Raise() | ast.While() | ast.Match() | ast.Assert():
            return True
        case _:
            return False


def _reward_caution(found: Definition) -> str:
    """Return what a reward is called with, if the names of its parameters say another thing; else empty."""
    signature = signature_of(found)
    names = [*(signature.parameters if signature else ())][:2]
    if OF_TRL & {*names}:
        return "is called with (response, answer), one at a time, not with TRL's lists"
    if len(names) == 2 and names[0] in OF_ANSWER and names[1] not in OF_ANSWER:
        return f"is called with (response, answer) in this order, and calls them ({', '.join(names)})"
    return ""


def _class_problem(found: Definition, node: ast.ClassDef, kind: str) -> str:
    protocol = CLASSES.get(kind)
    is_known = not node.keywords and all(_name(each) == "dataclass" for each in node.decorator_list)
    members, lone = _members(node, found.among, set())
    if protocol is None:
        wanted = _returned(PROTOCOLS[kind].__call__)
        origin = typing.get_origin(wanted) or wanted
        if not (is_known and lone) or origin is NoneType:
            return ""
        if kind == "policy loss":
            return "is a class; derive it from trainer.losses.policy.PolicyLoss, or write a function"
        needed = {Sequence: ["__len__", "__getitem__"], Iterable: ["__iter__"]}.get(origin, [])
        if kind == "optimizer rule":
            needed = ["init", "update"]
        absent = [name for name in needed if name not in members]
        return "is a class; it must be a function" if not needed or absent == needed else ""
    names = [name for name in vars(protocol) if not name.startswith("_")] + [*protocol.__annotations__]
    absent = [name for name in dict.fromkeys(names) if name not in members and name not in OPTIONAL]
    if absent and is_known and lone:
        return f"has no {', '.join(absent)}"
    for name in names:
        wanted, method = getattr(protocol, name, None), members.get(name)
        if not isinstance(method, FUNCTION) or not inspect.isfunction(wanted):
            continue
        arguments = [*inspect.signature(wanted).parameters][1:]
        if (signature := signature_of_method(method)) is not None:
            try:
                signature.bind(*arguments)
            except TypeError as error:
                return f"has {name}{signature}, which is called as ({', '.join(arguments)}): {error}"
        if problem := _function_problem(method, _returned(wanted), is_plain=not method.decorator_list):
            return f"has {name}, which {problem}"
    return ""


def _members(node: ast.ClassDef, among: Mapping[str, ast.stmt], seen: set[str]) -> tuple[dict[str, ast.AST], bool]:
    """Return what objects of a class have, and whether all of its bases are known."""
    members, lone = dict[str, ast.AST](), True
    for base in node.bases:
        name = _name(base)
        above = among.get(name)
        if isinstance(above, ast.ClassDef) and name not in seen:
            theirs, known = _members(above, among, seen | {node.name, name})
            members |= theirs
            lone &= known
        elif name not in PLAIN_BASES:
            lone = False
    for statement in node.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                members[name] = statement
            case ast.Assign(targets=targets):
                members |= {n.id: statement for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                members[name] = statement
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.Expr(value=ast.Call()):
                lone = False
            case _:
                pass
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _name(inner.value) == "self":
            members.setdefault(inner.attr, inner)
        if isinstance(inner, ast.FunctionDef) and inner.name in ("__getattr__", "__getattribute__"):
            lone = False
    return members, lone


def _function_problem(node: ast.FunctionDef | ast.AsyncFunctionDef, wanted: Any, *, is_plain: bool) -> str:
    """Return why a function cannot return what is wanted, a type; empty if it may."""
    if not is_plain:
        return ""
    if isinstance(node, ast.AsyncFunctionDef):
        return "is async, and nobody awaits it; write def"
    own = [*_own_nodes(node)]
    returned = [each.value for each in own if isinstance(each, ast.Return)]
    if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in own):
        return "" if _fits(GeneratorType, wanted) else f"yields; it must return {_words(wanted)}"
    if wanted is NoneType:
        return ""
    written = _annotated(node.returns)
    if written and not any(_fits(each, wanted) for each in written):
        return f"says that it returns {ast.unparse(node.returns or node)}; it must return {_words(wanted)}"
    if not any(value is not None for value in returned):
        ends = isinstance(node.body[-1], ast.Raise | ast.With | ast.Try | ast.While | ast.Match)
        return "" if ends else f"returns nothing; it must return {_words(wanted)}"
    for value, literal in [(each, kind) for each in returned for kind in _outcomes(each, node)]:
        if literal is not None and not _fits(literal, wanted):
            line = node.lineno if value is None else value.lineno
            shown = "nothing" if literal is NoneType else f"a {literal.__name__}"
            return f"returns {shown} in line {line}; it must return {_words(wanted)}"
    return ""


def _outcomes(value: ast.expr | None, function: FUNCTION) -> list[type | None]:
    """Return the type of each branch of what a function returns; None for one that is not known."""
    match value:
        case None:
            return [NoneType]
        case ast.IfExp(body=body, orelse=orelse):
            return [*_outcomes(body, function), *_outcomes(orelse, function)]
        case ast.BoolOp(values=[*_, last]):
            return _outcomes(last, function)
        case ast.Name(id=name) if name not in {getattr(each, "arg", "") for each in ast.walk(function.args)}:
            own = [*_own_nodes(function)]
            named = [each for each in own if isinstance(each, ast.Name) and each.id == name]
            stored = [each for each in named if not isinstance(each.ctx, ast.Load)]
            plain = [each.value for each in own if isinstance(each, ast.Assign) and each.targets[0] in stored]
            kinds = {*map(_literal, plain)}
            return [*kinds] if len(kinds) == 1 and len(plain) == len(stored) else []
        case _:
            return [_literal(value)]


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a function, without the functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        yield child
        yield from _own_nodes(child)


def _returned(function: Callable[..., Any]) -> Any:
    """Return the type that a method of a Protocol returns."""
    return typing.get_type_hints(function).get("return", Any)


def _fits(kind: type, wanted: Any) -> bool:
    """Return whether an object of a built-in type may be what is wanted."""
    if typing.get_args(wanted) and typing.get_origin(wanted) not in (Mapping, Sequence, Iterable, tuple):
        return any(_fits(kind, each) for each in typing.get_args(wanted))  # a union
    origin = typing.get_origin(wanted) or wanted
    if origin is Any:
        return kind not in (str, bytes, dict, set, NoneType)
    if origin is float:
        return kind in (float, int, bool)
    if origin in (Sequence, Iterable):
        return issubclass(kind, origin) and not issubclass(kind, str | bytes | Mapping)
    return isinstance(origin, type) and issubclass(kind, origin)


def _words(wanted: Any) -> str:
    """Return what is wanted, in words."""
    origin = typing.get_origin(wanted) or wanted
    told: dict[Any, str] = {
        float: "a number",
        str: "a text",
        Mapping: "values by their names",
        Any: "an array or another object",
    }
    told |= {
        Sequence: "a sequence",
        Iterable: "an iterable",
        tuple: f"({', '.join(map(_words, typing.get_args(wanted)))})",
    }
    if origin in (UnionType, typing.Union):
        return " or ".join(map(_words, typing.get_args(wanted)))
    return told.get(origin, getattr(origin, "__name__", str(origin)))


def _annotated(node: ast.expr | None) -> list[type]:
    """Return the built-in types that an annotation names; nothing if it names another."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            node = ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return []
    if isinstance(node, ast.BinOp):
        left, right = _annotated(node.left), _annotated(node.right)
        return [*left, *right] if left and right else []
    if isinstance(node, ast.Constant) and node.value is None:
        return [NoneType]
    found = BUILTINS.get(_name(node.value if isinstance(node, ast.Subscript) else node))
    return [found] if found else []


def _literal(node: ast.expr | None) -> type | None:
    """Return the type of a literal; None if it is no literal."""
    if isinstance(node, ast.Constant):
        return type(node.value) if node.value is not ... else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return BUILTINS.get(node.func.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # "{}".format(…), ", ".join(…)
        return str if _literal(node.func.value) is str and node.func.attr in OF_TEXTS else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        parts = [node.left] if isinstance(node.op, ast.Mod) else [node.left, node.right]
        return str if str in map(_literal, parts) else None
    return LITERALS.get(type(node)) if node is not None else None


def _name(node: ast.AST | None) -> str:
    """Return the last part of a dotted name, also of one that is called or subscripted; empty if it is none."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _name(inner)
        case _:
            return ""
