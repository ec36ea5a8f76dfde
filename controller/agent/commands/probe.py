"""Probes of the JAX devices and of the connection to worker 0."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import TYPE_CHECKING

from ..fs import AgentError, agent_root, locked, read_json, write_json
from ..process import boot_id, run_tool
from ..program.state import active_attempt
from .venv import NO_VENV, program_env, venv_folder

if TYPE_CHECKING:
    from ..protocol import Devices, Peers

DEVICE_SCRIPT = """
import json, jax
local = jax.local_devices()
kind = ", ".join(sorted({device.device_kind for device in local}))
backend, everywhere = jax.default_backend(), jax.device_count()
print(json.dumps({"backend": backend, "local_devices": len(local), "devices": everywhere, "kind": kind}))
"""


def probe_devices(venv: str, timeout_seconds: float = 120.0, env: dict[str, str] | None = None) -> Devices:
    """Return the JAX devices of this worker, probed once per boot; on a pod, probe all workers at the same time."""
    path, boot = agent_root() / "devices.json", boot_id()
    with locked("devices"):
        known = read_json(path)
        if known and known["boot_id"] == boot:
            return known
        if holder := active_attempt():
            raise AgentError(f"run {holder['run_id']} is using the devices")
        python = "python3" if venv == NO_VENV else f"{venv_folder(venv)}/bin/python"
        printed = run_tool([python, "-c", DEVICE_SCRIPT], timeout=timeout_seconds, env=program_env(venv, env or {}))
        facts = json.loads(printed.splitlines()[-1])
        found: Devices = {
            "boot_id": boot,
            "backend": facts["backend"],
            "local_devices": facts["local_devices"],
            "devices": facts["devices"],
            "kind": facts["kind"],
        }
        write_json(path, found)
    return found


def probe_peers(index: int, addresses: list[str], port: int, timeout_seconds: float = 20.0) -> Peers:
    """Check that worker 0 is reachable from the others: it listens, they connect. Call on all workers at the same time.

    Args:
        index: index of this worker.
        addresses: addresses of all workers; TPU_WORKER_HOSTNAMES overrides them, as it does for `jax.distributed`.
        port: any free port of worker 0.
        timeout_seconds: how long to listen or to retry.
    """
    if hostnames := os.environ.get("TPU_WORKER_HOSTNAMES"):
        addresses = hostnames.split(",")
    end = time.monotonic() + timeout_seconds
    problem = ""
    if index:
        problem = _connect_to_worker_0(addresses[0], port, index, end)
    elif len(addresses) > 1:
        problem = _listen_for_peers(addresses, port, end)
    found: Peers = {"boot_id": boot_id(), "reachable": not problem, "detail": problem}
    write_json(agent_root() / "peers.json", found)
    return found


def _listen_for_peers(addresses: list[str], port: int, end: float) -> str:
    missing = set(range(1, len(addresses)))
    try:
        server = socket.create_server((addresses[0], port), backlog=len(addresses))
    except OSError as error:
        return f"worker 0 cannot listen on {addresses[0]}:{port}: {error}"
    with server:
        while missing and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                peer, _ = server.accept()
                with peer:
                    peer.settimeout(1.0)
                    missing.discard(int(peer.recv(16) or b"0"))
            except (OSError, ValueError):
                continue  # timeout, or an unrelated client
    return f"worker 0 received nothing from worker {', '.join(map(str, sorted(missing)))}" if missing else ""


def _connect_to_worker_0(address: str, port: int, index: int, end: float) -> str:
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(0.1, end - time.monotonic())) as peer:
                peer.sendall(b"%d" % index)
                return ""
        except OSError as error:  # it may not listen yet
            if time.monotonic() > end:
                return f"worker 0 does not answer at {address}:{port}: {error}"
        time.sleep(0.05)
