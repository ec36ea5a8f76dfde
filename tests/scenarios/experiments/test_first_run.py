"""docs/first-run.md, command by command in its order, on the emulated cloud: from nothing to metrics and back."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from controller.cloud import emulator
from controller.localcloud.store import Store
from controller.plan.permissions import CHANGE
from tests.emulators import Emulators
from tests.paths import ROOT

pytestmark = pytest.mark.e2e
PAGE = ROOT / "docs" / "first-run.md"
LINES = re.findall(r"^slipway (.+)$", PAGE.read_text(), re.MULTILINE)
SHORTER = ["scale=tiny", "loop.steps=2"]


def as_played(line: str) -> list[str]:
    """The words of a line: on the emulated cloud, with the packages of this machine, shorter, and without questions."""
    words = shlex.split(line)
    if words[0] == "init":
        return [*words, "cloud=local"]
    if words[0] == "down":
        return [*words, "--yes"]
    return [*words, *SHORTER] if any("experiment" in word for word in words) else words


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulators: Emulators) -> Iterator[Path]:
    """An empty folder to stand in, with an empty cloud, which each command starts anew."""
    monkeypatch.setattr(emulator, "run_emulator_verb", emulators.run_emulator_verb)
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("SLIPWAY_HOME", str(home))
    yield project
    status, words = emulator.run_emulator_verb(["wipe"], emulator.state_folder(str(home)))
    assert status == 0, words


def requests(folder: Path) -> list[dict[str, Any]]:
    """The laptop's requests so far that were judged, whether the emulated cloud runs or not."""
    file = folder.parent / "home" / "localcloud" / "state.db"
    if not file.exists():
        return []
    store = Store(file)
    found = [entry for entry in store.log_entries() if entry["client"] == "laptop" and entry.get("permissions")]
    store.close()
    return found


def permissions_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What `plan --permissions` prints for the words of an `up`, but for what changes a thing that exists."""
    said = capsys.readouterr()
    assert main.run(["plan", "--permissions", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    sys.stdout.write(said.out)
    rows = [line.split("\t") for line in lines]
    return {row[0] for row in rows if row[3] != CHANGE}


def test_the_first_run_is_what_the_page_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: dict[str, str] = {}
    used: set[str] = set()
    printed: set[str] = set()
    for line in LINES:
        before = len(requests(folder))
        code = main.run(as_played(line))
        if line.startswith("+experiment"):  # now that the APIs are on, its checks ask for everything
            assert main.run(["plan", *as_played(line)]) == 0
        if line.startswith(("+experiment", "down")):
            used |= {name for entry in requests(folder)[before:] for name in entry["permissions"]}
        if line.startswith("+experiment"):
            printed = permissions_printed(as_played(line), capsys)
        out, err = capsys.readouterr()
        assert code == 0, f"slipway {line}\n{out}{err}"
        flag = next((f" {word}" for word in line.split() if word in ("--all", "--permissions")), "")
        said[line.split()[0] + flag] = out
    assert len(LINES) == 11
    assert (folder / "slipway" / "cloud" / "mine.yaml").exists()
    assert "+ create" in said["plan"]
    assert "error:" not in said["plan"]
    assert re.search(r"\n  accuracy +[\d.]+ → [\d.]+ \(95 %: ", said["+experiment=quickstart"])
    assert "finished" in said["status"]
    assert "accuracy after GRPO" in said["logs"]
    assert "deleted" in said["down"]
    assert "bucket" in said["down --all"]
    # Asked for by Cloud Billing, whose API is off in a new project and answers before it looks at rights.
    assert used == printed - {"resourcemanager.projects.get"}
