"""Overrides of the last `up` in each folder, so that `slipway logs` there means the run that was just started."""

import os
from collections.abc import Sequence
from pathlib import Path

RUN_VERBS = frozenset({"status", "logs", "verify", "cancel", "stop", "down", "ssh", "exec", "forward", "get"})
"""Commands that accept --run to name the run."""
VERBS = RUN_VERBS | {"orphans"}
"""Commands that inspect, change or end what `up` created; without overrides they use those of the last `up`."""
PROJECT_VERBS = frozenset({"orphans"})
"""Commands among them that need no run: the overrides only select the project."""


def save(overrides: Sequence[str], folder: Path, run: str = "") -> None:
    """Save the overrides of an `up`, and the run id if it was started from its record.

    The caller reports a state folder that cannot be written.
    """
    from controller.core import formats

    file = _file(folder)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write_text(formats.dump({"folder": str(folder), "overrides": list(overrides), "run": run}))


def load(folder: Path) -> tuple[tuple[str, ...], str]:
    """Return the overrides and the run id last saved for this folder; both are empty if there was no `up`."""
    from controller.core import formats

    file = _file(folder)
    known = formats.load(file.read_text(), str(file)) if file.is_file() else {}
    return tuple(known.get("overrides", ())), known.get("run", "")


def _file(folder: Path) -> Path:
    import hashlib

    home = Path(os.environ.get("SLIPWAY_HOME") or "~/.slipway").expanduser()
    return home / "last" / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.json"
