"""What is on this worker now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..fs import free_gb, inside, read_json, root
from ..process import boot_id
from ..program.state import active
from ..tree_hash import file_hash, tree_now
from .tidy import untidy
from .venv import image, setup_state, venv_state

if TYPE_CHECKING:
    from ..protocol import Observation


def observe(code: str | None = None, venv: str | None = None, run_id: str | None = None) -> Observation:
    """What is here of what is asked for, hashed anew. Nothing is changed.

    Args:
        code: the tree hash that it should have.
        venv: its fingerprint, or "image".
        run_id: the run whose run.yaml is meant.
    """
    home, boot, here = Path.home(), boot_id(), image()
    config = inside("runs", run_id) / "run.yaml" if run_id else None
    probed = [read_json(root() / f"{name}.json") for name in ("devices", "peers")]
    devices, peers = (found if found and found["boot_id"] == boot else None for found in probed)
    return {
        "boot_id": boot,
        "home": str(home),
        "image": {"python": here["python"], "fingerprint": here["fingerprint"], "versions": here["versions"]},
        "code": tree_now(inside("code", code)) if code else None,
        "venv": venv_state(venv) if venv else None,
        "config": file_hash(config) if config and config.exists() else None,
        "setup": setup_state(run_id, venv) if run_id and venv else None,
        "devices": devices,
        "peers": peers,
        "active": active(),
        "free_gb": free_gb(),
        "untidy": untidy(),
    }
