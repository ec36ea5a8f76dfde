"""What the program changes in its own process."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from controller.__main__ import NUM_HEAPS

THREADS = 6
ALLOCATE_IN_THREADS = f"""
import ctypes, sys, threading
{{first}}
together = threading.Barrier({THREADS})
def allocate():
    kept = [bytearray(2000) for _ in range(100)]
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range({THREADS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
ctypes.CDLL(None).malloc_stats()
"""


def num_heaps(first: str) -> int:
    """Return how many heaps the C library has after threads have allocated at the same time."""
    command = [sys.executable, "-c", ALLOCATE_IN_THREADS.format(first=first), "version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr.count("Arena ")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_stats"), reason="the C library is not glibc")
def test_threads_share_heaps() -> None:
    assert num_heaps("") > NUM_HEAPS, "else this test could not fail"
    assert num_heaps("from controller.__main__ import main\nmain()") == NUM_HEAPS
