"""A context around a fake client of Google."""

from pathlib import Path
from typing import Any, cast

from controller.context import Context
from controller.core.events import Events
from controller.core.this_process import Clock
from controller.ssh.login import Login
from tests.fakes.clock import ManualClock


def make_context(
    google: object,
    folder: Path | None = None,
    *,
    project: str = "p",
    clock: Clock | None = None,
    notes: list[str] | None = None,
    poll_seconds: float = 0.01,
) -> Context:
    """Return a context without SSH.

    Args:
        google: the client; None if nothing is asked of it.
        folder: the state folder, where the SSH key is; None if nothing is stored.
        project: name of the project.
        clock: a ManualClock by default.
        notes: gets the text of each note.
        poll_seconds: pause between two looks.
    """
    clock = clock or ManualClock()
    client, none, events = cast(Any, google), cast(Any, None), Events(clock)
    if notes is not None:
        events.add_listener(lambda event: notes.append(event.message) if event.kind == "note" else None)
    if folder is not None:
        (folder / "keys").mkdir(parents=True, exist_ok=True)
    login = Login(client, clock, project, "me", folder or Path("/nowhere"))
    return Context(project, client, clock, events, cast(Path, folder), login, poll_seconds, none)
