"""Probe of every worker: its devices, and its connection to worker 0."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from controller.agent.protocol import PROBE_DEVICES, PROBE_PEERS, Observation, ProbePeersQuestion
from controller.context import Context
from controller.core.errors import WrongDevicesError
from controller.core.text import plural
from controller.reconcile.resource import Absent, Diff, ObservedResources, Pending
from controller.resources.pod.node import Node
from controller.resources.workers.base import WorkerResource, raise_failures
from controller.ssh.fleet import WorkersFailedError

PEER_PORT = 8476
"""Port on which worker 0 listens during the probe; `jax.distributed` uses it by default on TPU."""


@dataclass(frozen=True, kw_only=True)
class DeviceProbe(WorkerResource):
    """Devices that JAX sees on each worker, and whether it reaches worker 0; probed once per boot of the VMs."""

    kind: ClassVar[str] = "verified"
    venv: str = field(compare=False)
    backend: str = field(compare=False)
    probe_devices: bool = field(compare=False)
    devices: tuple[int, ...]
    reach_worker_0: tuple[bool, ...]

    @property
    def title(self) -> str:
        return f"verify {plural(len(self.devices), 'worker')}: devices, network"

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        answers = self.fleet(context, observed).observe(self.id, {})
        raise_failures(answers, self.title)
        rows = [a for a in answers if isinstance(a, dict)]
        found = tuple(_devices(row, self.backend) for row in rows)
        return replace(
            self,
            devices=found if self.probe_devices else self.devices,
            reach_worker_0=tuple(bool(row["peers"] and row["peers"]["reachable"]) for row in rows),
        )

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        fleet = self.fleet(context, observed)
        answers = fleet.call_all(PROBE_PEERS, peer_payloads(observed[self.node]))
        raise_failures(answers, self.title)
        rows = [a for a in answers if isinstance(a, dict)]
        cut_off = [f"worker {i}: {row['detail']}" for i, row in enumerate(rows) if not row["reachable"]]
        if cut_off:
            raise WorkersFailedError(
                "the workers cannot reach each other; does a firewall rule allow tcp inside the subnet? "
                + "; ".join(cut_off), []
            )  # fmt: skip
        if not self.probe_devices:
            return
        answers = fleet.call_all(PROBE_DEVICES, {"venv": self.venv})
        raise_failures(answers, self.title)
        rows = [a for a in answers if isinstance(a, dict)]
        if any(
            (r["local_devices"], r["backend"]) != (n, self.backend) for r, n in zip(rows, self.devices, strict=True)
        ):
            current = [f"{row['local_devices']} {row['backend']}" for row in rows]
            table = "; ".join(f"worker {i}: {found}" for i, found in enumerate(current))
            raise WrongDevicesError(
                f"expected {self.devices[0]} {self.backend} devices on each worker, but {table}", current
            )


def peer_payloads(node: Absent | Pending | Node) -> list[ProbePeersQuestion]:
    """Return the payloads with which all workers try to reach worker 0 at the same time."""
    addresses = [endpoint.internal for endpoint in node.status.endpoints] if isinstance(node, Node) else []
    return [{"index": i, "addresses": addresses, "port": PEER_PORT} for i in range(len(addresses))]


def _devices(row: Observation, backend: str) -> int | None:
    known = row["devices"]
    return known["local_devices"] if known and known["backend"] == backend else None
