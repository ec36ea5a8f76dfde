"""A project in memory and in a folder, and an emulated Hub."""

from pathlib import Path

import pytest

from tests.controller.resources.uploads.fetching import Project
from tests.hub import hub

__all__ = ["hub"]


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("SLIPWAY_AGENT_ROOT", str(tmp_path / "vm"))
    return Project(tmp_path / "google")
