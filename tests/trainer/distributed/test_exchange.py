"""What workers tell each other through JAX's coordination service; test_main.py does so in real processes."""

from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from tests.trainer.distributed.coordinator import Coordinator
from trainer.distributed.exchange import Exchange


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
