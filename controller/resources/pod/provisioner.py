"""Spec and status of a slice, the interface of the APIs that create one, and a node's startup script and data disk.

Google runs the script as root at every boot, before anybody can log in:
https://cloud.google.com/compute/docs/instances/startup-scripts/linux. The disk is created before the node in its zone
(https://cloud.google.com/tpu/docs/setup-persistent-disk): it is writable on one VM only; v6e supports Hyperdisk only.

The provisioners of one API belong to a plane (`plane.py`).
"""

import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

from conf.schema.config import Config
from conf.schema.topology import tpu_type_table
from controller.context import Context
from controller.gcp.answers import LABEL, delete_when_ready, is_labelled, wait_compute
from controller.gcp.google_errors import ExistsError
from controller.reconcile import Absent, Diff, ObservedResources, Resource, Scope
from controller.resources import dead_mans_switch

STARTUP_SCRIPT = "startup-script"
"""Key of the node's metadata."""
_END = "END_OF_DEAD_MANS_SWITCH"
_SWITCH_PART = f"""\
# Deletes the pod after a time without any sign of Slipway. It runs in the background and writes only to its log,
# because Google waits for this script and for the end of its output. Killed, it is started again.
setsid bash -c 'until python3 -I -S -c "$@"; do sleep 10; done' switch "$(cat <<'{_END}'
{{source}}{_END}
)" {{arguments}} < /dev/null >> "${{{{TMPDIR:-/var/log}}}}/slipway-dead-mans-switch.log" 2>&1 &
"""


def startup_script(*parts: str) -> str:
    """Return one script of several parts."""
    return "#!/bin/bash\n" + "".join(parts)


def switch_part(limit_seconds: float, deletions: Sequence[str]) -> str:
    """Return the part that starts the dead man's switch.

    Args:
        limit_seconds: seconds without a sign of life.
        deletions: URLs of what to delete, in order.
    """
    source = Path(dead_mans_switch.__file__).read_text()
    arguments = shlex.join([f"{limit_seconds:.10g}", *deletions])
    return _SWITCH_PART.format(source=source, arguments=arguments)


def node_metadata(context: Context, spec: "SliceSpec", deletions: Sequence[str]) -> dict[str, str]:
    """Return the metadata of a slice on any plane: our SSH keys, and the script that mounts its disk and ends it."""
    found = {"ssh-keys": "\n".join([context.ssh_login.key_line(), *context.extra_ssh_keys])}
    parts = [] if spec.data_disk_gb is None else [mount_part(spec.data_disk_gb)]
    if spec.heartbeat_timeout_seconds is not None:
        parts.append(switch_part(spec.heartbeat_timeout_seconds, deletions))
    return found | ({STARTUP_SCRIPT: startup_script(*parts)} if parts else {})


MOUNT_POINT = "/mnt/data"
_MOUNT_PART = """\
# Mounts the data disk: the one disk of its size that has no partitions. It is formatted only while it is empty.
for disk in $(lsblk --nodeps --noheadings --paths --bytes --output NAME,SIZE,TYPE \\
    | awk '$2 == {bytes} && $3 == "disk" {{print $1}}'); do
  [ "$(lsblk --noheadings --output NAME "$disk" | wc -l)" = 1 ] || continue
  blkid "$disk" > /dev/null || mkfs.ext4 -q -m 0 "$disk" || continue
  mkdir -p {folder} && mount -o discard "$disk" {folder} && chmod 1777 {folder}
  break
done
"""


def disk_type(generation: str) -> str:
    """Return the disk type for a generation (https://cloud.google.com/tpu/docs/attach-durable-block-storage)."""
    table = tpu_type_table()  # which lacks the CPU and the GPU of cloud=here
    return table["generations"].get(generation, table["generation_defaults"])["disk_type"]


def mount_part(gigabytes: int) -> str:
    """Return the part of the node's startup script that mounts the disk."""
    return _MOUNT_PART.format(bytes=gigabytes * 2**30, folder=MOUNT_POINT)


def data_disk_name(pod: str) -> str:
    return f"{pod[:58]}-data"


@dataclass(frozen=True, kw_only=True)
class DataDisk(Resource):
    """The disk of a pod that may be gone: `down` deletes it. The search for capacity creates it, in the node's zone."""

    kind: ClassVar[str] = "data disk"
    scope: ClassVar[Scope] = "pod"
    zones: tuple[str, ...] = field(compare=False)
    """Where it may be."""

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        found = (context.google.find("compute", "disks.get", **_path(context, self.name, zone)) for zone in self.zones)
        return self if any(disk is not None and is_labelled(disk) for disk in found) else Absent()

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        """Do nothing: no plan contains it."""

    def destroy(self, context: Context) -> None:
        for zone in self.zones:
            delete_disk(context, self.name, zone)


