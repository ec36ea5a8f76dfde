"""docs/security.md names a test for each of its claims; they are there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.paths import ROOT

NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/security.md").read_text())))


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_defence_names_one() -> None:
    page = (ROOT / "docs/security.md").read_text()
    defended = page.partition("## What is defended")[2].partition("## What is not defended")[0]
    claims = [claim for claim in defended.split("\n\n") if claim.startswith("**")]
    assert len(claims) >= 10
    assert [claim[:40] for claim in claims if "::test_" not in claim] == []
