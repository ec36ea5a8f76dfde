"""What VMs are: workers of a TPU node, instances that make up a slice, and other instances of Compute Engine.

A slice is a document of kind `slice` by the ID that its workers carry. Its `members` are the instances' names in the
order of the workers; the instances themselves are documents of Compute. The startup script of another instance runs as
a program in its own home folder, and is killed when the instance is deleted; its output goes to the serial port.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.localcloud.apis.networks import COMPUTE_KIND
from controller.localcloud.http.call import PROJECT, PROJECT_NUMBER
from controller.localcloud.store import Document, Store
from controller.localcloud.vms.image import STARTUP_SCRIPT_KEY, EmulatedWorker, vm_environment, vm_name, write_program
from controller.localcloud.vms.processes import MARKER, kill_marked

SLICE_KIND = "slice"
PROFILE_KIND = "loginProfile"
PROJECT_METADATA_KIND = "project-metadata"  # name in the store, of kind `setting`
EMAIL, USER = "you@example.com", "you_example_com"
"""The user on the laptop, and their name at OS Login."""


@dataclass(frozen=True)
class Vm:
    """VM of a worker. `opens` is when sshd answers; `publishes`: whether guest attributes are enabled."""

    name: str
    zone: str
    running: bool
    network: str
    subnetwork: str
    metadata: dict[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    opens: float = 0.0
    instance: Document | None = None
    oslogin: bool = False
    publishes: bool = True


class Vms:
    """VMs of all workers, as the store describes them at the moment."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def workers_of(self, uid: str) -> list[EmulatedWorker]:
        """Return the workers of a node or slice by index; empty before its first boot."""
        return [EmulatedWorker(**body) for _, body in self._store.items("worker", f"{uid}/")]

    def all(self) -> Iterator[tuple[EmulatedWorker, Vm]]:
        """Yield the workers of all nodes and slices."""
        for _, node in self._store.items("node"):
            for worker in self.workers_of(node["id"]):
                yield worker, self._of_node(node, worker)
        for uid, slice_ in self._store.items(SLICE_KIND):
            for worker in self.workers_of(uid):
                yield worker, self._of_member(slice_, worker.index)

    def running(self) -> list[EmulatedWorker]:
        return [worker for worker, vm in self.all() if vm.running]

    def of(self, worker: EmulatedWorker) -> Vm | None:
        """Return the VM of a worker, or None if its node or slice is gone."""
        if slice_ := self._store.get(SLICE_KIND, worker.uid):
            return self._of_member(slice_, worker.index)
        node = next((node for _, node in self._store.items("node") if node["id"] == worker.uid), None)
        return self._of_node(node, worker) if node else None

    def of_instance(self, path: str) -> EmulatedWorker | None:
        """Return the worker that an instance is, or None for another instance or before its first boot."""
        found = self.slice_of(path)
        workers = self.workers_of(found["id"]) if found else []
        return next((worker for worker in workers if found and member_path(found, worker.index) == path), None)

    def slice_of(self, path: str) -> Document | None:
        """Return the slice that an instance belongs to, or None."""
        zone, name = path.split("/")[3], path.rpartition("/")[2]
        slices = (found for _, found in self._store.items(SLICE_KIND))
        return next((found for found in slices if found["zone"] == zone and name in found["members"]), None)

    def instance_of(self, uid: str, index: int) -> Document | None:
        """Return the instance of this ID, or that of a worker of a slice, with its `path`; None for one of a node."""
        if slice_ := self._store.get(SLICE_KIND, uid):
            paths = [member_path(slice_, index)] if index < len(slice_["members"]) else []
        else:
            items = self._store.items(COMPUTE_KIND)
            paths = [path for path, item in items if "/instances/" in path and item["id"] == uid]
        found = self._store.get(COMPUTE_KIND, paths[0]) if paths else None
        return found and {**found, "path": paths[0]}

    def _of_node(self, node: Document, worker: EmulatedWorker) -> Vm:
        config = node["networkConfig"]
        return Vm(
            vm_name(worker),
            node["name"].split("/")[3],
            node["state"] == "READY",
            config["network"],
            config["subnetwork"],
            metadata=node.get("metadata", {}),
            tags=tuple(node.get("tags", ())),
            oslogin=_enables_oslogin(self._project_metadata()),
        )

    def _of_member(self, slice_: Document, index: int) -> Vm:
        instance = self._store.get(COMPUTE_KIND, member_path(slice_, index)) or {}
        project = self._project_metadata()
        own = metadata_attributes(instance)
        metadata = {**project, **own}
        if own.get("block-project-ssh-keys", "").upper() != "TRUE":
            metadata["ssh-keys"] = "\n".join(keys for one in (own, project) if (keys := one.get("ssh-keys")))
        card = (instance.get("networkInterfaces") or [{}])[0]
        return Vm(
            slice_["members"][index],
            slice_["zone"],
            instance.get("status") == "RUNNING",
            card.get("network", ""),
            card.get("subnetwork", ""),
            metadata=metadata,
            tags=tuple((instance.get("tags") or {}).get("items", ())),
            opens=slice_.get("opens", 0.0),
            instance=instance,
            oslogin=_enables_oslogin(metadata),
            publishes=metadata.get("enable-guest-attributes", "").upper() == "TRUE",
        )

    def _project_metadata(self) -> dict[str, str]:
        return metadata_attributes({"metadata": self._store.get("setting", PROJECT_METADATA_KIND) or {}})


