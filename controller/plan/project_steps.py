"""Steps that all runs of a project share, those that `recovery.driver=bastion` adds to a plan, and the user's own.

The user's own (`code.resources`) are each an object of their class, as a resource.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import conf
import controller.resources
from conf.extension import OWN_STEP_METHODS, ExtensionError, OwnStep, load
from conf.schema.config import Config
from conf.schema.topology import subnet_range
from controller.context import Context
from controller.core.errors import CloudError, ConfigError, SlipwayError
from controller.gcp.answers import TAG
from controller.gcp.google_errors import NotFoundError
from controller.inputs.code import CodeSnapshot
from controller.inputs.env_inputs import Vault
from controller.inputs.modules import on_search_path
from controller.reconcile import Absent, Change, Diff, ObservedResources, Resource, Scope, difference
from controller.resources.accounts import AccountRoles, BastionRoles, BucketRoles, ProjectRoles, ServiceAccount
from controller.resources.bastion_vm import POD_LABEL, RUN_LABEL, Bastion, SlipwayPackage
from controller.resources.bucket import Bucket
from controller.resources.firewall import Firewall, InternalRule, LaptopRule
from controller.resources.pod.planes import account_roles
from controller.resources.services import BUDGET_APIS, BillingBudget, Services
from controller.resources.vpc import Nat, Network, PrivateAccess, Router, Subnet

FALLBACK_RANGE = "10.0.0.0/20"
"""Placeholder for a region that the table of ranges lacks; a check rejects such a region before anything is created."""


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
            on=bucket,
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
SECONDS_PER_DAY = 86_400


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
    days = config.cleanup.bastion_max_days
    roles = (*cloud.driver_roles, *account_roles(config), *disk)
    yield account
    yield ProjectRoles(name=account.name, account=account, roles=roles, depends_on=(account.id,))
    objects = BucketRoles(
        name=account.name, account=account, on=bucket, roles=cloud.bucket_roles, depends_on=(account.id, after[1])
    )
    yield objects
    works = [account.id, objects.id]
    if not config.tpu.adopt and cloud.service_account != cloud.driver_service_account:
        uses = AccountRoles(
            name=account.name,
            account=account,
            on=workers.name,
            roles=SERVICE_ACCOUNT_ROLES,
            depends_on=(account.id, workers.id),
        )
        yield uses
        works.append(uses.id)
    source = slipway_package()
    shipped = SlipwayPackage(name=source.sha256, bucket=bucket, snapshot=source, depends_on=after[1:])
    yield shipped
    machine = Bastion(
        name=bastion_name(config),
        zone=config.tpu.zone,
        machine_type=config.bastion_machine,
        network=config.network.name,
        subnetwork=config.network.subnet_name(config.region),
        external_ip=not config.network.nat,
        account=account,
        script=Path(controller.resources.__file__).with_name("bastion_boot.py").read_text(),
        labels={RUN_LABEL: run_id, POD_LABEL: config.pod_name},
        max_seconds=None if days is None else days * SECONDS_PER_DAY,
        run_id=run_id,
        depends_on=(*depends_on, *works, shipped.id),
    )
    yield machine
    yield BastionRoles(
        name=account.name,
        account=account,
        on=machine.name,
        zone=machine.zone,
        roles=SELF_DELETE_ROLES,
        depends_on=(machine.id,),
    )


def bastion_name(config: Config) -> str:
    return f"{config.pod_name[: 63 - len(ACCOUNT_SUFFIX)]}{ACCOUNT_SUFFIX}"


@dataclass(frozen=True, kw_only=True)
class OwnResource(Resource):
    """What the user's object reads, creates and deletes. One that differs is replaced if Slipway created it."""

    kind: ClassVar[str] = "own step"
    scope: ClassVar[Scope] = "shared"
    reference: str = field(compare=False)
    """`module:name` of the class, for messages."""
    step: OwnStep = field(compare=False)
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def apis(self) -> tuple[str, ...]:
        """Return the Google APIs that it needs."""
        return tuple(getattr(self.step, "apis", ()))

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        try:
            answer = self._call("read", self.step.read, context)
        except NotFoundError:
            return Absent()
        found = dict(answer) if isinstance(answer, Mapping) else {}
        managed = found.pop("managed", None)
        missing = sorted({*self.values} - found.keys())
        if not isinstance(managed, bool) or missing:
            lacks = "managed (true or false)" if not isinstance(managed, bool) else ", ".join(missing)
            raise CloudError(f"code.resources: {self.reference}.read must return a mapping with {lacks}")
        return replace(self, values=found, marked=managed)

    def diff(self, current: Absent | Resource) -> Diff:
        if not isinstance(current, OwnResource):
            return Diff("create", tuple(Change(key, None, value) for key, value in self.values.items()))
        return difference(self.values, current.values, frozenset(self.values))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        if diff.action == "replace":
            self._delete_ours(context, f"differs ({diff}) and was not created by Slipway; delete or change it by hand")
        self._call("create", self.step.create, context)

    def destroy(self, context: Context) -> None:
        self._delete_ours(context)

    def _delete_ours(self, context: Context, otherwise: str = "") -> None:
        current = self.observe(context, {})
        if isinstance(current, Absent):
            return
        if current.is_managed:
            self._call("delete", self.step.delete, context)
        elif otherwise:
            raise CloudError(f"{self.title} {otherwise}")

    def _call(self, name: str, method: Callable[[Any, str], Any], context: Context) -> Any:
        try:
            return method(context.google, context.project)
        except SlipwayError:
            raise
        except Exception as error:
            raise CloudError(f"code.resources: {self.reference}.{name} raised {error!r}") from error


