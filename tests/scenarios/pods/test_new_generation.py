"""A new generation of TPUs is a row of data: a copy of Slipway with that row, and no other code, runs pods of it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.schema.topology import TABLE_FILE, TableError, read_tpu_types
from tests.paths import ROOT

GENERATION = """\
  v8t:
    devices_per_chip: 1
    runtime_version: v2-alpha-tpu8t
    zones: [us-central1-ai8a]
    usd_per_chip_hour: {us-central1-ai8a: [20.0, null]}
    machine_types: {4: tpu8t-standard-4t}
    image_family: ubuntu-accel-2404-amd64-tpu-tpu8t
"""
TYPES = "  v8t-4: [v8t, 4, 1, 4, 2x2x1]\n  v8t-8: [v8t, 8, 2, 4, 2x2x2]\n"
Run = Callable[..., tuple[int, str]]


def with_rows(text: str) -> str:
    """Return the table with the new generation and its types."""
    text = text.replace("\ngenerations:\n", f"\ngenerations:\n{GENERATION}")
    return text.replace("  v2-8: [", f"{TYPES}  v2-8: [")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The command line of a copy whose table has the row; returns exit code and what it printed."""
    copy, folder = tmp_path / "copy", tmp_path / "folder"
    for package in ("conf", "controller", "trainer"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    table = copy / "conf" / TABLE_FILE.name
    table.write_text(with_rows(table.read_text()))
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(copy), "SLIPWAY_HOME": str(tmp_path / "home")}

    def call(*words: str) -> tuple[int, str]:
        argv = [sys.executable, "-m", "controller", *words]
        done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
        return done.returncode, done.stdout + done.stderr

    return call


@pytest.mark.e2e
def test_a_row_of_data_makes_it_a_choice_a_plan_and_a_pod(run: Run) -> None:
    local = ("cloud=local", "cloud.realism=relaxed")
    code, out = run("init", "--yes", "--no-bucket", "--json", "--zone", "us-central1-ai8a", *local)
    assert code == 0, out
    found = json.loads(out)
    offered = {(one["plane"], one["usd_per_chip_hour"]) for one in found["choices"] if one["generation"] == "v8t"}
    assert offered == {(plane, price) for plane in ("tpu_api", "compute_engine") for price in (20.0, None)}
    assert found["unknown"] == {}
    program = ("program=command", "program.command=[echo,hello]", "env.packages=image")
    mine = (*local[1:], "cloud=mine", "tpu=mine", *program)
    code, out = run("plan", *mine, "tpu.plane=compute_engine", "--json")
    assert code == 0, out
    assert not [one for one in json.loads(out)["findings"] if one["severity"] != "note"], out
    try:
        code, out = run("up", "--yes", *mine)
        assert code == 0, out
        assert "TPU v8t-8 (2 workers)" in out
    finally:
        run("localcloud", "wipe", "--yes")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    runtime_version: v2-alpha-tpu8t\n", "", "generations.v8t lacks runtime_version"),
        ("    machine_types:", "    machines:", "generations.v8t has no machines; keys: devices_per_chip, "),
        ("  v8t:\n", "  v8x:\n", "types.v8t-4 is of 'v8t', which generations does not have"),
    ],
)
def test_a_row_that_is_incomplete_is_refused_by_name(old: str, new: str, said: str, tmp_path: Path) -> None:
    table = tmp_path / "tpu_types.yaml"
    table.write_text(with_rows(TABLE_FILE.read_text()).replace(old, new, 1))
    with pytest.raises(TableError) as refused:
        read_tpu_types(table)
    assert f"tpu_types.yaml: {said}" in str(refused.value)
