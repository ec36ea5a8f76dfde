"""What must be true on every worker of the pod: reachable, its venv, the code, run.yaml, and all of them verified.

Each kind holds one value per worker. A worker that cannot be reached is a value too, and only workers that differ are
acted on, all at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from controller.core.errors import WrongDevices
from controller.core.text import counted
from controller.gcp.client import GoogleError
from controller.reconcile.resource import Absent, Diff, Have, Resource, Scope
from controller.resources.uploads.code import CodeArchive
from controller.ssh.fleet import Answer, WorkersFailed, failures

if TYPE_CHECKING:
    from controller.context import Context
    from controller.resources.pod.node import Node
    from controller.ssh.fleet import Fleet

LOOK_SECONDS = 5.0
"""While workers do not answer, Google is asked so often whether the pod is still there."""
PEER_PORT = 8476
"""Where worker 0 listens while the others try to reach it; the port `jax.distributed` uses by default on TPU."""


@dataclass(frozen=True, kw_only=True)
class OnWorkers(Resource):
    """Something of which every worker of a node has its own."""

    scope: ClassVar[Scope] = "pod"
    node: str = field(compare=False)

    def fleet(self, world: Context, have: Have) -> Fleet:
        return world.fleet(have[self.node])

    def ask(self, world: Context, have: Have, read: Callable[[dict[str, Any]], Any], **payload: Any) -> tuple[Any, ...]:
        """`read` of every worker's observation; a worker that does not answer yields its error."""
        answers = self.fleet(world, have).look(self.id, payload)
        return tuple(read(a) if isinstance(a, dict) else str(a) for a in answers)

    def act(
        self, world: Context, have: Have, command: str, payload: dict[str, Any], diff: Diff, name: str
    ) -> list[dict[str, Any]]:
        """Send `command` to the workers on which the field `name` differs; returns their answers.

        Raises:
            WorkersFailed: what the workers that could not do it said.
        """
        change = next(c for c in diff.changes if c.field == name)
        old = change.old or (None,) * len(change.new)
        differing = [i for i, (was, wanted) in enumerate(zip(old, change.new, strict=True)) if was != wanted]
        answers = self.fleet(world, have).call_all(command, payload, workers=differing)
        raise_failures(answers, f"{self.title}: {command}")
        return [a for a in answers if isinstance(a, dict)]

    def destroy(self, world: Context) -> None:
        """Goes with its node."""


def raise_failures(answers: list[Answer], what: str) -> None:
    if failed := failures(answers):
        said: dict[str, list[str]] = {}
        for error in failed:
            said.setdefault(error.words, []).append(str(error.worker))
        reasons = "; ".join(f"worker {', '.join(who)}: {words}" for words, who in said.items())
        raise WorkersFailed(f"{what} failed: {reasons}", failed)


@dataclass(frozen=True, kw_only=True)
class SshAccess(OnWorkers):
    """Every worker answers over SSH, with the host key Google vouches for, and has this version of the agent."""

    kind: ClassVar[str] = "ssh"
    asks: dict[str, Any] = field(compare=False)
    """What the resources that follow will ask of every worker: it is asked here, once for all of them."""
    reachable: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"SSH to {counted(len(self.reachable), 'worker')}"

    def observe(self, world: Context, have: Have) -> Absent | Self:
        if not world.lets_us_in(have[self.node]):
            return Absent()
        answers = self.fleet(world, have).survey(self.asks)
        return replace(self, reachable=tuple("yes" if isinstance(a, dict) else str(a) for a in answers))

    def apply(self, world: Context, have: Have, diff: Diff) -> None:
        self.let_in(world, have[self.node])
        raise_failures(self.fleet(world, have).warm_up(partial(_has_gone, world, have[self.node], [])), self.title)

    def let_in(self, world: Context, node: Node) -> None:
        """Make our key known on the workers of a pod that someone else may have made."""
        if not world.lets_us_in(node):
            world.let_us_in(node)


def _has_gone(world: Context, node: Node, looks: list[float]) -> bool:
    """Is the pod not READY any more, so that its workers need not be waited for? `looks`: when Google was asked."""
    now = world.clock.steady()
    if looks and now - looks[-1] < LOOK_SECONDS:
        return False
    looks.append(now)
    try:
        seen = node.seen(world)
    except GoogleError:
        return False
    return seen.replaced or seen.state != "READY"


