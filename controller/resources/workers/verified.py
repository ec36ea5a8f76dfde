"""Probe of every worker: its devices, their health, and its connection to worker 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from controller.agent.protocol import (
    CHECK_HEALTH,
    PROBE_DEVICES,
    PROBE_PEERS,
    Devices,
    Observation,
    ObserveRequest,
    ProbePeersRequest,
)
from controller.context import Context
from controller.core.errors import WrongDevicesError
from controller.core.text import plural
from controller.reconcile.resource import Absent, Diff, ObservedResources, Pending
from controller.resources.pod.node import Node
from controller.resources.workers.base import WorkerResource, raise_failures
from controller.resources.workers.health import require_health, summarize
from controller.ssh.fleet import WorkersFailedError

PEER_PORT = 8476
"""Port on which worker 0 listens during the probe; not 8482, which the coordinator of a running JAX program holds."""
LIBTPU = frozenset({"libtpu", "libtpu-nightly"})
"""Distributions that contain libtpu.so."""


@dataclass(frozen=True, kw_only=True)
class DeviceProbe(WorkerResource):
    """Devices that JAX sees on each worker, their health, and whether it reaches worker 0; once per boot of the VMs."""

    kind: ClassVar[str] = "verified"
    venv: str = field(compare=False)
    backend: str = field(compare=False)
    probe_devices: bool = field(compare=False)
    """Whether the program certainly runs JAX, as the bundled trainer does."""
    health_check: bool = field(default=False, compare=False)
    """Whether to check the chips of a program that has JAX."""
    needs_libtpu: bool = field(default=False, compare=False)
    """Whether JAX must not fall back to the CPU."""
    devices_per_chip: int = field(default=1, compare=False)
    devices: tuple[int | None, ...]
    reach_worker_0: tuple[bool, ...]
    healthy: tuple[bool, ...]
    libtpu: tuple[bool, ...]

    @property
    def title(self) -> str:
        return f"verify {plural(len(self.devices), 'worker')}: devices, network"

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        rows = self._look(context, observed)
        examined = self._is_examined(rows) and not any(row["active"] for row in rows)
        found = tuple(_devices(row["devices"], self.backend) for row in rows)
        return replace(
            self,
            devices=found if self.probe_devices or examined else self.devices,
            reach_worker_0=tuple(bool(row["peers"] and row["peers"]["reachable"]) for row in rows),
            healthy=tuple(not examined or row["health"] is not None for row in rows),
            libtpu=tuple(not (self.needs_libtpu and lacks_libtpu(_versions(row))) for row in rows),
        )

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        fleet = self.fleet(context, observed)
        rows = self._look(context, observed) if self.needs_libtpu or self.health_check else []
        if self.needs_libtpu and (without := [str(i) for i, row in enumerate(rows) if lacks_libtpu(_versions(row))]):
            raise WrongDevicesError(
                f"worker {', '.join(without)}: the program's Python has JAX, but not libtpu, so it would run on the "
                "CPU; install jax[tpu] (env.requirements or program.setup), set env.vars.TPU_LIBRARY_PATH to your own "
                "libtpu.so, or set program.needs_chips=false"
            )
        answers = fleet.call_all(PROBE_PEERS, peer_payloads(observed[self.node]))
        raise_failures(answers, self.title)
        peers = [a for a in answers if isinstance(a, dict)]
        cut_off = [f"worker {i}: {row['detail']}" for i, row in enumerate(peers) if not row["reachable"]]
        if cut_off:
            raise WorkersFailedError(
                "the workers cannot reach each other; does a firewall rule allow tcp inside the subnet? "
                + "; ".join(cut_off), []
            )  # fmt: skip
        if self._is_examined(rows) and not any(row["active"] for row in rows):
            self._check_health(context, observed)
        elif self.probe_devices:
            answers = fleet.call_all(PROBE_DEVICES, {"venv": self.venv})
            raise_failures(answers, self.title)
            self._require_devices([a for a in answers if isinstance(a, dict)])
        if self.health_check and not self._is_examined(rows):
            context.events.note(self.id, "the health check of the chips is skipped: the program's Python has no JAX")

    def _check_health(self, context: Context, observed: ObservedResources) -> None:
        answers = self.fleet(context, observed).call_all(
            CHECK_HEALTH, {"venv": self.venv, "processes": len(self.healthy)}
        )
        raise_failures(answers, self.title)
        found = [a for a in answers if isinstance(a, dict)]
        require_health(found, self.devices_per_chip)
        self._require_devices(found)
        context.events.note(self.id, summarize(found))

    def _require_devices(self, rows: Sequence[Devices]) -> None:
        wanted = [(n, self.backend) for n in self.devices]
        if [(row["local_devices"], row["backend"]) for row in rows] != wanted:
            current = [f"{row['local_devices']} {row['backend']}" for row in rows]
            table = "; ".join(f"worker {i}: {found}" for i, found in enumerate(current))
            raise WrongDevicesError(
                f"expected {self.devices[0]} {self.backend} devices on each worker, but {table}", current
            )

    def _look(self, context: Context, observed: ObservedResources) -> list[Observation]:
        question: ObserveRequest = {"venv": self.venv} if self.needs_libtpu or self.health_check else {}
        answers = self.fleet(context, observed).observe(self.id, question)
        raise_failures(answers, self.title)
        return [a for a in answers if isinstance(a, dict)]

    def _is_examined(self, rows: Sequence[Observation]) -> bool:
        """Return whether the health check can run: every worker has JAX, and on a TPU also libtpu."""
        versions = [_versions(row) for row in rows]
        on_tpu = self.backend == "tpu"
        return self.health_check and all("jax" in v and (not on_tpu or LIBTPU & v.keys()) for v in versions)


def lacks_libtpu(versions: Mapping[str, str]) -> bool:
    """Return whether JAX would silently run on the CPU. PyTorch/XLA also finds a libtpu.so of the system."""
    return "jax" in versions and "torch-xla" not in versions and not LIBTPU & versions.keys()


def peer_payloads(node: Absent | Pending | Node) -> list[ProbePeersRequest]:
    """Return the payloads with which all workers try to reach worker 0 at the same time."""
    addresses = [endpoint.internal for endpoint in node.status.endpoints] if isinstance(node, Node) else []
    return [{"index": i, "addresses": addresses, "port": PEER_PORT} for i in range(len(addresses))]


def _devices(known: Devices | None, backend: str) -> int | None:
    return known["local_devices"] if known and known["backend"] == backend else None


def _versions(row: Observation) -> dict[str, str]:
    return row["venv"]["versions"] if row["venv"] else {}
