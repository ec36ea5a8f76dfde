"""Who a process is, trainer or sampler, and the secret that it shows: from its environment."""

import hmac
import os
from dataclasses import dataclass
from typing import Any

from conf.formats import POD_VARIABLE, SECRET_VARIABLE, TOKEN_VARIABLE, attempt_token
from conf.schema.training.run_yaml import RunFile, RunFileError
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
    index = os.environ.get("SLIPWAY_WORKER") or os.environ.get("TPU_WORKER_ID")
    if index is None:
        raise RunFileError("loop.sampler.workers: SLIPWAY_WORKER must tell which worker this is; `slipway up` sets it")
    return int(index)


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
