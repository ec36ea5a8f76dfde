"""Facts from Google's pages that `conf/permissions.yaml` must agree with: it is written by hand, and a wrong row would
mislead the emulated cloud and `plan --permissions` alike. This table is written from the pages, not from that file.
"""

from conf.schema.cloud import all_permissions, permissions_of_method, permissions_of_role

COMPUTE = "https://cloud.google.com/compute/docs/reference/rest/v1"
STORAGE = "https://cloud.google.com/storage/docs/access-control/iam-json"
USAGE = "https://cloud.google.com/service-usage/docs/access-control"
ROLES = "https://cloud.google.com/iam/docs/roles-permissions"
UPDATE_POLICY = "compute.networks.updatePolicy"
METHODS: list[tuple[str, str, str, str]] = [
    # API, method, permissions, page
    *(
        ("compute", f"{kind}.{method}", f"compute.{kind}.{verb} {UPDATE_POLICY}", f"{COMPUTE}/{kind}/{method}")
        for kind in ("firewalls", "subnetworks", "routers")
        for method, verb in (("insert", "create"), ("delete", "delete"))
    ),
    ("compute", "networks.insert", "compute.networks.create", f"{COMPUTE}/networks/insert"),
    ("compute", "networks.delete", "compute.networks.delete", f"{COMPUTE}/networks/delete"),
    ("compute", "zoneOperations.wait", "compute.zoneOperations.get", f"{COMPUTE}/zoneOperations/wait"),
    ("compute", "disks.insert", "compute.disks.create", f"{COMPUTE}/disks/insert"),
    ("compute", "disks.delete", "compute.disks.delete", f"{COMPUTE}/disks/delete"),
    ("compute", "instances.delete", "compute.instances.delete", f"{COMPUTE}/instances/delete"),
    ("compute", "regions.get", "compute.regions.get", f"{COMPUTE}/regions/get"),
    ("serviceusage", "services.batchEnable", "serviceusage.services.enable", USAGE),
    ("serviceusage", "services.batchGet", "serviceusage.services.get", USAGE),
    ("serviceusage", "operations.get", "serviceusage.operations.get", USAGE),
    ("serviceusage", "services.consumerQuotaMetrics.list", "serviceusage.quotas.get", USAGE),
    ("storage", "buckets.insert", "storage.buckets.create", STORAGE),
    ("storage", "buckets.get", "storage.buckets.get", STORAGE),
    ("storage", "buckets.patch", "storage.buckets.get storage.buckets.update", STORAGE),
    ("storage", "buckets.setIamPolicy", "storage.buckets.setIamPolicy", STORAGE),
    ("storage", "objects.get", "storage.objects.get", STORAGE),
    ("storage", "objects.list", "storage.objects.list", STORAGE),
    ("storage", "objects.insert", "storage.objects.create", STORAGE),
    ("storage", "objects.compose", "storage.objects.create storage.objects.get", STORAGE),
    ("storage", "objects.delete", "storage.objects.delete", STORAGE),
    ("iam", "projects.serviceAccounts.create", "iam.serviceAccounts.create", ROLES),
    ("iam", "projects.serviceAccounts.setIamPolicy", "iam.serviceAccounts.setIamPolicy", ROLES),
    ("cloudresourcemanager", "projects.setIamPolicy", "resourcemanager.projects.setIamPolicy", ROLES),
    ("secretmanager", "projects.secrets.versions.access", "secretmanager.versions.access", ROLES),
    ("iap", "connect", "iap.tunnelInstances.accessViaIAP", "https://cloud.google.com/iap/docs/using-tcp-forwarding"),
    ("tpu", "projects.locations.nodes.create", "tpu.nodes.create", ROLES),
    ("tpu", "projects.locations.nodes.delete", "tpu.nodes.delete", ROLES),
    ("tpu", "projects.locations.operations.get", "tpu.operations.get", ROLES),
]
TPU_PERMISSIONS: dict[str, str] = {
    "acceleratortypes": "get list",
    "locations": "get list",
    "nodes": "create delete get list performMaintenance reimage reset simulateMaintenanceEvent start stop update",
    "operations": "get list",
    "runtimeversions": "get list",
}
"""Those of roles/tpu.admin: none of queued resources and none of guest attributes (IAM's role reference)."""
HOLDS: dict[str, str] = {
    "roles/owner": "iap.tunnelInstances.accessViaIAP resourcemanager.projects.setIamPolicy iam.serviceAccounts.actAs "
    "storage.buckets.create tpu.nodes.create secretmanager.versions.access",
    "roles/editor": "iam.serviceAccounts.actAs iam.serviceAccounts.create tpu.nodes.create compute.networks.create "
    "storage.buckets.create serviceusage.services.enable",
    "roles/tpu.admin": "tpu.nodes.create tpu.nodes.delete tpu.nodes.update tpu.nodes.stop tpu.operations.get",
    "roles/tpu.viewer": "tpu.nodes.get tpu.nodes.list tpu.operations.get",
    "roles/compute.networkAdmin": f"compute.networks.create compute.subnetworks.create compute.routers.create "
    f"{UPDATE_POLICY} compute.firewalls.get",
    "roles/compute.securityAdmin": f"compute.firewalls.create compute.firewalls.delete {UPDATE_POLICY}",
    "roles/compute.instanceAdmin.v1": "compute.instances.create compute.disks.create compute.subnetworks.use",
    "roles/iam.serviceAccountUser": "iam.serviceAccounts.actAs iam.serviceAccounts.get",
    "roles/iam.serviceAccountAdmin": "iam.serviceAccounts.create iam.serviceAccounts.setIamPolicy",
    "roles/iap.tunnelResourceAccessor": "iap.tunnelInstances.accessViaIAP",
    "roles/logging.logWriter": "logging.logEntries.create",
    "roles/serviceusage.serviceUsageAdmin": "serviceusage.services.enable serviceusage.services.use",
    "roles/serviceusage.serviceUsageConsumer": "serviceusage.services.use serviceusage.quotas.get",
    "roles/storage.admin": "storage.buckets.create storage.buckets.setIamPolicy storage.objects.create",
    "roles/storage.objectAdmin": "storage.objects.create storage.objects.delete storage.objects.get",
    "roles/storage.objectCreator": "storage.objects.create",
    "roles/storage.objectViewer": "storage.objects.get storage.objects.list",
    "roles/storage.legacyBucketReader": "storage.buckets.get storage.objects.list",
    "roles/secretmanager.secretAccessor": "secretmanager.versions.access",
}
LACKS: dict[str, str] = {
    "roles/owner": "storage.objects.get storage.buckets.get",
    "roles/editor": "iap.tunnelInstances.accessViaIAP resourcemanager.projects.setIamPolicy "
    "iam.serviceAccounts.setIamPolicy secretmanager.versions.access storage.objects.get",
    "roles/viewer": "tpu.nodes.create iam.serviceAccounts.actAs secretmanager.versions.access storage.objects.get",
    "roles/tpu.admin": "iam.serviceAccounts.actAs compute.networks.use",
    "roles/tpu.viewer": "tpu.nodes.create tpu.nodes.delete",
    "roles/compute.networkAdmin": "compute.firewalls.create compute.instances.create",
    "roles/compute.securityAdmin": "compute.networks.create compute.subnetworks.create",
    "roles/compute.instanceAdmin.v1": "compute.networks.create compute.firewalls.create iam.serviceAccounts.actAs",
    "roles/iam.serviceAccountUser": "iam.serviceAccounts.create iam.serviceAccounts.setIamPolicy",
    "roles/iam.serviceAccountAdmin": "iam.serviceAccounts.actAs resourcemanager.projects.setIamPolicy",
    "roles/serviceusage.serviceUsageConsumer": "serviceusage.services.enable",
    "roles/storage.objectAdmin": "storage.buckets.get",
    "roles/storage.objectCreator": "storage.objects.get storage.objects.delete storage.objects.list",
    "roles/storage.objectViewer": "storage.objects.create storage.buckets.get",
    "roles/storage.legacyBucketReader": "storage.objects.get storage.objects.create",
}
"""From IAM's role reference, as of 2026: https://cloud.google.com/iam/docs/roles-permissions."""


def test_a_method_needs_what_its_page_says() -> None:
    for api, method, permissions, page in METHODS:
        assert set(permissions_of_method(api, method)) == set(permissions.split()), page


def test_tpu_permissions_exist() -> None:
    known = {f"tpu.{kind}.{verb}" for kind, verbs in TPU_PERMISSIONS.items() for verb in verbs.split()}
    ours = {permission for permission in all_permissions() if permission.startswith("tpu.")}
    assert ours
    assert ours <= known


def test_a_role_holds_and_lacks() -> None:
    for role in {*HOLDS, *LACKS}:
        held = set(permissions_of_role(role))
        assert set(HOLDS.get(role, "").split()) - held == set(), role
        assert held & set(LACKS.get(role, "").split()) == set(), role
