"""The permissions that a plan uses of its caller: those of `up`, follow and `down`, and those of `down --all`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from conf.schema.cloud import permissions_of_method, permissions_of_role
from conf.schema.config import Config
from controller.config.run_yaml import bucket_name
from controller.inputs.env_inputs import Vault
from controller.plan.samplers import sampler_config
from controller.resources.accounts import AccountRoles, BucketRoles, ProjectRoles, Roles
from controller.resources.pod.planes import planes_for

ROLES = (
    "roles/tpu.admin", "roles/iam.serviceAccountUser", "roles/iap.tunnelResourceAccessor", "roles/storage.admin",
    "roles/compute.networkAdmin", "roles/compute.securityAdmin", "roles/iam.serviceAccountAdmin",
    "roles/resourcemanager.projectIamAdmin", "roles/serviceusage.serviceUsageAdmin",
    "roles/secretmanager.secretAccessor", "roles/compute.storageAdmin", "roles/compute.instanceAdmin.v1",
    "roles/billing.costsManager",
)  # fmt: skip
"""Predefined roles to suggest; the first that contains a permission."""

ALWAYS, MAKE, CHANGE, REMOVE = "always", "unless it exists", "to change it", "down --all"
KINDS = PROJECT_KIND, BUCKET_KIND, ACCOUNT_KIND, BILLING_KIND = (
    "project",
    "bucket",
    "service account",
    "billing account",
)


@dataclass(frozen=True)
class Use:
    """Methods that one part of a plan calls: `tpu projects.locations.nodes.get`, or a permission alone.

    Attributes:
        part: what needs them.
        always: those of every `up`, follow and `down`.
        make: those of an `up` that must create the part.
        change: those that change the part where it exists but differs.
        remove: those of `down --all`.
    """

    part: str
    always: tuple[str, ...] = ()
    make: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    change: tuple[str, ...] = ()
    account: str = "workers"
    """Whose service account it attaches, if it needs iam.serviceAccounts.actAs: workers or driver."""


ACT_AS = "iam.serviceAccounts.actAs"
RUN = (
    Use("every request", always=("serviceusage.services.use",)),
    Use("Google APIs", ("serviceusage services.batchGet",),
        ("serviceusage services.batchEnable", "serviceusage operations.get")),
    Use("checks of quota, billing and offer", always=(
        "cloudbilling projects.getBillingInfo", "serviceusage services.consumerQuotaMetrics.list",
        "compute regions.get")),
    Use("checks of the project and its organization", always=(
        "cloudresourcemanager projects.get", "cloudresourcemanager projects.getEffectiveOrgPolicy")),
    Use("code, records and results in the bucket", always=(
        "storage buckets.get", "storage objects.get", "storage objects.list", "storage objects.insert",
        "storage objects.delete")),
    Use("SSH", always=("compute firewalls.list",)),
)  # fmt: skip
BUCKET = Use(
    "bucket",
    make=("storage buckets.insert",),
    remove=("storage buckets.delete", "storage buckets.list", "storage objects.list", "storage objects.delete"),
    change=("storage buckets.patch",),
)
NETWORK = (
    Use("network", ("compute networks.get",), ("compute networks.insert", "compute globalOperations.wait"), (
        "compute networks.delete", "compute globalOperations.wait", "compute firewalls.list",
        "compute subnetworks.aggregatedList", "compute routers.aggregatedList", "compute instances.aggregatedList",
        "compute instanceGroupManagers.aggregatedList")),
    Use("firewall rules", ("compute firewalls.get",), ("compute firewalls.insert",), ("compute firewalls.delete",),
        change=("compute firewalls.patch",)),
    Use("subnet", ("compute subnetworks.get",), ("compute subnetworks.insert", "compute regionOperations.wait"),
        ("compute subnetworks.delete", "compute regionOperations.wait"),
        change=("compute subnetworks.patch", "compute subnetworks.setPrivateIpGoogleAccess")),
)  # fmt: skip
NAT = Use(
    "NAT", ("compute routers.get", "compute routers.list"),
    ("compute routers.insert", "compute routers.patch", "compute regionOperations.wait"),
    ("compute routers.patch", "compute routers.delete"),
)  # fmt: skip
ACCOUNT = Use(
    "service account",
    ("iam projects.serviceAccounts.get",),
    ("iam projects.serviceAccounts.create",),
    ("iam projects.serviceAccounts.delete",),
)


def _use_of_policy(part: str, kind: type[Roles]) -> Use:
    written = (f"{kind.methods}.setIamPolicy",)
    return Use(part, (f"{kind.methods}.getIamPolicy",), written, written)


PROJECT_ROLES = _use_of_policy("roles in the project", ProjectRoles)
BUCKET_ROLES = _use_of_policy("roles on the bucket", BucketRoles)
ACCOUNT_ROLES = _use_of_policy("the bastion's roles on the workers' account", AccountRoles)
DATA_DISK = Use(
    "data disk",
    always=(
        "compute disks.insert", "compute disks.get", "compute disks.delete", "compute zoneOperations.get",
        "compute zoneOperations.wait", "compute.disks.setLabels"),
)  # fmt: skip
BASTION = (
    Use("bastion", always=(
        "compute machineTypes.get", "compute instances.get", "compute instances.insert", "compute instances.delete",
        "compute instances.getSerialPortOutput", "compute zoneOperations.wait", "compute projects.get",
        "compute.instances.setMetadata", "compute.instances.setLabels",
        "compute.instances.setServiceAccount", ACT_AS), account="driver"),
    Use("roles on the bastion", always=("compute instances.getIamPolicy", "compute instances.setIamPolicy")),
)  # fmt: skip
BILLING_BUDGET = Use(
    "billing budget",
    ("billingbudgets billingAccounts.budgets.list",),
    ("billingbudgets billingAccounts.budgets.create",),
    ("billingbudgets billingAccounts.budgets.delete",),
)


@dataclass(frozen=True)
class Need:
    """Permission that a plan uses of its caller.

    Attributes:
        permission: its name.
        kind: kind of resource whose policy decides, one of `KINDS`.
        name: name of that resource; a service account as the config names it.
        when: ALWAYS; MAKE or CHANGE, if it is used only to create or change something; or REMOVE, if `down --all`
            alone uses it.
        parts: what needs it.
    """

    permission: str
    kind: str
    name: str
    when: str
    parts: tuple[str, ...]

    @property
    def role(self) -> str:
        """Return the predefined role to suggest, or "" if none of `ROLES` contains the permission."""
        return next((role for role in ROLES if self.permission in permissions_of_role(role)), "")


def uses_of_plan(config: Config) -> Iterator[Use]:
    """Yield the parts of a config's plan and the methods that they call."""
    yield from RUN
    planes, sampler = planes_for(config), sampler_config(config)
    planes = (*planes, *(plane for plane in planes_for(sampler) if plane not in planes)) if sampler else planes
    pods = {"pod" if len(planes) == 1 else f"pod of {plane.title}": plane.methods for plane in planes}
    for part, calls in pods.items():
        yield Use("checks of quota, billing and offer", always=calls.check)
        yield Use(part, always=calls.observe)
    yield BUCKET
    if config.ssh.os_login == "auto":
        yield Use("OS Login", always=("compute projects.get",))
    # whether SSH goes through IAP, as far as the config can tell
    if config.ssh.method == "iap" or (config.ssh.method == "auto" and config.network.laptop is None):
        yield Use("SSH through IAP", always=("iap connect",))
    if Vault(config.secret_sources).apis:
        yield Use("secrets", always=("secretmanager projects.secrets.versions.access",))
    if config.cloud.billing_budget is not None:
        yield BILLING_BUDGET
    bastion = config.recovery.driver == "bastion"
    if bastion:
        yield from (*BASTION, *_account_uses(config.cloud.driver_service_account, config))
        if not config.network.nat:
            yield Use("bastion", always=("compute.subnetworks.useExternalIp",))
    if config.tpu.adopt:
        for calls in pods.values():
            yield Use("SSH key in the adopted pod", make=calls.add_key)
        return
    for part, calls in pods.items():
        yield Use(part, always=(*calls.own, ACT_AS), change=calls.change)
    yield from NETWORK
    yield from (NAT,) if config.network.nat else ()
    yield from _account_uses(config.cloud.service_account, config)
    yield from (DATA_DISK,) if config.tpu.data_disk_gb else ()
    if bastion:
        yield ACCOUNT_ROLES


