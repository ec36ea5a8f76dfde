"""Who a process is, trainer or sampler, and the secret that it shows: from its environment.

The program on a sampler's worker starts the sampler proper, and starts it again if it is killed or crashes.
"""

import hmac
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.formats import POD_VARIABLE, SECRET_VARIABLE, TOKEN_VARIABLE, RunFileError, attempt_token
from conf.schema.training.run_yaml import RunFile
from trainer.distributed.preemption import PREEMPTED_EXIT_CODE
from trainer.distributed.runtime import told_worker
from trainer.rl.remote.wire import WireError


def own_token() -> str:
    """Return the secret of this attempt. Raises RunFileError if there is none."""
    return _secret(TOKEN_VARIABLE, "the same on all workers")


def attempt_mark(token: str) -> str:
    """Return what tells the file of this attempt from that of an earlier one; the token does not follow from it."""
    return hmac.digest(token.encode(), b"attempt", "sha256").hex()


def attempt_number() -> int:
    """Return the number of this attempt; 0 without a controller."""
    return int(os.environ.get("SLIPWAY_ATTEMPT") or 0)


def is_on_sampler_pod() -> bool:
    """Return whether this worker belongs to one of `loop.sampler.pods`."""
    return bool(os.environ.get(POD_VARIABLE))


def own_name() -> str:
    """Return which sampler this is. Raises RunFileError."""
    return pod_name(os.environ[POD_VARIABLE]) if is_on_sampler_pod() else worker_name(worker_index())


def worker_name(number: int) -> str:
    return f"worker {number}"


def pod_name(number: int | str) -> str:
    return f"sampler pod {number}"


def sampler_names(experiment: RunFile, first: int) -> list[str]:
    """Return the names of all samplers of a run; `first` is the number of the first worker that samples."""
    workers = [worker_name(number) for number in range(first, first + experiment.sampler_workers)]
    return workers + [pod_name(number + 1) for number in range(experiment.sampler_pods)]


def worker_index() -> int:
    """Return which worker of the pod this is. Raises RunFileError."""
    index = told_worker()
    if index is None:
        raise RunFileError("loop.sampler.workers: SLIPWAY_WORKER must tell which worker this is; `slipway up` sets it")
    return index


@dataclass(frozen=True)
class SamplerKey:
    """What a sampler shows to the trainer: the token of its attempt, or on another pod one for each attempt."""

    token: str = ""
    secret: str = ""

    @classmethod
    def own(cls) -> "SamplerKey":
        """Raises RunFileError if this process has no secret."""
        if is_on_sampler_pod():
            return cls(secret=_secret(SECRET_VARIABLE, "that of the run"))
        return cls(token=own_token())

    @property
    def outlives_attempts(self) -> bool:
        """Whether the sampler looks for the trainer's next attempt when one ends."""
        return bool(self.secret)

    def token_for(self, address: dict[str, Any]) -> str:
        """Return the token for the trainer that wrote an address. Raises WireError if we are not to connect to it."""
        token = attempt_token(self.secret, address["number"]) if self.secret else self.token
        if not hmac.compare_digest(address["attempt"], attempt_mark(token)):
            raise WireError("the trainer of this attempt does not listen yet")
        if self.outlives_attempts and "exit_code" in address:
            raise WireError("this attempt has ended, and the next one does not listen yet")
        return token


def _secret(variable: str, which: str) -> str:
    if secret := os.environ.get(variable):
        return secret
    raise RunFileError(
        f"loop.sampler: the trainer and its samplers need a secret in {variable}, {which}; `slipway up` sets it"
    )


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
