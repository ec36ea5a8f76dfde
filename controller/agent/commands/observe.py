"""Observed state of this worker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..fs import agent_root, free_gb, read_json, safe_join
from ..process import boot_id
from ..program.state import active_attempt
from ..tree_hash import current_tree_hash, file_hash
from .chips import chips as chips_here
from .tidy import pending_cleanup
from .venv import applied_setup_key, image_python, venv_state

if TYPE_CHECKING:
    from ..protocol import Observation


def observe(
    code: str | None = None, venv: str | None = None, run_id: str | None = None, chips: bool = False
) -> Observation:
    """Return the current state of this worker, with fresh hashes. Read-only.

    Args:
        code: tree hash of the desired code.
        venv: fingerprint of the desired venv, or "image".
        run_id: run whose run.yaml is hashed.
        chips: whether to look at the TPU chips and for the processes that hold them.
    """
    home, boot, here = Path.home(), boot_id(), image_python()
    config = safe_join("runs", run_id) / "run.yaml" if run_id else None
    probed = [read_json(agent_root() / f"{name}.json") for name in ("devices", "peers", "health")]
    devices, peers, health = (found if found and found["boot_id"] == boot else None for found in probed)
    return {
        "boot_id": boot,
        "home": str(home),
        "image": {"python": here["python"], "fingerprint": here["fingerprint"], "versions": here["versions"]},
        "code": current_tree_hash(safe_join("code", code)) if code else None,
        "venv": venv_state(venv) if venv else None,
        "config": file_hash(config) if config and config.exists() else None,
        "setup": applied_setup_key(run_id, venv) if run_id and venv else None,
        "devices": devices,
        "peers": peers,
        "health": health,
        "chips": chips_here() if chips else None,
        "active": active_attempt(),
        "free_gb": free_gb(),
        "untidy": pending_cleanup(),
    }
