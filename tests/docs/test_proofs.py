"""The tests that documents name as proof of what they say exist, and run wherever CI does."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.groups import load_yaml
from tests.paths import ROOT

NAMED = re.compile(r"(?P<path>\btests/[\w/]+\.py)(?:::(?P<test>\w+))?|`(?P<sibling>test_\w+\.py)`")
NIGHTLY = re.compile(r"^@pytest\.mark\.wide\b", re.MULTILINE)
SKIPS = re.compile(r"pytest\.(?:importorskip\(\"(?P<package>\w+)|(?:mark\.)?(?:skip|skipif|xfail)\b)")
EVERYWHERE = (
    "who leaves the process group is found in /proc",
    "limits of other processes are a thing of Linux",
    "processes are told apart by /proc",
    "needs bash",
)
"""Reasons of skips that do not hold on the machines of CI."""
DEPENDENCIES = (ROOT / "pyproject.toml").read_text()


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
        lines = page.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            before = "" if line.startswith("|") else lines[number - 2]
            if named := named_in(f"{before}\n{line}")[len(named_in(before)) :]:
                found[f"{page.relative_to(ROOT)}{' row ' if line.startswith('|') else ':'}{number}"] = named
    return found


@cache
def functions_of(file: str) -> dict[str, bool]:
    """Return the names of the tests in a file, and whether each always runs; none if there is no such file."""
    text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
    lines, functions, others = text.splitlines(), dict[str, str](), list[str]()
    for node in ast.parse(text).body:
        marks = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        code = "\n".join(lines[min(part.lineno for part in (*marks, node)) - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            functions[node.name] = code
        elif not isinstance(node, ast.FunctionDef):
            others.append(code)
    around = _may_skip("\n".join(others))
    return {name: not around and not _may_skip(code) for name, code in functions.items()}


def _may_skip(code: str) -> bool:
    found = [skip for skip in SKIPS.finditer(code) if not skip["package"] or skip["package"] not in DEPENDENCIES]
    return bool(NIGHTLY.search(code)) or (bool(found) and not any(reason in code for reason in EVERYWHERE))


def exists(named: str) -> bool:
    file, _, test = named.partition("::")
    return test in functions_of(file) if test else bool(functions_of(file))


def test_every_test_that_a_document_names_exists_and_one_of_each_row_runs_wherever_ci_does() -> None:
    """One that is skipped for want of a package, of data or of a device proves nothing by itself."""
    named_by = rows()
    assert len([row for row in named_by if row.startswith("docs/reliability.md")]) > 20
    assert len([row for row in named_by if row.startswith("docs/guides.yaml")]) > 200
    assert [(row, name) for row, named in named_by.items() for name in named if not exists(name)] == []
    assert not exists("tests/docs/test_proofs.py::test_that_is_not_there")
    tables = {row: named for row, named in named_by.items() if " " in row}  # prose may say where a test runs
    always = {f"{file}::{test}" for file in _files(tables) for test, runs in functions_of(file).items() if runs}
    always |= {name.partition("::")[0] for name in always}
    assert {row: named for row, named in tables.items() if not always.intersection(named)} == {}
    assert not any(functions_of("tests/scenarios/recovery/test_noticed.py").values()), "each night alone"
    assert "tests/trainer/fit/test_report.py::test_what_helps_is_found_on_a_chip_that_is_too_small" not in always


def _files(tables: dict[str, list[str]]) -> set[str]:
    return {name.partition("::")[0] for named in tables.values() for name in named}


def test_every_defence_of_the_security_page_names_one() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    defended = page.partition("## What is defended")[2].partition("## What is not defended")[0]
    claims = [claim for claim in defended.split("\n\n") if claim.startswith("**")]
    assert len(claims) >= 10
    assert [claim[:40] for claim in claims if "::test_" not in claim] == []
