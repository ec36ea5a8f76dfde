"""The SSH connections to a pod, kept for as long as its incarnation lives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from controller.ssh.fleet import Fleet


@dataclass(frozen=True)
class SshTarget:
    """A pod, as far as SSH needs to know it.

    Attributes:
        name: of the pod.
        node: full resource name of its node.
        uid: of this incarnation.
        zone: where it is.
        network: name or URL.
        addresses: of each worker, internal and external.
    """

    name: str
    node: str
    uid: str
    zone: str
    network: str
    addresses: tuple[tuple[str, str | None], ...]


class Fleets:
    """One fleet at a time: the connections to an earlier incarnation are closed."""

    def __init__(self, connect: Callable[[SshTarget], Fleet], lease: Callable[[], tuple[str, int]]) -> None:
        """Connect on first use.

        Args:
            lease: returns place and token of our lease; called before commands that change a worker.
        """
        self._connect, self._lease = connect, lease
        self._fleets: dict[str, Fleet] = {}
        self._lock = threading.Lock()

    def of(self, pod: SshTarget) -> Fleet:
        """Return the connections to a pod."""
        with self._lock:
            if pod.uid not in self._fleets:
                self._close()
                self._fleets[pod.uid] = self._connect(pod)
                self._fleets[pod.uid].guard = self._lease
            return self._fleets[pod.uid]

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        for uid in list(self._fleets):
            self._fleets.pop(uid).close()
