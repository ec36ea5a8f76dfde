"""Keep the SSH connections to a pod for the lifetime of its incarnation."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from controller.gcp.worker_vms import WorkerVms
from controller.ssh.fleet import Fleet


@dataclass(frozen=True)
class SshTarget:
    """The facts about a pod that SSH needs.

    Attributes:
        name: name of the pod.
        vms: its VMs.
        uid: identifies this incarnation.
        zone: zone of the node.
        network: name or URL of its network.
        tags: network tags of its VMs, which firewall rules may aim at.
        addresses: internal and external address of each worker.
    """

    name: str
    vms: WorkerVms
    uid: str
    zone: str
    network: str
    tags: tuple[str, ...]
    addresses: tuple[tuple[str, str | None], ...]


class Fleets:
    """Holds one fleet at a time; a new incarnation closes the connections to the previous one."""

    def __init__(
        self,
        connect: Callable[[SshTarget], Fleet],
        lease: Callable[[], tuple[str, int]],
        note: Callable[[str], object] = lambda message: None,
    ) -> None:
        """Store the parameters.

        Args:
            connect: opens the connections to a pod.
            lease: returns place and token of our lease; it is called before commands that change a worker.
            note: shows the user a message.
        """
        self._connect, self._lease, self._note = connect, lease, note
        self._repaired: set[str] = set()
        self._fleets: dict[str, Fleet] = {}
        self._lock = threading.Lock()

    def of(self, pod: SshTarget) -> Fleet:
        with self._lock:
            if pod.uid not in self._fleets:
                self._close()
                self._fleets[pod.uid] = self._connect(pod)
                self._fleets[pod.uid].before_pod_write = self._lease
                self._fleets[pod.uid].note = self._note
                if pod.uid in self._repaired:
                    self._fleets[pod.uid].expect_new_host_keys()
            return self._fleets[pod.uid]

    def expect_new_host_keys(self, uid: str) -> None:
        """Accept a new host key that Google publishes once per worker: Google is repairing this incarnation's VMs."""
        with self._lock:
            self._repaired.add(uid)
            if fleet := self._fleets.get(uid):
                fleet.expect_new_host_keys()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        for uid in list(self._fleets):
            self._fleets.pop(uid).close()
