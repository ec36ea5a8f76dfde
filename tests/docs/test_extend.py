"""docs/extend.md shows the files that the tests run, one for each kind."""

from __future__ import annotations

import re

import pytest

from conf.extension import PROTOCOLS
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "extend.md").read_text()
FILES = sorted((ROOT / "docs" / "extend").glob("*.py"))
TESTED = (
    ROOT / "tests" / "trainer" / "test_extension.py",
    ROOT / "tests" / "controller" / "checks" / "inputs" / "test_extensions.py",
    ROOT / "tests" / "controller" / "plan" / "test_own_steps.py",
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_is_on_the_page_short_and_run(file) -> None:
    text = file.read_text()
    assert f"```python\n# ./slipway/{file.name}\n{text}```\n" in PAGE
    assert len(text.splitlines()) <= 40
    assert any(f"{file.stem}:" in test.read_text() for test in TESTED)


def test_the_page_has_every_kind_and_no_other_example() -> None:
    shown = re.findall(r"# \./slipway/(\w+)\.py\n", PAGE)
    assert sorted(shown) == [file.stem for file in FILES]
    headings = {heading.lower() for heading in re.findall(r"^## (.+)$", PAGE, re.MULTILINE)}
    kinds = {"loss" if " loss" in kind else kind for kind in PROTOCOLS}
    assert kinds == headings - {"what is not open"}
