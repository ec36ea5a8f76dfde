"""What the C library keeps goes back to the system, once a minute."""

import ctypes

import psutil
import pytest

from controller.core.freed_memory import INTERVAL_SECONDS, FreedMemory
from tests.fakes.clock import ManualClock

BLOCKS, BLOCK_BYTES = 50_000, 2000


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_goes_back_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    freed = FreedMemory(clock)
    blocks = [bytearray(BLOCK_BYTES) for _ in range(BLOCKS)]
    last = bytearray(BLOCK_BYTES)  # what lies behind free memory keeps the C library from returning it
    del blocks
    kept = resident()
    clock.elapsed = INTERVAL_SECONDS - 1
    freed.return_if_due()
    assert resident() > kept - BLOCKS * BLOCK_BYTES / 10
    clock.elapsed = INTERVAL_SECONDS
    freed.return_if_due()
    assert resident() < kept - BLOCKS * BLOCK_BYTES / 2
    assert len(last) == BLOCK_BYTES
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    clock.elapsed = 3 * INTERVAL_SECONDS
    freed.return_if_due()  # of another C library nothing is asked
