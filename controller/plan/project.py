"""Resources that all runs of a project share, and those that `recovery.driver=bastion` adds to a plan."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import conf
import controller.resources
from conf.schema.config import Config
from conf.schema.infra.cloud import HereCloud
from conf.schema.infra.topology import subnet_range
from controller.gcp.names import TAG
from controller.inputs.code import CodeSnapshot
from controller.inputs.secrets import Vault
from controller.reconcile.resource import Resource
from controller.resources.accounts import BucketRoles, ProjectRoles, ServiceAccount
from controller.resources.bastion_vm import AccountRoles, Bastion, BastionRoles, SlipwayPackage
from controller.resources.bucket import Bucket
from controller.resources.firewall import Firewall, InternalRule, LaptopRule
from controller.resources.pod.planes import account_roles
from controller.resources.services import BUDGET_APIS, BillingBudget, Services
from controller.resources.vpc import Nat, Network, PrivateAccess, Router, Subnet

FALLBACK_RANGE = "10.0.0.0/20"
"""Placeholder for a region that the table of ranges lacks; a check rejects such a region before anything is created."""


def bucket_name(config: Config, project: str) -> str:
    """Return a bucket name that is unlikely to be taken: bucket names are global across Google Cloud.

    For `cloud=here` it is the absolute path of a folder.
    """
    if isinstance(config.cloud, HereCloud):
        folder = config.cloud.folder or f"{config.run.state_dir}/here/store"
        return str(Path(folder).expanduser().absolute())
    location = config.cloud.bucket_location or config.region
    return config.cloud.bucket or f"{project.replace(':', '-').replace('.', '-')}-slipway-{location}"


def shared_resources(config: Config, bucket: str) -> Iterator[Resource]:
    cloud = config.cloud
    wanted = (*cloud.apis, *(BUDGET_APIS if cloud.billing_budget else ()), *Vault(config.secret_sources).apis)
    services = Services(name="apis", apis=tuple(dict.fromkeys(wanted)))
    yield services
    if (budget := cloud.billing_budget) is not None:
        yield BillingBudget(
            name="slipway",
            account=budget.account,
            usd=budget.usd,
            thresholds=budget.thresholds,
            depends_on=(services.id,),
        )
    account = ServiceAccount(name=cloud.service_account, depends_on=(services.id,))
    if not config.tpu.adopt:
        yield account
    store = Bucket(
        name=bucket,
        location=cloud.bucket_location or config.region,
        regions=config.regions,
        soft_delete_days=cloud.soft_delete_days,
        noncurrent_days=cloud.noncurrent_days,
        unfinished_upload_days=cloud.unfinished_upload_days,
        depends_on=(services.id,),
    )
    yield store
    if config.tpu.adopt:
        return  # an adopted pod already has its network and its account
    if cloud.roles:
        roles = tuple(dict.fromkeys((*cloud.roles, *account_roles(config))))
        yield ProjectRoles(name=account.name, account=account, roles=roles, depends_on=(account.id,))
    if cloud.bucket_roles:
        yield BucketRoles(
            name=account.name,
            account=account,
            bucket=bucket,
            roles=cloud.bucket_roles,
            depends_on=(account.id, store.id),
        )
    yield from _network(config, services)


def _network(config: Config, services: Services) -> Iterator[Resource]:
    net = config.network
    network = Network(name=net.name, auto=net.mode == "auto", mtu=net.mtu, depends_on=(services.id,))
    yield network
    yield Firewall(
        name=f"{net.name}-allow-ssh",
        network=net.name,
        allowed=("tcp:22",),
        source_ranges=net.all_ssh_source_ranges,
        target_tags=(TAG,),
        depends_on=(network.id,),
    )
    if net.laptop == "auto":
        yield LaptopRule(
            name=f"{net.name}-allow-laptop",
            network=net.name,
            allowed=("tcp:22",),
            source_ranges=None,
            target_tags=(TAG,),
            depends_on=(network.id,),
        )
    for region in config.regions:
        yield from _regional_resources(config, network, region)


def _regional_resources(config: Config, network: Network, region: str) -> Iterator[Resource]:
    """Yield the parts of the network that exist once per region."""
    net = config.network
    subnet = Subnet(
        name=net.subnet_name(region),
        region=region,
        network=net.name,
        block=net.cidr or subnet_range(region) or FALLBACK_RANGE,
        cidr=net.cidr,
        depends_on=(network.id,),
    )
    yield subnet
    inside = InternalRule(
        name=f"{net.name}-allow-internal-{region}",
        network=net.name,
        subnet=subnet.name,
        subnet_region=region,
        allowed=("icmp", "tcp", "udp"),
        source_ranges=None,
        target_tags=(),
        depends_on=(subnet.id,),
    )
    yield inside
    yield PrivateAccess(name=subnet.name, region=region, rule=inside.name, depends_on=(subnet.id, inside.id))
    if net.nat:
        name = f"{net.name}-{region}"
        router = Router(name=name, region=region, network=net.name, subnet=subnet.name, depends_on=(subnet.id,))
        yield router
        yield Nat(name=name, region=region, network=net.name, subnet=subnet.name, depends_on=(router.id,))


ACCOUNT_SUFFIX = "-driver"
SELF_DELETE_ROLES = ("roles/compute.instanceAdmin.v1",)
SERVICE_ACCOUNT_ROLES = ("roles/iam.serviceAccountUser",)
DISK_ROLE = "roles/compute.storageAdmin"


def slipway_package() -> CodeSnapshot:
    """Return the source of this installation, without the trainer and the emulated cloud."""
    root = Path(conf.__file__).parents[1]
    found = [p for name in ("conf", "controller") for p in (root / name).rglob("*") if _is_shipped(p, root)]
    return CodeSnapshot(root, tuple(sorted(p.relative_to(root).as_posix() for p in found)))


def _is_shipped(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    return path.is_file() and "__pycache__" not in parts and parts[:2] != ("controller", "localcloud")


def bastion_resources(config: Config, bucket: str, run_id: str, depends_on: Sequence[str]) -> Iterator[Resource]:
    """Yield the resources in the order of creation; `depends_on` are the ids that its controller relies on."""
    cloud, after = config.cloud, (f"{Services.kind}/apis", f"{Bucket.kind}/{bucket}")
    account = ServiceAccount(name=cloud.driver_service_account, depends_on=after[:1])
    workers = ServiceAccount(name=cloud.service_account)
    disk = (DISK_ROLE,) if config.tpu.data_disk_gb else ()
    roles = (*cloud.driver_roles, *account_roles(config), *disk)
    yield account
    yield ProjectRoles(name=account.name, account=account, roles=roles, depends_on=(account.id,))
    objects = BucketRoles(
        name=account.name, account=account, bucket=bucket, roles=cloud.bucket_roles, depends_on=(account.id, after[1])
    )
    yield objects
    works = [account.id, objects.id]
    if not config.tpu.adopt and cloud.service_account != cloud.driver_service_account:
        uses = AccountRoles(
            name=account.name,
            account=account,
            on=workers,
            roles=SERVICE_ACCOUNT_ROLES,
            depends_on=(account.id, workers.id),
        )
        yield uses
        works.append(uses.id)
    source = slipway_package()
    shipped = SlipwayPackage(name=source.sha256, bucket=bucket, snapshot=source, depends_on=after[1:])
    yield shipped
    machine = Bastion(
        name=f"{config.pod_name[: 63 - len(ACCOUNT_SUFFIX)]}{ACCOUNT_SUFFIX}",
        zone=config.tpu.zone,
        machine_type=config.bastion_machine,
        pod=config.pod_name,
        network=config.network.name,
        subnetwork=config.network.subnet_name(config.region),
        external_ip=not config.network.nat,
        account=account,
        script=Path(controller.resources.__file__).with_name("bastion_boot.py").read_text(),
        max_days=config.cleanup.bastion_max_days,
        run_id=run_id,
        depends_on=(*depends_on, *works, shipped.id),
    )
    yield machine
    yield BastionRoles(
        name=account.name, account=account, bastion=machine, roles=SELF_DELETE_ROLES, depends_on=(machine.id,)
    )
