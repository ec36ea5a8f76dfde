"""The program on a sampler's worker: it starts the sampler proper, and starts it again if it is killed or crashes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from conf.schema.training.run_yaml import RunFile, RunFileError
from trainer.distributed.preemption import PREEMPTED_EXIT_CODE
from trainer.rl.remote.identity import is_on_sampler_pod, worker_index

CHILD_VARIABLE = "SLIPWAY_SAMPLER_CHILD"
"""Set in the environment of the sampler proper, to the process ID of its parent, without which it ends."""
NO_TRAINER_EXIT_CODE = 7
"""Exit code of a sampler on a pod of its own that has found no trainer for long, so that the pod can be deleted."""
FINAL_EXIT_CODES = (0, 2, 3, 4, NO_TRAINER_EXIT_CODE, PREEMPTED_EXIT_CODE)
"""Exit codes after which a sampler is not started again, as in `trainer.main`."""
MAX_CRASHES = 3
"""Exceptions in a row that end a sampler; kills do not count, since the next life need not end like that."""
SOUND_SECONDS = 1800.0
"""Life of a sampler after which earlier exceptions no longer count."""


def is_sampler(experiment: RunFile) -> bool:
    """Return whether this worker is one of the last `loop.sampler.workers`, or on another pod. Raises RunFileError."""
    if is_on_sampler_pod():
        return True
    workers = experiment.sampler_workers
    if not workers:
        return False
    if workers >= experiment.pod.workers:
        most = experiment.pod.workers - 1
        raise RunFileError(f"loop.sampler.workers: {workers} leave no worker to train; use at most {most}")
    return worker_index() >= experiment.pod.workers - workers


def supervise(run_file: Path) -> int:
    """Run the sampler until the trainer ends it, starting it again after its death; return the exit code."""
    stopping = threading.Event()
    child: subprocess.Popen[bytes] | None = None

    def stop(*_: object) -> None:
        stopping.set()
        if child is not None:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    crashes = 0
    while not stopping.is_set():
        command = [sys.executable, "-m", "trainer", str(run_file)]
        born = time.monotonic()
        child = subprocess.Popen(command, env=os.environ | {CHILD_VARIABLE: str(os.getpid())})
        if stopping.is_set():  # the request came while the child was started
            child.terminate()
        code = child.wait()
        crashes = 0 if code < 0 else 1 if time.monotonic() - born >= SOUND_SECONDS else crashes + 1
        if code in FINAL_EXIT_CODES or (crashes == MAX_CRASHES and not stopping.is_set()):
            return code
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        print(f"the sampler ended {how}; its task goes to another one", file=sys.stderr, flush=True)
    return PREEMPTED_EXIT_CODE
