"""Resources that `recovery.driver=bastion` adds to a plan: a service account, the Slipway package and the VM."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import conf
import controller.resources.bastion
from conf.schema.config import Config
from controller.inputs.code import CodeSnapshot
from controller.reconcile.resource import Resource
from controller.resources.bastion.vm import AccountRoles, Bastion, BastionRoles, SlipwayPackage
from controller.resources.pod.planes import account_roles
from controller.resources.project.accounts import ServiceAccount
from controller.resources.project.bucket import Bucket
from controller.resources.project.roles import BucketRoles, ProjectRoles
from controller.resources.project.services import Services

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
        script=Path(controller.resources.bastion.__file__).with_name("boot.py").read_text(),
        max_days=config.cleanup.bastion_max_days,
        run_id=run_id,
        depends_on=(*depends_on, *works, shipped.id),
    )
    yield machine
    yield BastionRoles(
        name=account.name, account=account, bastion=machine, roles=SELF_DELETE_ROLES, depends_on=(machine.id,)
    )
