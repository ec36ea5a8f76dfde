"""The layout of the repository: small folders, and a known test for every module."""

import ast
import re
import subprocess
from collections import Counter
from pathlib import PurePosixPath

import pytest
import yaml

from tests.paths import ROOT

MOST_MODULES = 15
"""Modules per folder, `__init__.py` not counted."""
PACKAGES = ("conf", "controller", "trainer")
COVERED_BY: dict[str, str] = yaml.safe_load((ROOT / "tests" / "covered_by.yaml").read_text())
"""Test files of modules that have none of their own name, by module."""
ENTRY_POINTS = ("__init__.py", "__main__.py")


@pytest.fixture(scope="module")
def files() -> list[PurePosixPath]:
    """Python files of the checkout, new ones included, as git lists them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [PurePosixPath(name) for name in listed if (ROOT / name).is_file()]


def _mirror(module: PurePosixPath) -> PurePosixPath:
    return PurePosixPath("tests", *module.parts[:-1], f"test_{module.name}")


def test_folders_are_small(files: list[PurePosixPath]) -> None:
    sizes = Counter(str(file.parent) for file in files if file.name != "__init__.py")
    assert {folder: size for folder, size in sizes.items() if size > MOST_MODULES} == {}


def test_folders_say_what_they_are(files: list[PurePosixPath]) -> None:
    """What lives there, what does not, and what it may import; paths that they name exist."""
    for file in (file for file in files if file.parts[0] in PACKAGES and file.name == "__init__.py"):
        said = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
        assert said.count(".") >= (3 if len(file.parts) > 2 else 1), file
        for path in re.findall(r"`([a-z_]+/[\w./]*)`", said):
            assert (ROOT / path).exists() or (ROOT / file.parts[0] / path).exists(), f"{file}: {path}"


def test_every_module_has_a_test(files: list[PurePosixPath]) -> None:
    """Either `tests/<its path>/test_<its name>`, or the one that covered_by.yaml names."""
    known = {str(file) for file in files}
    modules = [file for file in files if file.parts[0] in PACKAGES and "standins" not in file.parts]
    modules = [str(file) for file in modules if file.name not in ENTRY_POINTS and str(_mirror(file)) not in known]
    missing = [file for file in modules if file not in COVERED_BY]
    assert missing == [], "write the test, or name the one that covers it in tests/covered_by.yaml"


def test_covered_by_is_true(files: list[PurePosixPath]) -> None:
    """No stale row: the module and the test are there, and the module has no test file of its own name."""
    known = {str(file) for file in files}
    for module, test in COVERED_BY.items():
        assert module in known, module
        assert test in known, test
        assert str(_mirror(PurePosixPath(module))) not in known, f"{module} has a test of its own"


def test_modules_named_in_documents_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    named = set(re.findall(r"(?<![\w/.])((?:conf|controller|docs|tests|trainer)/[\w./-]*\.py)\b", text))
    examples = {"trainer/my_rewards.py"}  # a file that docs/grpo.md tells the reader to write
    assert [path for path in named - examples if not (ROOT / path).is_file()] == []
