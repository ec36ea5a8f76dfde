"""Assembles the emulated cloud and runs it until it is stopped."""

import asyncio
import fcntl
import json
import os
import secrets
import signal
import socket
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aiohttp import web

from controller.core.json_documents import replace_file
from controller.localcloud.apis.buckets import Buckets, StoredObjects
from controller.localcloud.apis.catalog import load_catalog
from controller.localcloud.apis.compute import Compute
from controller.localcloud.apis.compute_engine.bulk import Slices
from controller.localcloud.apis.compute_engine.groups import Groups
from controller.localcloud.apis.compute_engine.instances import TpuInstances
from controller.localcloud.apis.compute_engine.templates import Parts
from controller.localcloud.apis.iap import IapRelay
from controller.localcloud.apis.metadata import MetadataServer
from controller.localcloud.apis.networks import Networks
from controller.localcloud.apis.nodes import Nodes
from controller.localcloud.apis.objects import Blobs, Objects
from controller.localcloud.apis.operations import Effect, Operations
from controller.localcloud.apis.projects import EnabledApis, Projects
from controller.localcloud.apis.queued import Locations, QueuedResources
from controller.localcloud.apis.quotas import Quotas
from controller.localcloud.apis.service import Service
from controller.localcloud.apis.small_services import Billing, CustomRoles, OsLogin, SecretManager
from controller.localcloud.faults.effects import FaultEffects
from controller.localcloud.faults.faults import Faults
from controller.localcloud.http.admin import Admin
from controller.localcloud.http.call import PROJECT, PROJECT_NUMBER
from controller.localcloud.http.discovery import MOUNTS
from controller.localcloud.http.media import MediaTransfers
from controller.localcloud.http.server import Server
from controller.localcloud.iam import Judge, Policies, Tokens
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store, database_problem
from controller.localcloud.vms.hosts import Instances
from controller.localcloud.vms.workers import EmulatedWorkers

_CLAIM_SECONDS = 2.0


class StartError(Exception):
    """Failure to start the emulated cloud; the message names the config key to change."""


@dataclass(eq=False)
class Cloud(Service):
    """All components, of which timers, SSH servers and the HTTP server have a lifecycle."""

    services: Sequence[Service]
    nodes: Nodes
    slices: Slices
    misfortune: FaultEffects
    server: Server

    def effects(self) -> dict[str, Effect]:
        return {name: effect for service in self.services for name, effect in service.effects().items()}

    async def resume(self) -> None:
        """Restore SSH servers, unfinished operations and triggered faults of an earlier process."""
        await self.workers.resume()
        self.operations.resume(self.effects(), self.workers.schedule_settle)
        self.slices.resume()
        self.faults.resume(self.misfortune.actions(), self.workers.schedule_settle)

    async def close(self) -> None:
        """Stop all timers and SSH servers; the state and the workers' programs stay."""
        self.faults.close()
        self.slices.close()
        await self.operations.close()
        await self.workers.close()
        self.store.close()


def assemble(store: Store, state: Path, url: str, token: str, settings: Settings, stopped: asyncio.Event) -> Cloud:
    """Build all components of a cloud; a stop request sets `stopped`."""
    catalog, faults, policies = load_catalog(), Faults(store), Policies(store, settings)
    operations, networks = Operations(store, settings), Networks(store, catalog)
    quotas = Quotas(store, catalog, lambda: settings.quotas, lambda: settings.delay("usage of quotas"))
    workers = EmulatedWorkers(store, networks, faults, state, url, token, settings)
    root = f"{url}compute/v1/"
    shared: dict[str, Any] = vars(
        Service(store, settings, catalog, operations, faults, networks, quotas, policies, workers, root)
    )
    tokens = Tokens(store, settings, token)
    enabled_apis = EnabledApis(store, settings)
    judge = Judge(store, policies, settings, faults)
    blobs = Blobs(state / "blobs")
    objects = Objects(store, blobs, faults.on_object_finalized, settings)
    nodes, slices, parts = Nodes(**shared), Slices(**shared), Parts(**shared)
    compute = Compute(**shared, machines=Instances(store, state, url, token))
    groups = Groups(**shared, slices=slices, parts=parts, compute=compute)
    instances = TpuInstances(**shared, slices=slices, compute=compute)
    compute.rules = parts.rules() | groups.rules() | instances.rules()
    services = (
        nodes,
        slices,
        parts,
        compute,
        groups,
        instances,
        QueuedResources(**shared, nodes=nodes),
        Locations(**shared, nodes=nodes),
        Projects(**shared, apis=enabled_apis),
        *(kind(**shared) for kind in (CustomRoles, Billing, SecretManager, OsLogin)),
        Buckets(**shared, objects=objects),
        StoredObjects(**shared, objects=objects, blobs=blobs),
    )
    server = Server(
        store=store,
        handlers={key: handler for service in services for key, handler in service.handlers().items()},
        media=MediaTransfers(store, objects, blobs),
        metadata=MetadataServer(**shared, tokens=tokens, judge=judge),
        iap=IapRelay(**shared),
        admin=Admin(**shared, objects=objects, stopped=stopped),
        faults=faults,
        judge=judge,
        tokens=tokens,
        enabled_apis=enabled_apis,
        url=url,
        token=token,
    )
    misfortune = FaultEffects(**shared, nodes=nodes, slices=slices, peers=lambda: list(server.peers))
    return Cloud(**shared, services=services, nodes=nodes, slices=slices, misfortune=misfortune, server=server)