def _account_uses(account: str, config: Config) -> Iterator[Use]:
    """Yield what an account needs; only one named by its id is created and gets roles."""
    if account == "default" or "@" in account:
        yield Use(ACCOUNT.part, ACCOUNT.always)
        return
    yield ACCOUNT
    if config.cloud.roles:
        yield PROJECT_ROLES
    if config.cloud.bucket_roles:
        yield BUCKET_ROLES


def permissions_of_plan(config: Config, project: str) -> list[Need]:
    """Return every permission that a config's plan uses of its caller, by resource and name."""
    found: dict[tuple[str, str, str], tuple[str, dict[str, None]]] = {}
    order = (ALWAYS, MAKE, CHANGE, REMOVE)
    for use in uses_of_plan(config):
        for when, calls in zip(order, (use.always, use.make, use.change, use.remove), strict=True):
            for permission in _permissions(calls):
                key = (permission, *_resource_of(permission, use, config, project))
                known, parts = found.get(key, (when, {}))
                found[key] = (min(known, when, key=order.index), parts | {use.part: None})
    needs = [Need(*key, when, tuple(parts)) for key, (when, parts) in found.items()]
    return sorted(needs, key=lambda need: (KINDS.index(need.kind), need.name, need.permission))


def _permissions(calls: Iterable[str]) -> Iterator[str]:
    for call in calls:
        api, space, method = call.partition(" ")
        yield from permissions_of_method(api, method) if space else (call,)


def _resource_of(permission: str, use: Use, config: Config, project: str) -> tuple[str, str]:
    """Return the kind and the name of the resource whose policy decides about a permission."""
    cloud = config.cloud
    if permission.startswith("storage.") and permission not in ("storage.buckets.create", "storage.buckets.list"):
        return BUCKET_KIND, bucket_name(config, project)
    if permission == ACT_AS:
        return ACCOUNT_KIND, cloud.driver_service_account if use.account == "driver" else cloud.service_account
    if permission.startswith("billing.") and cloud.billing_budget is not None:
        return BILLING_KIND, cloud.billing_budget.account
    return PROJECT_KIND, project
