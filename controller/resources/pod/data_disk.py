"""Startup script of a node, and the data disk of a one-VM pod that it mounts.

Google runs the script as root at every boot, before anybody can log in:
https://cloud.google.com/compute/docs/instances/startup-scripts/linux. The disk is created before the node in its zone
(https://cloud.google.com/tpu/docs/setup-persistent-disk): it is writable on one VM only; v6e supports Hyperdisk only.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.gcp.errors import ConflictError, NotFoundError
from controller.gcp.names import LABEL, is_labelled
from controller.gcp.operations import wait_compute
from controller.reconcile.resource import Absent, Diff, ObservedResources, Resource, Scope
from controller.resources.pod import dead_mans_switch

STARTUP_SCRIPT = "startup-script"
"""Key of the node's metadata."""
_END = "END_OF_DEAD_MANS_SWITCH"
_SWITCH_PART = f"""\
# Deletes the pod after a time without any sign of Slipway. It runs in the background and writes only to its log,
# because Google waits for this script and for the end of its output.
setsid python3 -I -S -c "$(cat <<'{_END}'
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
    return "hyperdisk-balanced" if generation in ("v6e", "tpu7x") else "pd-balanced"


def mount_part(gigabytes: int) -> str:
    """Return the part of the node's startup script that mounts the disk."""
    return _MOUNT_PART.format(bytes=gigabytes * 2**30, folder=MOUNT_POINT)


def name_for(pod: str) -> str:
    return f"{pod[:58]}-data"


@dataclass(frozen=True, kw_only=True)
class DataDisk(Resource):
    """The disk of a pod that may be gone: `down` deletes it. The search for capacity creates it, in the node's zone."""

    kind: ClassVar[str] = "data disk"
    scope: ClassVar[Scope] = "pod"
    zones: tuple[str, ...] = field(compare=False)
    """Where it may be."""

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        for zone in self.zones:
            try:
                if is_labelled(context.google.call("compute", "disks.get", **_path(context, self.name, zone))):
                    return self
            except NotFoundError:
                continue
        return Absent()

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
    except ConflictError:
        return None


def delete_disk(context: Context, name: str, zone: str) -> None:
    """Delete the disk if it is ours; no error when there is none."""
    where = _path(context, name, zone)
    try:
        found = context.google.call("compute", "disks.get", **where)
        if is_labelled(found):
            wait_compute(context, context.google.call("compute", "disks.delete", **where))
    except NotFoundError:
        return


def _path(context: Context, name: str, zone: str) -> dict[str, str]:
    return {"project": context.project, "zone": zone, "disk": name}
