"""Run a command that compiles for a TPU, and keep what the compiler writes before it generates code.

Code for a large program takes minutes; the schedule and the assignment of memory are written before.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LEAST_BYTES = 100_000
"""Shorter schedules are those of small programs that a peer compiles beside its step."""
NO_CHIP = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
           "TPU_WORKER_HOSTNAMES": "localhost"}  # fmt: skip
TOTAL = re.compile(r"Memory Space: default \(color=0\)\nTotal bytes: (\d+)")


@dataclass(frozen=True)
class Dump:
    """The schedule of one program, and the bytes that it takes in HBM; 0 if they were not reported."""

    text: str
    hbm_bytes: int


def compiled(command: Sequence[str], flags: str, seconds_at_most: float, cwd: Path | None = None,
             env: dict[str, str] | None = None) -> Dump | None:  # fmt: skip
    """Return what the first large program of a command compiles to; None if it ends without one, or in time."""
    with tempfile.TemporaryDirectory() as folder:
        schedules, reports = Path(folder, "schedules"), Path(folder, "reports")
        dumps = {
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={schedules} --xla_jf_dump_hlo_text=true {flags}",
            "XLA_FLAGS": f"--xla_dump_to={reports} --xla_dump_hlo_as_text=true",
        }
        child = subprocess.Popen(command, cwd=cwd, env=os.environ | NO_CHIP | (env or {}) | dumps,
                                 start_new_session=True)  # fmt: skip
        try:
            text = _schedule(child, schedules, time.monotonic() + seconds_at_most)
            return None if text is None else Dump(text, _hbm_bytes(reports))
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _schedule(child: subprocess.Popen[bytes], folder: Path, deadline: float) -> str | None:
    size = -1
    while time.monotonic() < deadline:
        time.sleep(2)
        written = [file for file in folder.glob("*-TLP-hlo.txt") if file.stat().st_size > LEAST_BYTES]
        if written and written[-1].stat().st_size == size:
            return written[-1].read_text()
        if child.poll() is not None:
            return written[-1].read_text() if written else None
        size = written[-1].stat().st_size if written else -1
    return None


def _hbm_bytes(folder: Path) -> int:
    found = [TOTAL.search(file.read_text()) for file in folder.glob("*memory-usage-report.txt")]
    return max((int(total[1]) for total in found if total), default=0)
