"""What workers tell each other through JAX's coordination service; test_main.py does so in real processes."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from trainer.distributed.runtime import Exchange


class Coordinator:
    """Stands for JAX's coordination service: its client's methods that are used, for all processes at once."""

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


def test_everybody_gets_all_texts_in_the_order_of_processes():
    service = Coordinator(processes=12)
    workers = [Exchange(service, process, 12) for process in range(12)]

    def talk(worker: Exchange) -> list[list[str]]:
        return [worker.gather(f"{word} ü {worker.process}") for word in ("a", "b" * 100_000, "")]

    with ThreadPoolExecutor(12) as threads:
        heard = list(threads.map(talk, workers))
    assert heard == [[[f"{word} ü {i}" for i in range(12)] for word in ("a", "b" * 100_000, "")]] * 12
    assert len(service.values) == 12, "texts that all have read are deleted"


def test_a_value_that_nobody_puts_is_none():
    exchange = Exchange(Coordinator(), 0, 2)
    assert exchange.get("a", 0.001) is None
    exchange.put("a", b"1")
    exchange.put("a", b"2")
    assert exchange.get("a", 0.001) == b"2"


def test_other_errors_of_the_service_are_raised(monkeypatch):
    service = Coordinator()

    def broken(*_: object) -> bytes:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: the leader died")

    monkeypatch.setattr(service, "blocking_key_value_get_bytes", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the leader died"):
        Exchange(service, 1, 2).get("a", 10)
