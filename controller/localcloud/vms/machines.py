"""Compute Engine instances: a startup script runs as a program in its own home folder.

Its output goes to the serial port. It can get attributes and tokens of its service account from the metadata server,
and is killed when the instance is deleted.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controller.localcloud.apis.networks import COMPUTE_KIND
from controller.localcloud.store import Document, Store
from controller.localcloud.vms.hosts import metadata_attributes, metadata_tree
from controller.localcloud.vms.image import STARTUP_SCRIPT_KEY, vm_environment, write_program
from controller.localcloud.vms.processes import MARKER, kill_marked

SERIAL_BYTES = 1 << 20
"""Bytes of newest output kept (https://cloud.google.com/compute/docs/troubleshooting/viewing-serial-port-output)."""


class Instances:
    """All instances, by path in the store; an instance identifies itself as `ID/0` in its requests."""

    def __init__(self, store: Store, state: Path, url: str, token: str) -> None:
        self._store, self._state, self._url, self._token = store, state, url, token

    def has_any(self) -> bool:
        return any("/instances/" in path for path, _ in self._store.items(COMPUTE_KIND))

    async def boot(self, path: str) -> None:
        """Start the startup script of an instance, unless it has been started before."""
        instance = self._store.get(COMPUTE_KIND, path)
        if instance is None:
            return
        folder = self._folder(instance)
        script = metadata_attributes(instance).get(STARTUP_SCRIPT_KEY)
        if script is None or (folder / "booted").exists():
            return
        home = folder / "home"
        for place in (home, folder / "tmp"):
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
        instance = self._store.get(COMPUTE_KIND, path) or {}
        file = self._folder(instance) / "serial"
        if not file.exists():
            return "", 0
        with file.open("rb") as printed:
            size = os.fstat(printed.fileno()).st_size
            printed.seek(min(size, max(start, size - SERIAL_BYTES)))
            return printed.read().decode(errors="replace"), size

    def find(self, uid: str) -> Document | None:
        for path, item in self._store.items(COMPUTE_KIND):
            if "/instances/" in path and item["id"] == uid:
                return item | {"path": path}
        return None

    def service_account(self, uid: str) -> str:
        """Return the address of an instance's service account, or "" without one."""
        instance = self.find(uid)
        return next((a["email"] for a in instance.get("serviceAccounts", ())), "") if instance else ""

    def scopes(self, uid: str) -> list[str]:
        """Return the scopes of an instance's service account."""
        instance = self.find(uid) or {}
        return [scope for account in instance.get("serviceAccounts", ()) for scope in account.get("scopes", ())]

    def metadata(self, uid: str) -> dict[str, Any] | None:
        """Return the metadata tree of an instance, without its accounts; None if there is no such instance."""
        instance = self.find(uid)
        if instance is None:
            return None
        zone = instance["path"].split("/")[3]
        return metadata_tree(uid, instance["name"], zone, attributes=metadata_attributes(instance))

    def _folder(self, instance: Mapping[str, Any]) -> Path:
        return self._state / "machines" / str(instance.get("id", "none"))

    def _marker(self, instance: Document) -> str:
        return f"{self._state}:{instance['id']}/"