@dataclass(frozen=True, kw_only=True)
class WorkerCode(OnWorkers):
    """The code, unpacked; hashed anew at every look, so that one altered byte shows."""

    kind: ClassVar[str] = "worker code"
    bucket: str = field(compare=False)
    archive: CodeArchive = field(compare=False)
    tree: tuple[str, ...]

    @classmethod
    def wanted_on(cls, archive: CodeArchive, workers: int, **placing: Any) -> Self:
        name = archive.name
        return cls(name=name, bucket=archive.bucket, archive=archive, tree=(name,) * workers, **placing)

    @property
    def title(self) -> str:
        return f"code on {counted(len(self.tree), 'worker')}"

    def observe(self, world: Context, have: Have) -> Self:
        return replace(self, tree=self.ask(world, have, lambda a: a["code"], code=self.name))

    def apply(self, world: Context, have: Have, diff: Diff) -> None:
        payload = {
            "bucket": self.bucket,
            "object": self.archive.object,
            "sha256": self.archive.snapshot.archive_sha256,
            "tree": self.name,
        }
        self.act(world, have, "install_code", payload, diff, "tree")


@dataclass(frozen=True, kw_only=True)
class RunConfig(OnWorkers):
    """run.yaml and the environment of the program, byte for byte the same on every worker."""

    kind: ClassVar[str] = "run config"
    text: str = field(compare=False)
    variables: tuple[tuple[str, str], ...] = field(compare=False)
    sha256: tuple[str, ...]

    @classmethod
    def wanted_on(cls, run_id: str, text: str, variables: dict[str, str], workers: int, **placing: Any) -> Self:
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        pairs = tuple(sorted(variables.items()))
        return cls(name=run_id, text=text, variables=pairs, sha256=(sha256,) * workers, **placing)

    @property
    def title(self) -> str:
        return f"run.yaml on {counted(len(self.sha256), 'worker')}"

    def observe(self, world: Context, have: Have) -> Self:
        return replace(self, sha256=self.ask(world, have, lambda a: a["config"], run_id=self.name))

    def apply(self, world: Context, have: Have, diff: Diff) -> None:
        payload = {"run_id": self.name, "text": self.text, "env": dict(self.variables)}
        self.act(world, have, "write_config", payload, diff, "sha256")


@dataclass(frozen=True, kw_only=True)
class Verified(OnWorkers):
    """The devices JAX finds on each worker, and whether each reaches worker 0; probed once per boot of the VMs."""

    kind: ClassVar[str] = "verified"
    venv: str = field(compare=False)
    backend: str = field(compare=False)
    probe_devices: bool = field(compare=False)
    devices: tuple[int, ...]
    reach_worker_0: tuple[bool, ...]

    @property
    def title(self) -> str:
        return f"verify {counted(len(self.devices), 'worker')}: devices, network"

    def observe(self, world: Context, have: Have) -> Self:
        answers = self.fleet(world, have).look(self.id, {})
        raise_failures(answers, self.title)
        rows = [a for a in answers if isinstance(a, dict)]
        found = tuple(_devices(row, self.backend) for row in rows)
        return replace(
            self,
            devices=found if self.probe_devices else self.devices,
            reach_worker_0=tuple(bool(row["peers"] and row["peers"]["reachable"]) for row in rows),
        )

    def apply(self, world: Context, have: Have, diff: Diff) -> None:
        fleet = self.fleet(world, have)
        answers = fleet.call_all("probe_peers", peer_payloads(have[self.node]))
        raise_failures(answers, self.title)
        rows = [a for a in answers if isinstance(a, dict)]
        cut_off = [f"worker {i}: {row['detail']}" for i, row in enumerate(rows) if not row["reachable"]]
        if cut_off:
            raise WorkersFailed(
                "the workers do not reach each other; is there a firewall rule that allows tcp inside the subnet? "
                + "; ".join(cut_off), []
            )  # fmt: skip
        if not self.probe_devices:
            return
        answers = fleet.call_all("probe_devices", {"venv": self.venv})
        raise_failures(answers, self.title)
        rows = [a for a in answers if isinstance(a, dict)]
        if any(
            (r["local_devices"], r["backend"]) != (n, self.backend) for r, n in zip(rows, self.devices, strict=True)
        ):
            seen = [f"{row['local_devices']} {row['backend']}" for row in rows]
            table = "; ".join(f"worker {i}: {found}" for i, found in enumerate(seen))
            raise WrongDevices(f"each worker should have {self.devices[0]} {self.backend} devices, but {table}", seen)


def peer_payloads(node: Any) -> list[dict[str, Any]]:
    """What the workers of an observed node are sent so that each tries to reach worker 0; all at the same time."""
    addresses = [endpoint.internal for endpoint in getattr(node, "endpoints", ())]
    return [{"index": i, "addresses": addresses, "port": PEER_PORT} for i in range(len(addresses))]


def _devices(row: dict[str, Any], backend: str) -> int | None:
    known = row["devices"]
    return known["local_devices"] if known and known["backend"] == backend else None
