"""From a config to the resources that must exist before its program can start: one DAG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config
from controller.resource import Resource
from controller.resources.accounts import ProjectRoles, ServiceAccount
from controller.resources.bucket import Bucket
from controller.resources.code import CodeArchive
from controller.resources.dataset import DatasetCopy, manifest, prefix
from controller.resources.firewall import Firewall
from controller.resources.nat import Nat, Router
from controller.resources.network import Network, Subnet
from controller.resources.node import TAG, Node
from controller.resources.services import Services
from controller.resources.workers import RunConfig, SshAccess, Venv, Verified, WorkerCode
from controller.runfile import render
from controller.snapshot import Snapshot, snapshot

LOCK = Path(__file__).parents[1] / "conf" / "requirements.txt"


@dataclass(frozen=True)
class Plan:
    """Everything decided: what must exist, under which names, and what the program will read."""

    config: Config
    project: str
    run_id: str
    bucket: str
    snapshot: Snapshot
    run_yaml: str
    resources: tuple[Resource, ...]

    @property
    def node(self) -> Node:
        return next(r for r in self.resources if isinstance(r, Node))

    @property
    def argv(self) -> list[str]:
        """The program's argument list, the same on every worker; run.yaml is in $SLIPWAY_RUN_DIR, one folder up."""
        if self.config.program.kind == "trainer":
            return ["python", "-m", "trainer", "../run.yaml"]
        return list(self.config.program.command)

    def of_scope(self, *scopes: str) -> list[Resource]:
        return [r for r in self.resources if r.scope in scopes]


def build(config: Config, project: str, folder: Path) -> Plan:
    """Pure but for reading the code and the datasets.

    Args:
        project: the resolved project id.
        folder: where the user stands; `program=command` ships the repository around it.

    Raises:
        ConfigError: code or data that is not there.
    """
    code = snapshot(config, folder)
    bucket = config.cloud.bucket or f"{project}-slipway-{config.region}"
    cache = Path(config.run.state_dir).expanduser() / "downloads"
    manifests = {name: manifest(name, data, cache) for name, data in config.assets.datasets.items()}
    run_id = config.run_id(code.sha256, {name: m.sha256 for name, m in manifests.items()})
    datasets = tuple(
        DatasetCopy(name=name, bucket=bucket, manifest=m, needs=(f"bucket/{bucket}",)) for name, m in manifests.items()
    )
    run_yaml = render(config, run_id, bucket, {name: prefix(name, m) for name, m in manifests.items()})
    shared = tuple(_shared(config, bucket))
    archive = CodeArchive(name=code.sha256, bucket=bucket, snapshot=code, needs=(f"bucket/{bucket}",))
    # A billed TPU never waits for an upload or a permission: everything shared comes before it.
    node = _node(config, tuple(r.id for r in (*shared, *datasets, archive)))
    workers = tuple(_workers(config, node, archive, run_id, run_yaml))
    return Plan(config, project, run_id, bucket, code, run_yaml, (*shared, *datasets, archive, node, *workers))


def _shared(config: Config, bucket: str) -> Iterator[Resource]:
    cloud, net, region = config.cloud, config.network, config.region
    services = Services(name="apis", apis=cloud.apis)
    yield services
    account = ServiceAccount(name=cloud.service_account, needs=(services.id,))
    yield account
    yield ProjectRoles(name=cloud.service_account, roles=cloud.roles, needs=(account.id,))
    yield Bucket(name=bucket, location=region, needs=(services.id,))
    network = Network(name=net.name, mtu=net.mtu, needs=(services.id,))
    yield network
    subnet = Subnet(name=f"{net.name}-{region}", region=region, network=net.name, cidr=net.cidr, needs=(network.id,))
    yield subnet
    if net.nat:
        router = Router(name=f"{net.name}-{region}", region=region, network=net.name, needs=(subnet.id,))
        yield router
        yield Nat(name=f"{net.name}-{region}", region=region, router=router.name, needs=(router.id,))
    yield Firewall(
        name=f"{net.name}-allow-ssh",
        network=net.name,
        allowed=("tcp:22",),
        source_ranges=tuple(sorted(net.ssh_source_ranges)),
        target_tags=(TAG,),
        needs=(network.id,),
    )
    yield Firewall(
        name=f"{net.name}-allow-internal-{region}",
        network=net.name,
        allowed=("icmp", "tcp", "udp"),
        source_ranges=(net.cidr,),
        target_tags=(),
        needs=(network.id,),
    )


def _node(config: Config, needs: tuple[str, ...]) -> Node:
    return Node(
        name=config.pod_name,
        zone=config.tpu.zone,
        workers=config.topology.workers,
        service_account=config.cloud.service_account,
        max_create_attempts=config.recovery.max_create_attempts,
        create_seconds=60 * config.tpu.create_minutes,
        accelerator_type=config.tpu.accelerator_type,
        runtime_version=config.tpu.runtime_version or config.topology.runtime_version,
        capacity=config.tpu.capacity,
        network=config.network.name,
        subnetwork=f"{config.network.name}-{config.region}",
        external_ip=config.tpu.external_ip,
        needs=needs,
    )


def _workers(config: Config, node: Node, code: CodeArchive, run_id: str, run_yaml: str) -> Iterator[Resource]:
    n = node.workers
    ssh = SshAccess(name=node.name, node=node.id, reachable=("yes",) * n, needs=(node.id,))
    yield ssh
    lock = LOCK.read_text() if config.env.packages == "lock" else ""
    venv = Venv.wanted_on(n, config.env, lock, node=node.id, needs=(ssh.id,))
    yield venv
    shipped = WorkerCode(
        name=code.name, node=node.id, bucket=code.bucket, archive=code, tree=(code.name,) * n, needs=(ssh.id, code.id)
    )
    yield shipped
    placed = RunConfig.wanted_on(n, run_id, run_yaml, config.env.vars, node=node.id, needs=(ssh.id,))
    yield placed
    yield Verified(
        name=node.name,
        node=node.id,
        venv=venv.fingerprint_argument,
        backend="cpu" if config.cloud.kind == "local" else "tpu",
        devices=(config.topology.devices_per_worker,) * n,
        reach_worker_0=(True,) * n,
        probe_devices=config.program.kind == "trainer",
        needs=(venv.id, shipped.id, placed.id),
    )
