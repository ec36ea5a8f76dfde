"""Stands for JAX's coordination service in tests: one per pod, a client per process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import jax


class Coordinator:
    """The methods of JAX's client that `trainer.distributed.exchange` uses, for all processes at once."""

    def __init__(self, processes: int = 2) -> None:
        self.values: dict[str, bytes] = {}
        self.processes, self.arrived = processes, Counter[str]()
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._changed:
            assert allow_overwrite or key not in self.values, key
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        given_up = time.monotonic() + milliseconds / 1000
        with self._changed:
            while key not in self.values:
                if (left := given_up - time.monotonic()) <= 0:
                    raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
                self._changed.wait(left)
            return self.values[key]

    def key_value_dir_get_bytes(self, folder: str) -> list[tuple[str, bytes]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def key_value_delete(self, folder: str) -> None:
        for key in [key for key in self.values if key.startswith(folder)]:
            del self.values[key]

    def wait_at_barrier(self, name: str, _: Any) -> None:
        with self._changed:
            self.arrived[name] += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.arrived[name] == self.processes)
