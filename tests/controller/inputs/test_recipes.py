"""Assets that a command builds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from controller.core.errors import CloudError
from controller.inputs.download import run_recipe
from tests.controller.inputs.resolving import held


def test_a_build_runs_once_per_words_and_inputs(tmp_path: Path) -> None:
    (root := tmp_path / "code").mkdir()
    (root / "make.py").write_text("import pathlib, sys; pathlib.Path(sys.argv[1], 'x').write_text('made')")
    argv = [sys.executable, "make.py", "{output}"]
    first = held(tmp_path, root, build=argv)
    assert first.recipe is not None
    assert (run_recipe(first.recipe, "k") / "x").read_text() == "made"
    (first.recipe.output / "x").write_text("kept")
    again = held(tmp_path, root, build=argv)
    assert again == first
    assert (run_recipe(first.recipe, "k") / "x").read_text() == "kept"
    (root / "make.py").write_text("pass")
    changed = held(tmp_path, root, build=argv)
    assert changed.identity != first.identity
    assert changed.recipe is not None
    with pytest.raises(CloudError, match=r"wrote no file to \{output\}"):
        run_recipe(changed.recipe, "k")
    (root / "make.py").write_text("print('boom'); raise SystemExit(3)")
    failing = held(tmp_path, root, build=argv).recipe
    assert failing is not None
    with pytest.raises(CloudError, match=r"ended with code 3:\nboom"):
        run_recipe(failing, "k")
    assert [p.name for p in first.recipe.output.parent.iterdir()] == [first.recipe.output.name]


def test_a_folder_named_like_the_program_is_no_input(tmp_path: Path) -> None:
    """`slipway trainer.puzzles …` beside ./slipway, whose experiments do not change what it builds."""
    (extras := tmp_path / "code" / "slipway").mkdir(parents=True)
    first = held(tmp_path, tmp_path / "code", build=["slipway", "trainer.puzzles", "{output}"])
    (extras / "mine.yaml").write_text("x: 1")
    assert (
        held(tmp_path, tmp_path / "code", build=["slipway", "trainer.puzzles", "{output}"]).identity == first.identity
    )
    (tmp_path / "code" / "build.sh").write_text("true")
    named = held(tmp_path, tmp_path / "code", build=["sh", "build.sh", "{output}"])
    (tmp_path / "code" / "build.sh").write_text("false")
    assert held(tmp_path, tmp_path / "code", build=["sh", "build.sh", "{output}"]).identity != named.identity
