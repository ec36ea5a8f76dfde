"""The emulated cloud's whole state, comparable before and after."""

from pathlib import Path
from typing import Any

from controller.localcloud.store import ERROR_KIND, Store

TRANSIENT_KINDS = frozenset({"operation", "fault", "settings", "service"})
"""What may differ: the record of what was done, and the APIs, which stay enabled by design."""


def comparable_state(state: dict[str, Any]) -> dict[str, Any]:
    """Everything that is there, without the etags of policies and without policies that bind nobody."""
    found = {kind: things for kind, things in state.items() if kind not in TRANSIENT_KINDS}
    found["policy"] = {
        name: {**policy, "etag": None} for name, policy in state["policy"].items() if policy.get("bindings")
    }
    return found


def internal_errors(folder: Path) -> list[str]:
    """What the emulated cloud of that state folder, awake or not, has done wrong itself."""
    if not (folder / "state.db").exists():
        return []
    store = Store(folder / "state.db")
    found = [f"{name}\n{mistake['traceback']}" for name, mistake in store.items(ERROR_KIND)]
    store.close()
    return found
