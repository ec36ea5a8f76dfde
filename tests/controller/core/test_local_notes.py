"""This machine's own notes: what cannot be written is said once, and nothing else ends."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.core.events import Event, Events
from controller.core.local_notes import LocalNotes
from tests.fakes.clock import ManualClock
from tests.fakes.disks import refusing_writes
from tests.paths import ROOT


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def events(said: list[str]) -> Events:
    made = Events(ManualClock())
    made.add_listener(lambda event: said.append(event.message))
    return made


@pytest.fixture
def notes(events: Events) -> LocalNotes:
    return LocalNotes(events)


@pytest.mark.parametrize(("number", "times"), [(errno.ENOSPC, 1), (errno.EROFS, 1), (errno.EIO, 1), (errno.EACCES, 2)])
def test_a_disk_is_named_once_and_a_file_once(
    number: int, times: int, notes: LocalNotes, said: list[str], tmp_path: Path
) -> None:
    acts: list[Callable[[str], None]] = [
        lambda text: notes.append(tmp_path / "lines", text),
        lambda text: notes.write(tmp_path / "whole", text),
    ]
    with refusing_writes(tmp_path, number):
        for act in acts * 2:
            act("x\n")
    assert len(said) == times
    assert str(tmp_path / "lines") in said[0]
    for act in acts:
        act("y\n")
    assert [(tmp_path / name).read_text() for name in ("lines", "whole")] == ["y\n", "y\n"], "it is tried each time"


def test_a_listener_that_cannot_write_tells_the_others(
    notes: LocalNotes, events: Events, said: list[str], tmp_path: Path
) -> None:
    """The warning is an event itself, emitted while another one is passed on."""
    events.add_listener(notes.listener(tmp_path / "runs" / "events.jsonl"))
    with refusing_writes(tmp_path, errno.ENOSPC):
        events.note("run", "one")
    events.note("run", "two")
    events.emit("log", "run", "output")
    assert [text[:8] for text in said] == ["one", "warning:", "two", "output"]
    lines = (tmp_path / "runs" / "events.jsonl").read_text().splitlines()
    assert ["two" in line for line in lines] == [True]


def test_an_event_is_whole_in_its_file(notes: LocalNotes, tmp_path: Path) -> None:
    event = Event(1.0, "note", "run", "hello", {"attempt": 1})
    notes.listener(tmp_path / "events.jsonl")(event)
    assert (tmp_path / "events.jsonl").read_text() == event.as_json() + "\n"


def test_a_whole_file_is_the_old_one_or_the_new_one(
    notes: LocalNotes, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up amid a write, or a process that is killed there, leaves no half and no draft."""
    file = tmp_path / "runs/r/whole.json"
    notes.write(file, "old")
    whole = Path.write_bytes

    def half(path: Path, content: bytes) -> int:
        whole(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    notes.write(file, b"a new one")
    assert [path.read_text() for path in file.parent.iterdir()] == ["old"]
    assert str(file) in said[0]
    monkeypatch.undo()
    notes.write(file, b"a new one")
    assert [path.read_text() for path in file.parent.iterdir()] == ["a new one"]


def test_whoever_replaces_a_note_does_it_in_one_way() -> None:
    """Drafts of their own are those of programs, of folders, and of whole other stores."""
    own = ("agent/", "localcloud/", "gcp/folder_store.py", "ssh/", "here.py", "records/recorded_code.py",
           "config/composed_cache.py", "multirun/job.py", "resources/bastion_boot.py",
           "witness/recording.py")  # fmt: skip
    package = ROOT / "controller"
    found = [str(file.relative_to(package)) for file in package.rglob("*.py") if "draft.replace(" in file.read_text()]
    assert [name for name in found if not name.startswith(own)] == ["core/json_documents.py"]
