"""conf/laptop.txt is enough for a laptop that only launches: no JAX, and none of the trainer's libraries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.paths import ROOT

LINES = [
    line
    for file in ("driver.in", "laptop.txt")
    for line in (ROOT / "conf" / file).read_text().splitlines()
    if line and line[0] not in "#-"
]
RUN_WITHOUT = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = ["slipway", *{words!r}]
runpy.run_module("controller", run_name="__main__")
"""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _with_dependencies(lines: list[str]) -> set[str]:
    found: set[str] = set()
    wanted = [Requirement(line) for line in lines]
    while wanted:
        one = wanted.pop()
        if (name := _normal(one.name)) in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            wanted += [Requirement(line) for line in requires(one.name) or []]
        except PackageNotFoundError:  # for another system
            continue
    return found


def test_a_missing_dependency_is_one_line(tmp_path: Path) -> None:
    """As of `python -m controller` in a clone before its installation."""
    script = RUN_WITHOUT.format(absent={"pydantic"}, words=["plan", "+experiment=quickstart"])
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "SLIPWAY_HOME": str(tmp_path)},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {sys.executable} lacks the package pydantic; install Slipway with its dependencies")


def test_it_is_a_part_of_the_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert set(LINES) <= set(project)


def test_a_laptop_needs_no_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    words = ["plan", "+experiment=gemma2b_gsm8k", "cloud.project=a-project"]
    kept = _with_dependencies(LINES)
    absent = {
        top
        for top, owners in packages_distributions().items()
        if not kept.intersection(map(_normal, owners)) and "slipway" not in owners
    }
    assert {"jax", "aiohttp", "pyarrow"} <= absent
    script = RUN_WITHOUT.format(absent=absent, words=words)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "No module named" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout, done.stderr
