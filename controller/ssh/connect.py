"""Parameters of the SSH connections to a pod, and the error they raise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from controller.core.errors import SlipwayError

ConnectionFailure = Literal["refused", "timeout", "auth", "denied", "host_key", "dropped", "agent"]


class WorkerError(SlipwayError):
    """A worker is unreachable or failed a command. Calls to several workers return it as a value.

    `kind`: refused (nothing listens, or not yet), timeout, auth (the worker rejects our key), denied (Google or a
    gateway denies access), host_key (the host key does not match), dropped (the connection was lost), agent (the
    command failed there; see `detail`).
    """

    def __init__(self, worker: int, address: str, kind: ConnectionFailure, message: str, detail: str = "") -> None:
        super().__init__(f"worker {worker} ({address}): {message}")
        self.worker, self.address, self.kind, self.message, self.detail = worker, address, kind, message, detail


@dataclass(frozen=True)
class ConnectionParams:
    """Parameters of the SSH connections to the workers of a pod.

    Attributes:
        pod: name of the pod, for messages.
        user: user name on the workers.
        key: file of the private key.
        addresses: addresses of the workers, in worker order.
        host_keys: reads the keys that Google publishes now, per worker: lines of `TYPE KEY`.
        ssh_config: OpenSSH config to read instead of ~/.ssh/config and /etc/ssh/ssh_config.
        tunnel: opens a socket-like tunnel to port 22 of a worker, given a timeout in seconds; None: connect to the
            worker's address.
        route: name of this route, for messages.
        known_hosts_file: file that stores the host keys of this incarnation; None: they are not stored.
        incarnation: uid of the pod; stored host keys of another incarnation are dropped.
        trust_on_first_use: accept the first host key that a worker shows; by default only one that Google publishes.
        follow_host_keys: accept a changed host key that Google publishes, whether a repair was seen or not.
        auth_hint: permissions that the user may lack if a worker rejects the key.
        connect_seconds: timeout of a connection attempt.
        warm_up_seconds: how long a new worker may refuse connections.
        silence_seconds: probe a connection after this long without data, and drop it after as long again.
    """

    pod: str
    user: str
    key: Path
    addresses: Sequence[str]
    host_keys: Callable[[], Sequence[str]]
    ssh_config: Path | None = None
    tunnel: Callable[[int, float], Any] | None = None
    route: str = "its address"
    known_hosts_file: Path | None = None
    incarnation: str = ""
    trust_on_first_use: bool = False
    follow_host_keys: bool = False
    auth_hint: str = ""
    connect_seconds: float = 15.0
    warm_up_seconds: float = 300.0
    silence_seconds: float = 15.0
