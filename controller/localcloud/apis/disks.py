"""Rules for Compute v1 disks: sizes, types and who may attach them; they hold no data. `compute` has the handlers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from controller.localcloud.http.call import PROJECT
from controller.localcloud.http.errors import ApiError, not_found
from controller.localcloud.store import Document, Store

DISK_KIND = "compute"
HYPERDISK_ONLY = frozenset({"v6e"})
_DISK_TYPES = ("hyperdisk-balanced", "hyperdisk-ml", "pd-balanced", "pd-extreme", "pd-ssd", "pd-standard")


def prepare_disk(zone: str, body: Mapping[str, Any]) -> Document:
    """Return the disk to store; raise ApiError 400 for an invalid size or type."""
    kind = str(body.get("type") or f"zones/{zone}/diskTypes/pd-standard")
    name = kind.rpartition("/")[2]
    if name not in _DISK_TYPES or ("zones/" in kind and f"zones/{zone}/diskTypes/" not in kind):
        raise ApiError(400, f"Invalid value for field 'resource.type': '{kind}'. The URL is malformed.")
    size = str(body.get("sizeGb", "500"))
    least = 4 if name.startswith("hyperdisk") else 10
    if not least <= int(size) <= 65536:
        raise ApiError(400, f"Disk size: '{size} GB' is not between {least} GB and 65536 GB.")
    path = f"projects/{PROJECT}/zones/{zone}/diskTypes/{name}"
    return {**body, "sizeGb": size, "type": path, "status": "READY"}


def check_attached(store: Store, zone: str, disks: Sequence[Mapping[str, Any]], generation: str, vms: int) -> None:
    """Raise ApiError 400 or 404 unless a node with this many VMs may attach these data disks.

    https://cloud.google.com/tpu/docs/attach-durable-block-storage
    """
    for attached in disks:
        link = str(attached.get("sourceDisk", ""))
        path = link[link.find("projects/") :]
        if not re.fullmatch(rf"projects/[^/]+/zones/{zone}/disks/[^/]+", path):
            raise ApiError(400, f"Cloud TPU received a bad request. Disk '{link}' is not one of zone {zone}.")
        disk = store.get(DISK_KIND, path)
        if disk is None:
            raise not_found(path)
        hyper = disk["type"].rpartition("/")[2].startswith("hyperdisk")
        if hyper != (generation in HYPERDISK_ONLY):
            message = f"Disk type {disk['type'].rpartition('/')[2]} cannot be attached to {generation}"
            raise ApiError(400, f"Cloud TPU received a bad request. {message}")
        writes = attached.get("mode", "READ_WRITE") != "READ_ONLY"
        if writes and vms > 1:
            message = "A disk can be attached to a TPU slice of several VMs in READ_ONLY mode only"
            raise ApiError(400, f"Cloud TPU received a bad request. {message}")
        if writes and users_of_disk(store, path):
            raise ApiError(400, f"Cloud TPU received a bad request. Disk {path} is in use by another node.")


def users_of_disk(store: Store, path: str) -> list[str]:
    nodes = [
        name
        for name, node in store.items("node")
        if any(str(disk.get("sourceDisk", "")).endswith(path) for disk in node.get("dataDisks", ()))
    ]
    instances = [
        name
        for name, item in store.items(DISK_KIND)
        if any(str(disk.get("source", "")).endswith(path) for disk in item.get("disks", ()))
    ]
    return nodes + instances


def check_sources(store: Store, disks: Sequence[Mapping[str, Any]]) -> None:
    """Raise ApiError 404 or 400 unless the existing disks of an instance exist, and nobody else writes to them."""
    for disk in disks:
        link = str(disk.get("source", ""))
        path = link[link.find("projects/") :]
        if not link:
            continue
        if store.get(DISK_KIND, path) is None:
            raise not_found(path)
        users = users_of_disk(store, path)
        if users and disk.get("mode", "READ_WRITE") != "READ_ONLY":
            message = f"The disk resource '{path}' is already being used by '{users[0]}'"
            raise ApiError(400, message, reason="RESOURCE_IN_USE_BY_ANOTHER_RESOURCE")
