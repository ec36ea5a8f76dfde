"""docs/checks.md, made from the checks themselves: `python -m controller.checks.page > docs/checks.md`."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from controller import resources
from controller.checks.preflight import modules

HEAD = """# Checks

<!-- Made by `python -m controller.checks.page`. Edit the checks, not this page. -->

`slipway plan` lists every finding, errors first. An error stops `up` before anything is created; a warning is shown; a
note tells what is not wrong. Those marked *live* ask Google, where there are credentials, and are asked again before a
pod is created. What cannot be looked at for want of a permission is a warning.
"""


@dataclass(frozen=True)
class Row:
    """One kind of finding: what the source of its check says of it."""

    name: str
    severity: str
    keys: tuple[str, ...]
    why: str
    live: bool


def rows(module: ModuleType) -> Iterator[Row]:
    """What a module of checks can find.

    Raises:
        ValueError: a check without docstring or finding, or whose id is not a plain string.
    """
    functions = {f.name: f for f in ast.parse(inspect.getsource(module)).body if isinstance(f, ast.FunctionDef)}
    for check in (*getattr(module, "CHECKS", ()), *getattr(module, "PROBES", ())):
        live = check in getattr(module, "PROBES", ())
        found: dict[str, Row] = {}
        for call in _findings(functions[check.__name__], functions):
            row = _row(call, " ".join((check.__doc__ or "").split()), live)
            before = found.get(row.name)
            found[row.name] = _merged(before, row) if before else row
        if not found or not check.__doc__:
            raise ValueError(f"{module.__name__}.{check.__name__}: a check has a docstring and yields a Finding")
        yield from found.values()


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for module in modules():
        listed = list(rows(module)) if hasattr(module, "CHECKS") or hasattr(module, "PROBES") else []
        if not listed:
            continue
        parts.append(f"\n## {' '.join((module.__doc__ or '').split())}\n\n| id | | key | why |\n|---|---|---|---|\n")
        for row in listed:
            live = ", *live*" if row.live else ""
            keys = ", ".join(f"`{key}`" if "." in key or " " not in key else key for key in row.keys)
            parts.append(f"| `{row.name}` | {row.severity}{live} | {keys} | {row.why.replace('|', '/')} |\n")
    parts.append("\n## Is what is there already as it should be? Asked of each thing, *live*\n\n")
    parts.append("| id | | key | says |\n|---|---|---|---|\n")
    parts += [f"| `{r.name}` | {r.severity} | `{r.keys[0]}` | {r.why.replace('|', '/')} |\n" for r in of_resources()]
    return "".join(parts)


def of_resources() -> Iterator[Row]:
    """What the resources' own `findings` say of an observed thing, in their words."""
    for found in pkgutil.walk_packages(resources.__path__, f"{resources.__name__}."):
        if found.ispkg:
            continue
        source = inspect.getsource(importlib.import_module(found.name))
        if "Finding(" not in source:
            continue
        for owner in ast.parse(source).body:
            if isinstance(owner, ast.ClassDef):
                yield from _of_class(owner)


def _of_class(owner: ast.ClassDef) -> Iterator[Row]:
    methods = {method.name: method for method in owner.body if isinstance(method, ast.FunctionDef)}
    for call in _findings(methods["findings"], {}) if "findings" in methods else ():
        words = call.args[3]
        before = [
            node.value
            for node in ast.walk(methods["findings"])
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.lineno < call.lineno
            and isinstance(words, ast.Name) and node.targets[0].id == words.id
        ]  # fmt: skip
        if before:
            words = max(before, key=lambda value: value.lineno)
        elif isinstance(words, ast.Call) and isinstance(words.func, ast.Attribute) and words.func.attr in methods:
            said = [node.value for node in ast.walk(methods[words.func.attr]) if isinstance(node, ast.Return)]
            words = said[0] or words
        row = _row(call, "", live=True)
        yield Row(row.name, row.severity, row.keys, " ".join((_text(words) or "").split()), live=True)


def _findings(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> Iterator[ast.Call]:
    """Where a function, or one of the module that it calls, makes a Finding."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "Finding":
                yield node
            elif node.func.id in functions and node.func.id != function.name:
                yield from _findings(functions[node.func.id], functions)


def _row(call: ast.Call, why: str, live: bool) -> Row:
    name, severity, key = (_text(argument) for argument in call.args[:3])
    if name is None:
        raise ValueError(f"the id of a Finding is a plain string, not {ast.unparse(call.args[0])}")
    return Row(name, severity or "error or warning", (key or "the one that is wrong",), why, live)


def _text(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
    return None


def _merged(one: Row, other: Row) -> Row:
    severity = " or ".join(sorted({*one.severity.split(" or "), *other.severity.split(" or ")}))
    return Row(one.name, severity, tuple(dict.fromkeys((*one.keys, *other.keys))), one.why, one.live)


if __name__ == "__main__":
    sys.stdout.write(page())