def request_disk(context: Context, name: str, zone: str, gigabytes: int, kind: str) -> dict[str, Any] | None:
    """Request the disk unless it exists; returns the operation that creates it."""
    body = {
        "name": name,
        "sizeGb": str(gigabytes),
        "type": f"projects/{context.project}/zones/{zone}/diskTypes/{kind}",
        "labels": dict(LABEL),
    }
    try:
        return context.google.call("compute", "disks.insert", project=context.project, zone=zone, body=body)
    except ExistsError:
        return None


def delete_disk(context: Context, name: str, zone: str) -> None:
    """Delete the disk if it is ours; no error when there is none."""
    where = _path(context, name, zone)
    found = context.google.find("compute", "disks.get", **where)
    if found is not None and is_labelled(found):
        delete_when_ready(
            context, lambda: wait_compute(context, context.google.call("compute", "disks.delete", **where))
        )


def _path(context: Context, name: str, zone: str) -> dict[str, str]:
    return {"project": context.project, "zone": zone, "disk": name}


WAITING_STATES = frozenset({"CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES"})
"""States of a queued request without capacity yet; Google uses the last two for the same thing."""
REPAIR_STATES = frozenset({"REPAIRING", "REIMAGING", "RESTARTING"})
IsAnswered = Callable[[], bool]
"""Whether Google has answered a request; raises GoogleError on a refusal. Does not wait."""
ProvisionerName = str
"""Name of a way to create slices, unique among all planes."""


@dataclass(frozen=True)
class Endpoint:
    """One worker: its addresses, and the name of its VM where the project has one."""

    worker: int
    internal: str
    external: str | None
    vm: str = ""


@dataclass(frozen=True)
class Place:
    """Zone, capacity tier and API: one combination in which to ask for a slice."""

    zone: str
    capacity: str
    subnetwork: str
    provisioner: ProvisionerName = "node"

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]

    def __str__(self) -> str:
        return f"{self.zone} ({self.capacity})"


class OwnSpec(Protocol):
    """What only one plane needs to know of a slice."""

    @property
    def compared(self) -> Mapping[str, Any]:
        """Settings that an existing slice must match."""
        ...


@dataclass(frozen=True, kw_only=True)
class SliceSpec:
    """The slice that a config asks of one plane; only `runtime_version` and `own` differ between planes.

    Fields with compare=False only affect the request: an existing slice need not match them.
    """

    workers: int
    accelerator_type: str
    runtime_version: str
    network: str
    external_ip: bool
    service_account: str = field(default="default", compare=False)
    valid_until_seconds: float | None = field(default=None, compare=False)
    reservation: str | None = field(default=None, compare=False)
    data_disk_gb: int | None = field(default=None, compare=False)
    data_disk_kind: str = field(default="pd-balanced", compare=False)
    heartbeat_timeout_seconds: float | None = field(default=None, compare=False)
    own: OwnSpec | None = field(default=None, compare=False)
    without: frozenset[str] = field(default=frozenset(), compare=False)
    """Optional fields of the request that Google has refused in this place."""

    @classmethod
    def of(cls, config: Config, image: str, own: OwnSpec | None = None) -> "SliceSpec":
        """Return what a config asks for; `image` is the plane's for the generation."""
        tpu, topology, timeout = config.tpu, config.topology, config.cleanup.heartbeat_timeout_hours
        return cls(
            workers=topology.workers,
            accelerator_type=topology.accelerator_type,
            runtime_version=tpu.runtime_version or image,
            network=config.network.name,
            external_ip=config.external_ip,
            service_account=config.cloud.service_account,
            valid_until_seconds=None if tpu.valid_until_hours is None else 3600 * tpu.valid_until_hours,
            reservation=tpu.reservation,
            data_disk_gb=tpu.data_disk_gb,
            data_disk_kind=disk_type(topology.generation),
            heartbeat_timeout_seconds=None if timeout is None else 3600 * timeout,
            own=own,
        )

    def at(self, place: Place) -> dict[str, Any]:
        """Return the fields that a slice in that place must match."""
        compared = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        if self.own is not None:
            compared |= self.own.compared
        return {**compared, "capacity": place.capacity, "subnetwork": place.subnetwork}


@dataclass(frozen=True)
class Symptom:
    """A reported problem (https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes#symptom)."""

    kind: str
    worker: str = ""
    details: str = ""

    def __str__(self) -> str:
        where = f" on {self.worker}" if self.worker else ""
        return f"Google reports the symptom {self.kind}{where}" + (f" ({self.details})" if self.details else "")


