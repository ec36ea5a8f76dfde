"""Overrides of the last `up` in each folder, so that `slipway logs` there means the run that was just started."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

RUN_VERBS = frozenset({"status", "logs", "verify", "cancel", "stop", "down", "ssh", "exec", "forward"}) | {
    *("get", "export", "chat", "generate"),
}
"""Commands that accept --run to name the run."""
VERBS = RUN_VERBS | {"orphans"}
"""Commands that inspect, change or end what `up` created; without overrides they use those of the last `up`."""
PROJECT_VERBS = frozenset({"orphans"})
"""Commands among them that need no run: the overrides only select the project."""


@dataclass(frozen=True)
class LastCommand:
    """The last `up` of a folder.

    Attributes:
        overrides: its overrides; of a sweep, those that all runs share.
        run: id of the run if it was started from its record.
        sweep: id of the sweep if it was one.
        sweep_words: all overrides of the sweep, the swept ones included.
    """

    overrides: tuple[str, ...] = ()
    run: str = ""
    sweep: str = ""
    sweep_words: tuple[str, ...] = ()


def save(command: LastCommand, folder: Path) -> None:
    """Save the last `up` of a folder. The caller reports a state folder that cannot be written."""
    from controller.core import formats

    file = _file(folder)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write_text(formats.dump({"folder": str(folder), **asdict(command)}))


def load(folder: Path) -> LastCommand:
    """Return what was last saved for this folder; empty if there was no `up`."""
    from controller.core import formats

    file = _file(folder)
    known = formats.load(file.read_text(), str(file)) if file.is_file() else {}
    words = tuple(known.get("sweep_words", ()))
    return LastCommand(tuple(known.get("overrides", ())), known.get("run", ""), known.get("sweep", ""), words)


def _file(folder: Path) -> Path:
    import hashlib

    home = Path(os.environ.get("SLIPWAY_HOME") or "~/.slipway").expanduser()
    return home / "last" / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.json"
