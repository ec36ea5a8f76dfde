"""VMs of all nodes, each with an SSH server, a home folder and processes."""

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import socket
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncssh

from controller.core.json_documents import replace_file
from controller.localcloud.apis.catalog import AcceleratorType
from controller.localcloud.apis.networks import ANY_PORT, COMPUTE_KIND, IAP_RANGE, LAPTOP_RANGE, Networks, allows_tcp
from controller.localcloud.faults.faults import Faults
from controller.localcloud.http.errors import ApiError
from controller.localcloud.settings import Settings
from controller.localcloud.store import Document, Store
from controller.localcloud.vms.hosts import EMAIL, PROFILE_KIND, USER, Vm, Vms
from controller.localcloud.vms.image import (
    STARTUP_SCRIPT_KEY,
    EmulatedWorker,
    install_chips,
    process_marker,
    run_startup_script,
    startup_variables,
    worker_environment,
)
from controller.localcloud.vms.processes import kill_marked
from controller.localcloud.vms.sessions import HomeFiles, LoginServer, authorized_keys, freeze, serve_process

_SSH_PORT = 2222
_LAST_HOST = 254


class EmulatedWorkers:
    """Boots, halts and removes VMs; `state` is the state folder, `url` the server's root."""

    def __init__(
        self, store: Store, networks: Networks, faults: Faults, state: Path, url: str, token: str, settings: Settings
    ) -> None:
        self._store, self._networks, self._faults, self._settings = store, networks, faults, settings
        self.state, self._url, self._token = state, url, token
        self.vms = Vms(store)
        self._acceptors: dict[str, asyncssh.SSHAcceptor] = {}
        self._connections: dict[str, set[asyncssh.SSHServerConnection]] = {}
        self._answering: set[str] = set()
        self._startups: dict[str, set[object]] = {}
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        # 127.A.B.x with A.B from the HTTP port: two emulators on one machine never share an address.
        high, low = divmod(urlsplit(url).port or 0, 256)
        block = store.get("setting", "block") or {"prefix": f"127.{high}.{low}."}
        store.put("setting", "block", block)
        self._prefix: str = block["prefix"]
        # Linux answers on all of 127.0.0.0/8; elsewhere every worker gets a port of 127.0.0.1.
        self._own_addresses = _can_bind(f"{self._prefix}2", 0)
        if self._own_addresses and "port" not in block:
            block["port"] = _SSH_PORT if _can_bind(f"{self._prefix}2", _SSH_PORT) else _free_port(f"{self._prefix}2")
            store.put("setting", "block", block)
        self._port: int = block.get("port", 0)

    async def resume(self) -> None:
        """Restart the SSH servers of an earlier process; kill processes left over from deleted VMs."""
        ready = {worker.uid for worker in self.vms.running()}
        for uid in {worker.uid for worker in self._all_workers()} - ready:
            await asyncio.to_thread(kill_marked, f"{process_marker(self.state)}{uid}/")
        await self.settle()

    async def close(self) -> None:
        """Stop serving SSH; programs keep running."""
        for name in {*self._acceptors, *self._connections}:
            self._disconnect(name)
        for task in self._tasks:
            task.cancel()

    def home(self, worker: EmulatedWorker) -> Path:
        return self.state / "nodes" / worker.uid / f"worker-{worker.index}" / "home"

    async def boot(
        self, uid: str, count: int, kind: AcceleratorType, without_chip: int | None = None
    ) -> list[EmulatedWorker]:
        """Create (once) and boot the VMs of a node; the next `settle` with the node READY opens SSH.

        `without_chip` is the index of a worker that lacks one of its chips.
        """
        workers = self.vms.workers_of(uid)
        with self._store.transaction():
            for index in range(len(workers), count):
                workers.append(self._create(uid, index, kind.devices))
            for worker in workers:
                fresh = dataclasses.replace(worker, boot_id=str(uuid.uuid4()), boot_time=time.time())
                self._store.put("worker", worker.name, dataclasses.asdict(fresh))
        for worker in workers:
            self.home(worker).mkdir(parents=True, exist_ok=True)
            (self.home(worker).parent / "tmp").mkdir(exist_ok=True)
            install_chips(self.home(worker).parent, kind, missing=worker.index == without_chip)
        return self.vms.workers_of(uid)

    async def run_startup_scripts(self, uid: str) -> None:
        """Run the startup scripts of the VMs of a node or slice that have just booted, as Google does at each boot."""
        for worker in self.vms.workers_of(uid):
            vm = self.vms.of(worker)
            script = vm.metadata.get(STARTUP_SCRIPT_KEY) if vm and vm.running else None
            if not script:
                continue
            home = self.home(worker)
            variables = dict(self._environment(worker, "root"))
            variables |= startup_variables(home, variables["PATH"])
            process = await run_startup_script(home.parent, script, variables)
            self._start_task(process.wait())  # what it leaves in the background runs on

    def change_host_keys(self, uid: str) -> None:
        """Give the halted VMs of a node new SSH host keys, as after a rebuild."""
        for worker in self.vms.workers_of(uid):
            self._store.put("hostkey", worker.name, _new_host_key())

    async def halt(self, uid: str, index: int | None = None) -> None:
        """Take down the VMs of a node that is no longer READY, or one of them: close SSH and kill every process."""
        halted = [worker for worker in self.vms.workers_of(uid) if index in (None, worker.index)]
        async with self._lock:  # no SSH server may open in the meantime
            for worker in halted:
                self._disconnect(worker.name)
        own = [process_marker(self.state, worker) for worker in halted]
        for marker in [f"{process_marker(self.state)}{uid}/"] if index is None else own:
            await asyncio.to_thread(kill_marked, marker)

    async def remove(self, uid: str) -> None:
        """Halt the VMs of a node and delete their disks and addresses."""
        if not self.vms.workers_of(uid):
            return  # rejected before its first boot
        await self.halt(uid)
        await asyncio.to_thread(shutil.rmtree, self.state / "nodes" / uid, ignore_errors=True)  # may be gone already
        with self._store.transaction():
            for worker in self.vms.workers_of(uid):
                self._store.delete("worker", worker.name)
                self._store.delete("hostkey", worker.name)
        self._write_ssh_config()

    def schedule_settle(self) -> None:
        """Open and close SSH servers to match firewall rules, nodes and faults, in the background."""
        self._start_task(self.settle())

    def _start_task(self, work: Coroutine[Any, Any, object]) -> None:
        self._store.start_task(self._tasks, work, work.__qualname__)

    async def settle(self) -> None:
        """Open and close SSH servers to match firewall rules, nodes and faults."""
        async with self._lock:
            self._write_ssh_config()
            now, later = time.time(), float("inf")
            for worker, vm in self.vms.all():
                if vm.running and vm.opens > now:
                    later = min(later, vm.opens)
                ready = vm.running and vm.opens <= now
                direct, iap = ready and self.admits(vm, LAPTOP_RANGE), ready and self.admits(vm, IAP_RANGE)
                if self._faults.affects(worker.index, "ssh_refused") or not (direct or iap):
                    self._disconnect(worker.name)
                elif direct and worker.name not in self._acceptors:
                    options = {"reuse_address": True, "backlog": 128, **self._options(worker)}
                    self._acceptors[worker.name] = await asyncssh.listen(worker.host, worker.port, **options)
                elif not direct and (acceptor := self._acceptors.pop(worker.name, None)):
                    acceptor.close()  # open connections stay: rules apply to new ones only
                for connection in self._connections.get(worker.name, ()):
                    freeze(connection, self._faults.freezes_ssh(worker.index))
                if ready:
                    self._answering.add(worker.name)
        if later < float("inf"):
            self._start_task(self._settle_at(later))

    async def _settle_at(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - time.time()))
        await self.settle()

    def _create(self, uid: str, index: int, devices: int) -> EmulatedWorker:
        """Create a VM, which publishes its guest attributes a while later."""
        taken = {worker.address for worker in self._all_workers()}
        # Addresses rotate, so a replaced VM seldom gets its predecessor's (as in the cloud).
        for _ in range(_LAST_HOST):
            number = self._store.next_number("address", 0) % (_LAST_HOST - 1) + 2
            address = f"{self._prefix}{number}"
            if address in taken:
                continue
            host = address if self._own_addresses else "127.0.0.1"
            worker = EmulatedWorker(uid, index, address, host, self._port or _free_port(host), "", devices)
            later = time.time() + self._settings.delay("guest attributes", worker.name)
            self._store.put("hostkey", worker.name, {**_new_host_key(), "published": later})
            self._store.put("worker", worker.name, dataclasses.asdict(worker))
            return worker
        raise ApiError(429, f"There is no more capacity: the emulated cloud holds {_LAST_HOST - 1} workers")

    def serve(self, worker: EmulatedWorker, connection: socket.socket) -> None:
        """Serve SSH in the background on a connection that did not come over the network."""
        self._start_task(self._serve(worker, connection))

    async def _serve(self, worker: EmulatedWorker, connection: socket.socket) -> None:
        with contextlib.suppress(asyncssh.Error, OSError):  # the client disconnected before it logged in
            await asyncssh.run_server(connection, **self._options(worker))

    def _options(self, worker: EmulatedWorker) -> dict[str, Any]:
        keys = self._store.get("hostkey", worker.name)
        assert keys is not None, "a booted worker has a host key"
        connections = self._connections.setdefault(worker.name, set())

        async def run(process: asyncssh.SSHServerProcess[bytes]) -> None:
            # A VM that is going down starts nothing more, so the kill that follows finds every process.
            vm = self.vms.of(worker)
            if vm is None or not vm.running:
                process.close()
                return
            await serve_process(
                process,
                self._environment(worker, process.get_extra_info("username")),
                lambda: self._faults.freezes_ssh(worker.index),
                writes=not self.disk_is_full(worker),
            )

        return {
            "server_host_keys": [asyncssh.import_private_key(keys["private"])],
            "login_timeout": 0,  # a handshake takes this machine's seconds, and the cloud's may pass faster
            "server_factory": lambda: LoginServer(
                lambda user: self._authorized_keys(worker, user),
                connections,
                lambda: self._faults.freezes_ssh(worker.index),
                self._startups.setdefault(worker.name, set()),
            ),
            "process_factory": run,
            "sftp_factory": lambda channel: HomeFiles(channel, self.home(worker), lambda: self.disk_is_full(worker)),
            "allow_scp": True,
            "encoding": None,
            "line_editor": False,
            "agent_forwarding": False,
        }

    def _disconnect(self, name: str) -> None:
        """Close the worker's SSH server and all its connections; `settle` may open it again."""
        self._answering.discard(name)
        if acceptor := self._acceptors.pop(name, None):
            acceptor.close()
        for connection in list(self._connections.pop(name, ())):
            connection.abort()

    def disk_is_full(self, worker: EmulatedWorker) -> bool:
        """Return whether a fault currently keeps the worker from writing."""
        return self._faults.affects(worker.index, "disk_full")

    def admits(self, vm: Vm, source: str, ports: tuple[int, int] = (22, 22)) -> bool:
        """Return whether ports of a VM are reached from the laptop (all of loopback), IAP or another network."""
        rules = [rule for _, rule in self._networks.resources_of(vm.network, "firewalls")]
        return allows_tcp(rules, source=source, ports=ports, tags=vm.tags)

    def guest_attributes(self, worker: EmulatedWorker) -> list[Document]:
        """Return what a worker has published: its host key, and the VM name that IAP uses. Each takes its own time."""
        vm = self.vms.of(worker)
        host_key = self._store.get("hostkey", worker.name) or {}
        late = time.time() < host_key.get("published", 0.0)
        booting = vm is not None and vm.instance is not None and worker.name not in self._answering
        if late or vm is None or not vm.publishes or booting:
            return []
        algorithm, key = host_key["public"].split()[:2]
        published: list[Document] = [{"namespace": "hostkeys", "key": algorithm, "value": key}]
        if vm.instance is None:
            published.append({"namespace": "hostname", "key": "hostname", "value": vm.name})
        return published

    def _authorized_keys(self, worker: EmulatedWorker, user: str) -> list[str]:
        vm = self.vms.of(worker)
        if vm is None:
            return []
        if vm.oslogin:
            profile = self._store.get(PROFILE_KIND, EMAIL) if user == USER else None
            return [key["key"] for key in (profile or {}).get("sshPublicKeys", {}).values()]
        return authorized_keys(vm.metadata.get("ssh-keys", ""), user)

    def _environment(self, worker: EmulatedWorker, user: str) -> dict[str, str]:
        vm = self.vms.of(worker)
        subnetwork = self._store.get(COMPUTE_KIND, vm.subnetwork if vm else "") or {}
        reachable = vm is not None and self.admits(vm, subnetwork.get("ipCidrRange", "0.0.0.0/0"), ANY_PORT)
        nobody = f"{self._prefix}1"  # never assigned: nothing listens there
        peers = self.vms.workers_of(worker.uid)
        hostnames = [peer.host if reachable or peer.index == worker.index else nobody for peer in peers]
        return worker_environment(
            peers[worker.index], peers, hostnames, home=self.home(worker), user=user, state=self.state, url=self._url,
            token=self._token,
        )  # fmt: skip

    def _all_workers(self) -> list[EmulatedWorker]:
        return [EmulatedWorker(**body) for _, body in self._store.items("worker")]

    def _write_ssh_config(self) -> None:
        blocks = [f"Host {one.address}\n  HostName {one.host}\n  Port {one.port}\n" for one in self._all_workers()]
        replace_file(self.state / "ssh_config", "".join(blocks))


def _new_host_key() -> dict[str, str]:
    key = asyncssh.generate_private_key("ssh-ed25519")
    return {"private": key.export_private_key().decode(), "public": key.export_public_key().decode()}


def _can_bind(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            logging.info("%s:%d cannot be bound: %s", host, port, error)
            return False
    return True


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