@dataclass(frozen=True)
class PodStatus:
    """A pod's status with Google's terms. `state` is ABSENT for a 404."""

    state: str = "READY"
    replaced: bool = False
    health: str = ""
    health_description: str = ""
    symptoms: tuple[Symptom, ...] = ()
    maintenance: str = ""
    """PENDING or ONGOING, if maintenance is announced."""

    @property
    def is_usable(self) -> bool:
        """Whether it is READY and still the incarnation in use."""
        return self.state == "READY" and not self.replaced


@dataclass(frozen=True, kw_only=True)
class SliceStatus:
    """A slice as observed.

    Attributes:
        spec: the settings it has; `workers` counts its endpoints, which are complete once it is READY.
        state: Google's state of the node, or else of the queued request.
        pending: whether the state will change by itself.
        created: when it was requested; seconds since the epoch.
        running_since: when its VMs came into being, if that is known; seconds since the epoch.
        symptoms: with the times at which they appeared.
        maintenance: PENDING or ONGOING if maintenance is announced.
        code: error code of a failed request; `message` is Google's text.
        obstacle: why its workers cannot use the bucket, and what to do; empty if nothing is known against it.
    """

    spec: SliceSpec
    place: Place
    state: str
    name: str = ""
    pending: bool = False
    uid: str = ""
    created: float = 0.0
    running_since: float = 0.0
    endpoints: tuple[Endpoint, ...] = ()
    ssh_keys: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    tags: tuple[str, ...] = ()
    health: str = ""
    health_description: str = ""
    symptoms: tuple[tuple[float, Symptom], ...] = ()
    maintenance: str = ""
    code: str = ""
    message: str = ""
    obstacle: str = ""

    @property
    def is_ready(self) -> bool:
        return self.state == "READY"

    @property
    def billed_since(self) -> float:
        """When its bill began; seconds since the epoch. The wait in a queue costs nothing."""
        return self.running_since or self.created

    @property
    def vms(self) -> frozenset[str]:
        """Names of its VMs, where they are instances of the project."""
        return frozenset(endpoint.vm for endpoint in self.endpoints if endpoint.vm)

    @property
    def is_under_repair(self) -> bool:
        """Whether Google may be rebuilding its VMs, which changes their SSH host keys."""
        return self.state in REPAIR_STATES or self.health == "UNHEALTHY_MAINTENANCE" or self.maintenance == "ONGOING"

    @property
    def is_labelled(self) -> bool:
        """Whether Slipway created it."""
        return LABEL.items() <= dict(self.labels).items()

    def pod_seen(self, uid: str, since: float) -> PodStatus:
        """Return the status for a diagnosis.

        Args:
            uid: of the incarnation in use, or empty.
            since: omits symptoms that appeared earlier; seconds since the epoch.
        """
        return PodStatus(
            state=self.state,
            replaced=bool(uid and self.uid and self.uid != uid),
            health=self.health,
            health_description=self.health_description,
            symptoms=tuple(symptom for time, symptom in self.symptoms if time >= since),
            maintenance=self.maintenance,
        )


NOT_OBSERVED = SliceStatus(
    spec=SliceSpec(workers=0, accelerator_type="", runtime_version="", network="", external_ip=False),
    place=Place("", "", ""),
    state="ABSENT",
)


class Provisioner(Protocol):
    """One API that creates slices."""

    def observe(self, context: Context, name: str, zone: str) -> SliceStatus | None:
        """Return what this API has created under that name, or None."""
        ...

    def create(self, context: Context, name: str, spec: SliceSpec, place: Place) -> IsAnswered | None:
        """Ask for a slice. Returns None once it exists or waits in a queue; otherwise how to tell that it does.

        Raises GoogleError if it is refused.
        """
        ...

    def delete(
        self, context: Context, name: str, zone: str, *, is_recorded: bool = False, is_hurried: bool = False
    ) -> None:
        """Delete it; no error if it is gone already.

        With `is_recorded`, its deletion is on record already: one attempt is enough while Google refuses. With
        `is_hurried`, something else is billed meanwhile, or cannot be asked for. Raises DeletionPendingError if Google
        does not delete it yet. Its deletion is on record then.
        """
        ...


def state_text(state: str) -> str:
    """Format a state such as WAITING_FOR_RESOURCES in lower-case words."""
    return state.lower().replace("_", " ")


def short_uid(uid: str) -> str:
    """Return a pod's uid as part of an object's name."""
    return hashlib.sha256(uid.encode()).hexdigest()[:12]


def pod_object(kind: Literal["claims", "limits", "ends", "echoes"], pod: str, uid: str) -> str:
    """Return the name of the object that records which runs had a pod, or of another kind.

    These are when its watchdog ends it, why that did, and what Google shows otherwise than it was requested.
    """
    return f"pods/{pod}/{kind}/{short_uid(uid)}.json"
