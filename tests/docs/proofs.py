"""The tests that documents name: whether they exist, are collected, and run on every machine.

As a plugin of pytest (`-p tests.docs.proofs`) it prints a line of JSON for each collected test: its id, and what may
skip it.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.groups import load_yaml
from tests.paths import ROOT

NAMED = re.compile(r"(?P<path>\btests/[\w/]+\.py)(?:::(?P<test>\w+))?|`(?P<sibling>test_\w+\.py)`")
SKIPS = re.compile(r"(?:importorskip\(\"(?P<package>\w+)|pytest\.skip\()")
EVERYWHERE = {
    "who leaves the process group is found in /proc",
    "limits of other processes are a thing of Linux",
    "processes are told apart by /proc",
    "needs bash",
}
"""Reasons of skips that do not hold on the machines of CI."""


def named_in(text: str) -> list[str]:
    """Return the tests and files that a line names; a file without a folder lies beside the one before, or anywhere."""
    found: list[str] = []
    folder = ""
    for name in NAMED.finditer(text):
        if name["sibling"] and not folder:
            found += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob(name["sibling"]))]
            continue
        path = name["path"] or f"{folder}/{name['sibling']}"
        folder = path.rpartition("/")[0]
        if Path(path).name.startswith("test_"):
            found.append(f"{path}::{name['test']}" if name["test"] else path)
    return found


def rows() -> dict[str, list[str]]:
    """Return what each row of guides.yaml and of a page's tables, and each line of its prose, names.

    The keys are `docs/guides.yaml 0.1`, `docs/reliability.md row 10` and `docs/grpo.md:20`.
    """
    guides = load_yaml(ROOT / "docs" / "guides.yaml")
    found = {
        f"docs/guides.yaml {name}": [guides["tests"][test] for test in row["tests"]]
        for name, row in guides["rows"].items()
        if "tests" in row
    }
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in sorted(pages):
        lines = page.read_text().splitlines() if page.name != "guides.md" else []  # made of guides.yaml
        for number, line in enumerate(lines, 1):
            before = "" if line.startswith("|") else lines[number - 2]
            if named := named_in(f"{before}\n{line}")[len(named_in(before)) :]:
                found[f"{page.relative_to(ROOT)}{' row ' if line.startswith('|') else ':'}{number}"] = named
    return found


@cache
def functions_of(file: str) -> set[str]:
    """Return the names of the tests in a file; none if there is no such file."""
    path = ROOT / file
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def exists(named: str) -> bool:
    file, _, test = named.partition("::")
    return test in functions_of(file) if test else bool(functions_of(file))


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        assert isinstance(item, pytest.Function)
        print(json.dumps([item.nodeid.partition("[")[0], [*dict.fromkeys(_what_may_skip(item))]]))


def _what_may_skip(item: pytest.Function) -> list[str]:
    """Return why a test may not run, or not count: by its marks, and the code of it, its fixtures and its module."""
    marks = [mark for mark in item.iter_markers() if mark.name in ("skip", "skipif", "xfail")]
    found = [str(mark.kwargs.get("reason", mark.name)) for mark in marks]
    fixtures: dict[str, Any] = item._fixtureinfo.name2fixturedefs
    code: list[Callable[..., object]] = [item.function, *(each.func for defs in fixtures.values() for each in defs)]
    texts = [inspect.getsource(inspect.unwrap(function)) for function in code]
    texts += [line for line in inspect.getsource(item.module).splitlines() if line[:1].strip()]
    for skip in (skip for text in texts for skip in SKIPS.finditer(text)):
        if skip["package"] not in _dependencies():
            found.append(f"{skip['package'] or 'pytest.skip'}: {item.name}")
    return [reason for reason in found if reason not in EVERYWHERE]


@cache
def _dependencies() -> set[str | None]:
    """Return the packages that `pip install -e '.[dev]'` names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return {Requirement(line).name.lower().replace("-", "_") for line in lines}