def _enables_oslogin(metadata: Mapping[str, str]) -> bool:
    return metadata.get("enable-oslogin", "").upper() == "TRUE"


def member_path(slice_: Document, index: int) -> str:
    """Return the path of the instance that is worker `index` of a slice."""
    project = slice_["owner"].split("/")[1]
    return f"projects/{project}/zones/{slice_['zone']}/instances/{slice_['members'][index]}"


def metadata_attributes(instance: dict[str, Any]) -> dict[str, str]:
    """Return the metadata of an instance by key."""
    return {item["key"]: item.get("value", "") for item in (instance.get("metadata") or {}).get("items", ())}


def metadata_tree(uid: str, name: str, zone: str, **more: Any) -> dict[str, Any]:
    """Return what the metadata server of a VM serves; `more` is what else is told of its instance."""
    return {
        "instance": {
            "id": uid,
            "name": name,
            "hostname": f"{name}.{zone}.c.{PROJECT}.internal",
            "zone": f"projects/{PROJECT_NUMBER}/zones/{zone}",
            **more,
        },
        "project": {"project-id": PROJECT, "numeric-project-id": PROJECT_NUMBER, "attributes": {}},
        "universe": {"universe-domain": "googleapis.com", "universe_domain": "googleapis.com"},
    }


_BOUNDS_OF_CHIPS = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}


def slice_attributes(slice_: Document, index: int) -> dict[str, str]:
    """Return what Compute Engine adds to the metadata of worker `index`, to tell it about its slice.

    Form: field reports of slices that Compute Engine made, such as
    https://github.com/GoogleCloudPlatform/cluster-toolkit/pull/6351. The workers' names stand alone, without colons.
    """
    chips = [int(bound) for bound in _BOUNDS_OF_CHIPS[slice_["chips"]].split(",")]
    sides = [*(int(side) for side in slice_["topology"].split("x")), 1][:3]
    hosts = ",".join(str(max(1, side // of_host)) for side, of_host in zip(sides, chips, strict=True))
    facts = {
        "TPU_ACCELERATOR_TYPE": slice_["acceleratorType"],
        "TOPOLOGY": slice_["topology"],
        "TPU_WORKER_ID": str(index),
        "HOST_BOUNDS": hosts,
        "CHIPS_PER_HOST_BOUNDS": _BOUNDS_OF_CHIPS[slice_["chips"]],
    }
    return {
        "accelerator-type": slice_["acceleratorType"],
        "worker-network-endpoints": ",".join(slice_["members"]),
        "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in facts.items()),
    }


SERIAL_BYTES = 1 << 20
"""Bytes of newest output kept (https://cloud.google.com/compute/docs/troubleshooting/viewing-serial-port-output)."""


class Instances:
    """All instances, by path in the store; an instance identifies itself as `ID/0` in its requests."""

    def __init__(self, store: Store, state: Path, url: str, token: str) -> None:
        self._store, self._state, self._url, self._token = store, state, url, token

    async def boot(self, path: str) -> None:
        """Start the startup script of an instance, unless it has been started before."""
        instance = self._store.get(COMPUTE_KIND, path)
        if instance is None:
            return
        folder = self._folder(instance)
        script = metadata_attributes(instance).get(STARTUP_SCRIPT_KEY)
        if script is None or (folder / "booted").exists():
            return
        for place in (home := folder / "home", folder / "tmp"):
            place.mkdir(parents=True, exist_ok=True)
        program = write_program(folder / STARTUP_SCRIPT_KEY, script)
        (folder / "booted").touch()
        variables = vm_environment(instance["id"], home, self._url, self._token)
        with (folder / "serial").open("ab") as serial:
            try:
                subprocess.Popen(
                    [str(program)], cwd=home, stdin=subprocess.DEVNULL, stdout=serial, stderr=serial,
                    start_new_session=True, env=variables | {MARKER: self._marker(instance)},
                )  # fmt: skip
            except OSError as error:  # it has no #! line, or its interpreter is missing
                serial.write(f"{STARTUP_SCRIPT_KEY} cannot be run: {error.strerror}\n".encode())

    async def remove(self, path: str) -> None:
        """Kill the processes of an instance and delete its disk."""
        instance = self._store.get(COMPUTE_KIND, path)
        if instance is not None:
            await asyncio.to_thread(kill_marked, self._marker(instance))
            await asyncio.to_thread(shutil.rmtree, self._folder(instance), ignore_errors=True)

    def serial_output(self, path: str, start: int) -> tuple[str, int]:
        """Return the serial output of an instance from byte `start` on, and its end offset."""
        file = self._folder(self._store.get(COMPUTE_KIND, path) or {}) / "serial"
        if not file.exists():
            return "", 0
        with file.open("rb") as printed:
            size = os.fstat(printed.fileno()).st_size
            printed.seek(min(size, max(start, size - SERIAL_BYTES)))
            return printed.read().decode(errors="replace"), size

    def _folder(self, instance: Mapping[str, Any]) -> Path:
        return self._state / "machines" / str(instance.get("id", "none"))

    def _marker(self, instance: Document) -> str:
        return f"{self._state}:{instance['id']}/"
