"""Lists that are nested until Python's recursion limit end no reader of JSON that others write."""

import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT


def test_nested_lists_are_an_error_like_any_other(tmp_path: Path) -> None:
    """In a process of its own: a finalizer that the collector calls at that depth would fail in another test."""
    command = [sys.executable, "-m", "tests.nesting", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
