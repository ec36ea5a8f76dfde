"""How the workers of a pod are reached over SSH, and what can go wrong on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from controller.core.errors import SlipwayError

ConnectionFailure = Literal["refused", "timeout", "auth", "denied", "host_key", "dropped", "agent"]


class WorkerError(SlipwayError):
    """One worker could not be reached, or could not do what it was asked: a value wherever several are asked.

    `kind`: refused (nothing listens, or not yet), timeout, auth (it does not know our key), denied (Google or a gateway
    does not let us go there), host_key (it is not who it should be), dropped (the connection broke off), agent (the
    command failed there; `detail` says more).
    """

    def __init__(self, worker: int, address: str, kind: ConnectionFailure, words: str, detail: str = "") -> None:
        super().__init__(f"worker {worker} ({address}): {words}")
        self.worker, self.address, self.kind, self.words, self.detail = worker, address, kind, words, detail


@dataclass(frozen=True)
class ConnectionParams:
    """How the workers of a pod are reached.

    Attributes:
        pod: its name, for messages.
        user: who we are there.
        key: file of the private key.
        addresses: of the workers, in their order.
        host_keys: reads the keys that Google vouches for now, per worker: lines of `TYPE KEY`.
        ssh_config: an OpenSSH config to read instead of ~/.ssh/config and /etc/ssh/ssh_config.
        tunnel: opens a way to port 22 of a worker within so many seconds, something like a socket; by default its
            address is connected to.
        way: how that is called, for messages.
        kept: file in which the host keys of this incarnation of the pod are kept; None: nowhere.
        incarnation: of the pod; host keys that were kept of another are dropped.
        trust_on_first_use: take the host key that a worker shows first; by default only one that Google vouches for.
        auth_hint: what else the user may lack where no key is accepted.
        connect_seconds: for a connection to be made.
        warm_up_seconds: how long a fresh worker may refuse.
        silence_seconds: after this long without a word we ask whether the other side lives, and wait as long again.
    """

    pod: str
    user: str
    key: Path
    addresses: Sequence[str]
    host_keys: Callable[[], Sequence[str]]
    ssh_config: Path | None = None
    tunnel: Callable[[int, float], Any] | None = None
    way: str = "its address"
    kept: Path | None = None
    incarnation: str = ""
    trust_on_first_use: bool = False
    auth_hint: str = ""
    connect_seconds: float = 15.0
    warm_up_seconds: float = 300.0
    silence_seconds: float = 15.0
