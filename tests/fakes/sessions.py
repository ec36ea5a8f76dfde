"""Sessions by hand: of a run whose bucket is in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from controller.cli.verbs import results
from tests.fakes.google import MemoryStorage


def open_results_of(run: str, objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> MemoryStorage:
    """Let `results` open a session of a run with these objects, which needs no cloud; return its storage."""
    storage = MemoryStorage(b={f"runs/{run}/{name}": content for name, content in objects.items()})

    @contextmanager
    def opened(*_: Any, **__: Any) -> Iterator[Any]:
        plan, ledger = SimpleNamespace(run_id=run, bucket="b"), SimpleNamespace(prefix=f"runs/{run}")
        yield SimpleNamespace(context=SimpleNamespace(google=storage), plan=plan, ledger=ledger)

    monkeypatch.setattr(results, "open_session", opened)
    return storage
