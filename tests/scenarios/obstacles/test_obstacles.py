"""What stands in the way of a first run, planted on the emulated cloud: alone and in pairs, each is named with a cure.

The config is one of Google Cloud, so that the checks of this machine look too. Nothing is changed, so nothing bills.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from google.oauth2.credentials import Credentials

from conf.schema.cloud import permissions_of_role
from controller.cli.verbs.doctor import examine
from controller.core.this_process import Clock
from controller.emulator import find_running
from controller.gcp.client import GoogleClient
from controller.localcloud.hub import HubServer
from controller.plan.needed_permissions import REMOVE, permissions_of_plan
from tests.composed import config_of
from tests.controller.localcloud.conftest import no_faults_remain, running
from tests.controller.localcloud.harness import EmulatedCloud
from tests.emulators import Emulators
from tests.fakes.context import make_context
from tests.hub import hub
from tests.planes import PLANES, Plane

__all__ = ["hub", "no_faults_remain"]
PROJECT = "slipway-local"
PROGRAM = ("program=command", "program.command=[python, train.py]", "env.packages=image")


def roles_for(*overrides: str) -> list[str]:
    """The roles with which `up` can do everything on a plane, each with a permission that no other of them has."""
    plan = permissions_of_plan(config_of("cloud=gcp", *PROGRAM, *overrides), PROJECT)
    needs = [need for need in plan if need.role and need.when != REMOVE]
    roles = list(dict.fromkeys(need.role for need in needs))
    holders = [[role for role in roles if need.permission in permissions_of_role(role)] for need in needs]
    return [role for role in roles if [role] in holders]


NEEDED = {plane.name: roles_for(*plane.one) for plane in PLANES}
OF_COMPUTE = "roles/compute.instanceAdmin.v1"
"""The role that pods of Compute Engine need besides."""
ROLES = (*NEEDED["tpu_api"], OF_COMPUTE)
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Obstacle:
    """Something in the way.

    Attributes:
        check: the check that must name it.
        words: part of what it says.
        cure: part of its cure.
        outcome: how bad it is called, "" if that depends.
        faults: of the emulated cloud.
        no_quota: names of quotas that are 0.
        without: a role that the caller lacks.
        off: an API that is not enabled.
        overrides: of the config.
        machine: prepares this machine; gets its state folder.
        client: the client of Google, if it is not the usual one.
        seconds_ahead: of this machine's clock.
        on_compute: what differs on Compute Engine, by name of an attribute.
    """

    check: str
    words: str
    cure: str
    outcome: str = "error"
    faults: tuple[Mapping[str, Any], ...] = ()
    no_quota: tuple[str, ...] = ()
    without: str = ""
    off: str = ""
    overrides: tuple[str, ...] = ()
    machine: Callable[[Path, pytest.MonkeyPatch], None] = lambda _, __: None
    client: Callable[[EmulatedCloud, Clock], GoogleClient] | None = None
    seconds_ahead: float = 0.0
    on_compute: Mapping[str, str] = field(default_factory=dict[str, str])


def refused(match: str, status: int = 403, reason: str | None = None, message: str = "Permission denied.") -> Any:
    fault = {"kind": "http", "status": status, "match": match, "times": 999, "message": message}
    return {**fault, **({"reason": reason} if reason else {})}


def policy(constraint: str, **of: str) -> Any:
    return {"kind": "policy", "constraint": constraint, **of}


def signed_in(cloud: EmulatedCloud, clock: Clock, quota_project: str | None = PROJECT, **changed: Any) -> GoogleClient:
    emulator = find_running(cloud.state)
    credentials = Credentials(token=None, quota_project_id=quota_project, **{**emulator.credentials, **changed})
    return GoogleClient(credentials, clock, emulator.roots)


def damage_key(home: Path, _: pytest.MonkeyPatch) -> None:
    folder = home / "keys" / PROJECT
    folder.mkdir(parents=True)
    (folder / "id_ed25519").write_text("no key\n")


def lose_key(home: Path, _: pytest.MonkeyPatch) -> None:
    (home / "keys" / PROJECT / "id_ed25519").mkdir(parents=True)


def spoil_ssh(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSH is not installed, and the SSH config has a line that only it understands."""
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text("Match exec true\n  ProxyCommand nc %h %p\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(home))


CONSUMER = "roles/serviceusage.serviceUsageAdmin"
"""Without it, the caller's requests may not count against the project."""
TUNNEL = "roles/iap.tunnelResourceAccessor"
"""Without it, workers without external addresses are out of reach."""
GRANT = "gcloud projects add-iam-policy-binding slipway-local --member="
OBSTACLES = {
    "no credentials": Obstacle(
        "credentials",
        "no Google credentials",
        "gcloud auth application-default login",
        client=lambda _, c: GoogleClient(None, c),
    ),
    "expired login": Obstacle(
        "credentials",
        "Google rejected the credentials",
        "gcloud auth application-default login",
        client=lambda cloud, clock: signed_in(cloud, clock, refresh_token="revoked"),
    ),
    "missing scope": Obstacle(
        "credentials",
        "insufficient authentication scopes",
        "gcloud auth application-default login",
        faults=(
            refused(
                r"^(GET|POST) ",
                reason="ACCESS_TOKEN_SCOPE_INSUFFICIENT",
                message="Request had insufficient authentication scopes.",
            ),
        ),
    ),
    "other quota project": Obstacle(
        "credentials",
        "required permission to use project elsewhere",
        "gcloud auth application-default set-quota-project",
        client=lambda cloud, clock: signed_in(cloud, clock, "elsewhere"),
    ),
    "unknown project": Obstacle(
        "project",
        "does not exist, or you have no access to it",
        "gcloud projects list",
        faults=(refused("cloudresourcemanager/v1/projects/"),),
    ),
    "API that the caller may not enable": Obstacle(
        "apis",
        "you may not enable them",
        "gcloud services enable tpu.googleapis.com --project=slipway-local",
        faults=({"kind": "denied", "permission": "serviceusage.services.enable"},),
        off="tpu",
    ),
    "billing off": Obstacle(
        "billing", "has no billing account", "gcloud billing projects link", faults=({"kind": "billing_disabled"},)
    ),
    "policy on external addresses": Obstacle(
        "organization",
        "compute.vmExternalIpAccess refuses external addresses",
        "gcloud resource-manager org-policies describe compute.vmExternalIpAccess",
        "warning",
        (policy("compute.vmExternalIpAccess"),),
        overrides=("tpu.external_ip=true",),
        on_compute={"outcome": "error"},
    ),
    "policy on locations": Obstacle(
        "organization",
        "gcp.resourceLocations refuses a new bucket in ",
        "gcloud resource-manager org-policies describe gcp.resourceLocations",
        faults=(policy("gcp.resourceLocations", location="europe-west4"),),
    ),
    "policy on shielded VMs": Obstacle(
        "organization",
        "compute.requireShieldedVm refuses VMs without secure boot, as those with TPUs are",
        "gcloud resource-manager org-policies describe compute.requireShieldedVm",
        faults=(policy("compute.requireShieldedVm"),),
        overrides=("tpu.plane=compute_engine",),
    ),
    "policy on service accounts": Obstacle(
        "organization",
        "iam.disableServiceAccountCreation refuses the new account slipway-runner",
        "gcloud resource-manager org-policies describe iam.disableServiceAccountCreation",
        faults=(policy("iam.disableServiceAccountCreation"),),
    ),
    "policies that may not be read": Obstacle(
        "organization",
        "organization was not checked: permission denied",
        "",
        "unknown",
        ({"kind": "denied", "permission": "orgpolicy.policy.get"},),
    ),
    "no quota for chips": Obstacle(
        "quota",
        "are needed",
        "slipway init",
        no_quota=("tpu-v6e", "tpu-v6e-preemptible", "tpus-per-tpu-family-ct6e", "preemptible-tpu-v6e"),
        on_compute={"cure": "https://console.cloud.google.com/iam-admin/quotas"},
    ),
    "no quota for chips of the region": Obstacle(
        "quota",
        " in all of us-",
        "slipway init",
        no_quota=(
            "tpu-v6e-per-region",
            "tpu-v6e-preemptible-per-region",
            "tpus-per-tpu-family-ct6e",
            "preemptible-tpu-v6e",
        ),
        on_compute={"words": "are needed", "cure": "https://console.cloud.google.com/iam-admin/quotas"},
    ),
    "no quota for addresses": Obstacle(
        "compute_quota",
        "of Compute quota IN_USE_ADDRESSES in ",
        "tpu.external_ip=false",
        no_quota=("IN_USE_ADDRESSES",),
        overrides=("tpu.external_ip=true",),
    ),
    "no quota for VMs": Obstacle(
        "compute_quota",
        "of Compute quota INSTANCES in ",
        "https://console.cloud.google.com/iam-admin/quotas",
        no_quota=("INSTANCES",),
    ),
    "no quota for CPUs": Obstacle(
        "compute_quota",
        "the bastion (e2-small) needs 2 of Compute quota E2_CPUS in ",
        "https://console.cloud.google.com/iam-admin/quotas",
        no_quota=("E2_CPUS",),
        overrides=("recovery.driver=bastion",),
    ),
    "no quota for CPUs of an older series": Obstacle(
        "compute_quota",
        "the bastion (n1-standard-4) needs 4 of Compute quota CPUS in ",
        "https://console.cloud.google.com/iam-admin/quotas",
        no_quota=("CPUS",),
        overrides=("recovery.driver=bastion", "cloud.driver_machine=n1-standard-4"),
    ),
    "no quota for CPUs in all regions": Obstacle(
        "compute_quota",
        "the bastion (e2-small) needs 2 of Compute quota CPUS_ALL_REGIONS in all regions",
        "https://console.cloud.google.com/iam-admin/quotas",
        no_quota=("CPUS_ALL_REGIONS",),
        overrides=("recovery.driver=bastion",),
    ),
    "no quota for disks": Obstacle(
        "compute_quota",
        "v6e-1 needs 50 of Compute quota HDB_TOTAL_GB in ",
        "https://console.cloud.google.com/iam-admin/quotas",
        "warning",
        no_quota=("HDB_TOTAL_GB",),
        overrides=("tpu.data_disk_gb=50",),
        on_compute={"words": "v6e-1 needs 250 of Compute quota HDB_TOTAL_GB in ", "outcome": "error"},
    ),
    "zone without the type": Obstacle(
        "type_offered",
        "Google offers no v6e-1 in us-west4-a",
        "gcloud compute tpus accelerator-types list --zone=us-west4-a",
        overrides=("tpu.zone=us-west4-a",),
        on_compute={"words": "Compute Engine offers no ct6e", "cure": "gcloud compute machine-types list"},
    ),
    "unknown image": Obstacle(
        "runtime_offered",
        "Google offers no image v2-alpha-tpuv6e9",
        "gcloud compute tpus tpu-vm versions list",
        overrides=("tpu.runtime_version=v2-alpha-tpuv6e9",),
        on_compute={"words": "Google has no image family v2-alpha-tpuv6e9", "cure": "gcloud compute images list"},
    ),
    "wrong clock": Obstacle("clock", "clock is 15:0", "sudo timedatectl set-ntp true", "warning", seconds_ahead=900.0),
    "damaged SSH key": Obstacle("ssh_key", "is damaged", "rm ", machine=damage_key),
    "unreadable SSH key": Obstacle("ssh_key", "cannot be read", "rm -r ", machine=lose_key),
    "no OpenSSH": Obstacle("ssh_config", "only OpenSSH reads that", "sudo apt-get install", machine=spoil_ssh),
    "bucket of someone else": Obstacle(
        "bucket_taken", "exists but you have no access", "cloud.bucket=", faults=(refused("storage/v1/b/"),)
    ),
    "gated weights, no license": Obstacle(
        "source",
        "is gated (40",
        "/acme/gated",
        overrides=("+assets.models.w.source=hf://acme/gated",),
    ),
    **{
        f"without {role}": Obstacle("permissions", f"{role} has it", GRANT, "", without=role)
        for role in ROLES
        if role not in (CONSUMER, TUNNEL)
    },
    f"without {TUNNEL}": Obstacle("permissions", f"{TUNNEL} has it", GRANT, without=TUNNEL),
    f"without {CONSUMER}": Obstacle(
        "credentials",
        "required permission to use project slipway-local",
        "gcloud auth application-default set-quota-project",
        without=CONSUMER,
    ),
}
PAIRS = random.Random(47).sample(sorted(itertools.combinations(sorted(OBSTACLES), 2)), 40)


class ShiftedClock(Clock):
    """A clock of this machine that is fast."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._booted += seconds


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory, emulators: Emulators) -> Iterator[EmulatedCloud]:
    yield from running(tmp_path_factory.mktemp("cloud") / "state", emulators)


@pytest.fixture
def look(
    cloud: EmulatedCloud, plane: Plane, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Rows]:
    """Look at a first run from a folder with a program, past the obstacles that are given."""
    monkeypatch.setenv("HOME", str(tmp_path))
    repository, home = tmp_path / "repository", tmp_path / "home"
    repository.mkdir()
    home.mkdir()
    (repository / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(repository)

    def looks(*planted: Obstacle) -> Rows:
        config = config_of(
            *("cloud=gcp", f"cloud.project={PROJECT}", f"run.state_dir={home}", *PROGRAM, *plane.one),
            *(word for one in planted for word in one.overrides),
        )
        without = {one.without for one in planted}
        settings = {
            "caller_roles": [role for role in ROLES if role not in without],
            "quotas": {name: 0 for one in planted for name in one.no_quota},
        }
        clock = ShiftedClock(sum(one.seconds_ahead for one in planted))
        with ExitStack() as stack:
            for api in filter(None, {one.off for one in planted}):
                stack.callback(cloud.establish)
                cloud.call_ok("POST", f"serviceusage/v1/projects/{PROJECT}/services/{api}.googleapis.com:disable", {})
            stack.enter_context(cloud.settings(**settings))
            cloud.script(*(fault for one in planted for fault in one.faults))
            stack.callback(cloud.call_ok, "DELETE", "emulator/faults")
            for one in planted:
                one.machine(home, monkeypatch)
            google = next((one.client for one in planted if one.client), signed_in)(cloud, clock)
            stack.callback(google.close)
            return examine(config, make_context(google, home, project=PROJECT, clock=clock))

    return looks


def rows_about(obstacle: Obstacle, rows: Rows, plane: Plane) -> Rows:
    """The rows that name an obstacle."""
    met = replace(obstacle, **obstacle.on_compute) if plane.is_compute_engine else obstacle
    return [
        row
        for row in rows
        if row["check"] == met.check
        and met.words in row["words"]
        and met.cure in row["cure"]
        and (row["outcome"] == met.outcome or not met.outcome)
    ]


def test_nothing_is_in_the_way_of_an_ordinary_project(
    look: Callable[..., Rows], cloud: EmulatedCloud, plane: Plane
) -> None:
    before = len(cloud.request_log())
    rows = look()
    assert [row for row in rows if row["outcome"] not in ("ok", "note")] == []
    assert not any(entry["mutating"] for entry in cloud.request_log()[before:] if "emulator" not in entry["path"])


@pytest.mark.parametrize("name", OBSTACLES)
def test_each_is_named_with_its_cure(name: str, look: Callable[..., Rows], plane: Plane) -> None:
    rows = look(OBSTACLES[name])
    is_met = OBSTACLES[name].without in ("", *NEEDED[plane.name])
    assert bool(rows_about(OBSTACLES[name], rows, plane)) == is_met, [row for row in rows if row["outcome"] != "ok"]
    assert all(row["cure"] for row in rows if row["outcome"] == "error"), rows


@pytest.mark.deep
@pytest.mark.one_plane
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_at_once_are_both_named_or_one_is_unknown(
    pair: Sequence[str], look: Callable[..., Rows], plane: Plane
) -> None:
    """While one of them hides the other, the check of the other says that it could not look."""
    rows = look(*(OBSTACLES[name] for name in pair))
    if any("tpu.plane=compute_engine" in OBSTACLES[name].overrides for name in pair):
        plane = PLANES[1]  # whichever was chosen
    named = [name for name in pair if rows_about(OBSTACLES[name], rows, plane)]
    hidden = {row["check"] for row in rows if row["outcome"] == "unknown"}
    if {OBSTACLES[name].check for name in pair} == {"credentials"}:
        hidden.add("credentials")  # one login, two mistakes: the second shows when the first is mended
    met = [name for name in pair if OBSTACLES[name].without in ("", *NEEDED[plane.name])]
    assert [name for name in met if name not in named and OBSTACLES[name].check not in hidden] == [], rows
