"""The config words of the last `up` in a folder, so that `slipway logs` there means the run that was just started."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from controller.core import formats

RUN_VERBS = frozenset({"status", "logs", "verify", "cancel", "stop", "down", "ssh", "exec", "forward"})
"""Those that --run may tell which run is meant."""
VERBS = RUN_VERBS | {"orphans"}
"""The verbs that look at, touch or end what `up` has made; without config words they mean the last one."""
PROJECT_VERBS = frozenset({"orphans"})
"""Those of them that mean something without any run: the words only say which project."""


def save(overrides: Sequence[str], folder: Path, run: str = "") -> None:
    """Called by `up` once it has something to act on; a state folder that cannot be written is told of elsewhere.

    Args:
        run: the id, where it was started from its record.
    """
    file = _file(folder)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write_text(formats.dump({"folder": str(folder), "overrides": list(overrides), "run": run}))


def load(folder: Path) -> tuple[tuple[str, ...], str]:
    """The words and the run that `remember` was given last in this folder, none of both if there was no `up`."""
    file = _file(folder)
    known = formats.load(file.read_text(), str(file)) if file.is_file() else {}
    return tuple(known.get("overrides", ())), known.get("run", "")


def _file(folder: Path) -> Path:
    home = Path(os.environ.get("SLIPWAY_HOME") or "~/.slipway").expanduser()
    return home / "last" / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.json"