KEY = "code.resources"


def with_own_steps(config: Config, folders: tuple[Path, ...], shared: tuple[Resource, ...]) -> tuple[Resource, ...]:
    """Return the resources with the user's own steps behind them; the APIs that these need are enabled too."""
    services = next((r for r in shared if isinstance(r, Services)), None)
    if services is None or not config.code.resources:
        return shared
    steps = tuple(own_steps(config, folders, (services.id,)))
    apis = dict.fromkeys([*services.apis, *(api for step in steps for api in step.apis)])
    return (*(replace(r, apis=tuple(apis)) if r is services else r for r in shared), *steps)


def own_steps(config: Config, folders: tuple[Path, ...], depends_on: tuple[str, ...]) -> Iterator[OwnResource]:
    """Yield a resource for each class that the config names.

    Raises ConfigError if a class is missing or raises, or makes objects that cannot be a step.

    Args:
        config: its `code.resources` are imported here.
        folders: where `code.modules` and shipped modules are.
        depends_on: ids of the resources that must exist first.
    """
    taken: dict[str, str] = {}
    for reference in config.code.resources:
        try:
            with on_search_path(config, *folders):
                step = load("resource kind", reference, KEY)(config)
        except ExtensionError as error:
            raise ConfigError(str(error)) from None
        except Exception as error:
            raise ConfigError(f"{KEY}: {reference} raised {error!r}") from error
        if problem := _problem(step):
            raise ConfigError(f"{KEY}: {reference} {problem}")
        if step.name in taken:
            raise ConfigError(f"{KEY}: {reference} and {taken[step.name]} have the same name, {step.name}")
        taken[step.name] = reference
        yield OwnResource(
            name=step.name, reference=reference, step=step, values=dict(step.wanted), depends_on=depends_on
        )


def _problem(step: object) -> str:
    """Return why an object cannot be a step of the plan; empty if it can."""
    if missing := [name for name in OWN_STEP_METHODS if not callable(getattr(step, name, None))]:
        return f"has no method {', '.join(missing)}"
    name = getattr(step, "name", None)
    if not isinstance(name, str) or not name:
        return "must have a name, a text"
    return "" if isinstance(getattr(step, "wanted", None), Mapping) else "must have `wanted`, a mapping"