async def serve(state: Path, port: int, idle_exit: float | None, **settings_given: Any) -> None:
    """Run the emulated cloud until a stop request, signal or idle exit; raise StartError if it cannot start.

    Port 0 means the previous port, or a free one; `settings_given` are settings, None where not given.
    """
    state = state.resolve()
    with _lock_state_folder(state):
        try:
            await _serve(state, port, idle_exit, settings_given)
        except sqlite3.DatabaseError as error:
            raise StartError(database_problem(state, error)) from error


async def _serve(state: Path, port: int, idle_exit: float | None, settings_given: Mapping[str, Any]) -> None:
    store = Store(state / "state.db")
    listener = _listen(store, port)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    token = (store.get("setting", "token") or {"value": secrets.token_urlsafe(24)})["value"]
    store.put("setting", "token", {"value": token})
    settings = Settings(store, **settings_given)
    stopped = asyncio.Event()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # programs would inherit SIG_IGN from nohup
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    cloud = assemble(store, state, url, token, settings, stopped)
    await cloud.resume()
    runner = web.AppRunner(cloud.server.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    _write_endpoint(state, url, token)
    await _wait_for_stop(cloud, stopped, idle_exit)
    (state / "endpoint.json").unlink(missing_ok=True)
    await runner.cleanup()
    await cloud.close()


async def _wait_for_stop(cloud: Cloud, stopped: asyncio.Event, idle_exit: float | None) -> None:
    """Return on a stop request, or after `idle_exit` seconds without a request while no node or instance exists."""
    while idle_exit is not None and not stopped.is_set():
        quiet = time.monotonic() - cloud.server.last_request
        used = cloud.store.items("node") or any("/instances/" in path for path, _ in cloud.store.items("compute"))
        if quiet >= idle_exit and not used:
            return
        with suppress(TimeoutError):
            wait = 1.0 if used else max(0.05, min(idle_exit - quiet, idle_exit))
            await asyncio.wait_for(stopped.wait(), wait)
    await stopped.wait()


def _lock_state_folder(state: Path) -> IO[str]:
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (state / "lock").open("a")
    except OSError as error:
        raise StartError(f"run.state_dir: cannot write to {state}: {error.strerror}") from error
    deadline = time.monotonic() + _CLAIM_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() > deadline:
                raise StartError(f"run.state_dir: another emulated cloud is already running on {state}") from error
            time.sleep(0.02)  # the previous process may be exiting
        else:
            return lock


def _listen(store: Store, port: int) -> socket.socket:
    former = store.get("setting", "port")
    wanted = port or (former["value"] if former else 0)
    try:
        listener = socket.create_server(("127.0.0.1", wanted), backlog=1024)
    except OSError as error:
        message = f"cloud.port: cannot listen on 127.0.0.1:{wanted}: {os.strerror(error.errno or 0)}"
        raise StartError(f"{message}; choose another port") from error
    store.put("setting", "port", {"value": listener.getsockname()[1]})
    return listener


def _write_endpoint(state: Path, url: str, token: str) -> None:
    """Write endpoint.json, which clients use to find the server, and the token file that gcloud reads."""
    endpoint = {
        "url": url,
        "token": token,
        "pid": os.getpid(),
        "project": PROJECT,
        "project_number": PROJECT_NUMBER,
        "roots": {document.partition(".")[0]: url + mount for document, mount in MOUNTS.items()},
        "ssh_config": str(state / "ssh_config"),
    }
    for name, text in (("token", token), ("endpoint.json", json.dumps(endpoint, indent=2))):
        replace_file(state / name, text)  # private, by the umask of the program
