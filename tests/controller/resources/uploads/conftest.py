"""A bucket in a folder, and what this machine copies into it."""

import time
from pathlib import Path

import pytest

from controller.context import Context
from controller.core.this_process import Clock
from controller.gcp.folder_store import FolderClient
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context
from tests.hub import hub

__all__ = ["hub"]


class Project(FolderClient):
    """What the controller asks of Google; the bucket is a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Clock())
        self.folder, self.bucket = folder, str(folder / "bucket")


@pytest.fixture
def google(tmp_path: Path) -> Project:
    return Project(tmp_path / "google")


def context_of(project: Project) -> tuple[Context, list[str]]:
    """Return a context of this machine, and the notes that it gets."""
    notes = list[str]()
    clock = ManualClock(time.time())
    return make_context(project, project.folder / "home", clock=clock, notes=notes, poll_seconds=1.0), notes
