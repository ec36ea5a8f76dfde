"""A running emulated cloud as tests see it: HTTP, SSH, and a pod made in one call."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from functools import cached_property
from pathlib import Path
from typing import Any

import asyncssh

ZONE, REGION = "us-central1-a", "us-central1"
PROJECT = "projects/slipway-local"
COMPUTE = f"compute/v1/{PROJECT}"
LOCATION = f"tpu/v2/{PROJECT}/locations/{ZONE}"
NODES, QUEUED = f"{LOCATION}/nodes", f"{LOCATION}/queuedResources"
INSTANCES = f"{COMPUTE}/zones/{ZONE}/instances"
RUNTIME = "v2-alpha-tpuv5-lite"
SUBNET_RANGE = "10.20.0.0/24"
APIS = "billingbudgets cloudbilling cloudresourcemanager compute iam iap oslogin secretmanager tpu"
LARGE_QUOTAS = {"INSTANCES": 200, "IN_USE_ADDRESSES": 200}

ApiAnswer = tuple[int, Any]


def run_localcloud(command: str, state: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line of the emulated cloud."""
    words = [sys.executable, "-m", "controller.localcloud", command, "--state", str(state), *flags]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


def wait_for(condition: Callable[[], Any], what: str = "it", seconds: float = 240.0) -> Any:
    """The first true value of `condition`; fails the test when none comes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s in vain for: {what}")


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@dataclass(frozen=True)
class EmulatedCloud:
    """An emulated cloud on `state`, started by `start`."""

    state: Path

    def start(self, *flags: str) -> None:
        done = run_localcloud("start", self.state, *flags)
        assert done.returncode == 0, done.stderr
        self.establish()

    def establish(self) -> None:
        """Make the project one in long use: its APIs are on, and Compute's quotas are large."""
        realism = self.call_ok("GET", "emulator/settings")["realism"]
        self.call_ok("POST", "emulator/settings", {"realism": "relaxed", "quotas": LARGE_QUOTAS})
        apis = {"serviceIds": [f"{api}.googleapis.com" for api in APIS.split()]}
        self.call_ok("POST", f"serviceusage/v1/{PROJECT}/services:batchEnable", apis)
        self.call_ok("POST", "emulator/settings", {"realism": realism})

    @property
    def endpoint(self) -> dict[str, Any]:
        return json.loads((self.state / "endpoint.json").read_text())

    @cached_property
    def ssh_key(self) -> asyncssh.SSHKey:
        return asyncssh.generate_private_key("ssh-ed25519")

    @property
    def public_key(self) -> str:
        return self.ssh_key.export_public_key().decode().strip()

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, Message]:
        """Status, body and headers of any request; with the token unless Authorization is given (or emptied)."""
        endpoint = self.endpoint
        all_headers = {"Authorization": f"Bearer {endpoint['token']}", **(headers or {})}
        all_headers = {name: value for name, value in all_headers.items() if value}
        url = path if path.startswith("http") else endpoint["url"] + path
        request = urllib.request.Request(url, data=body, method=method, headers=all_headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, response.read(), response.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), error.headers

    def call(self, method: str, path: str, body: Any = None) -> ApiAnswer:
        """Status and JSON of an API call."""
        data = None if body is None else json.dumps(body).encode()
        status, text, _ = self.send(method, path, data, {"Content-Type": "application/json"})
        return status, json.loads(text) if text else None

    def listed(self, path: str, items: str) -> list[Any]:
        """Return the items of all pages of a list."""
        page = self.call_ok("GET", path)
        found = list(page.get(items, ()))
        while "nextPageToken" in page:
            page = self.call_ok("GET", f"{path}?pageToken={page['nextPageToken']}")
            found += page.get(items, ())
        return found

    def call_ok(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of a call that must succeed."""
        status, answer = self.call(method, path, body)
        assert status in (200, 204), answer
        return answer

    def refused(self, method: str, path: str, body: Any, status: int, *words: str) -> str:
        """Make a call that must be refused, with these words in its status, reason or message; return its message."""
        answered, answer = self.call(method, path, body)
        assert answered == status, answer
        error = answer["error"]
        told = [error.get("status", ""), *(one["reason"] for one in error.get("errors", ())), error["message"]]
        assert all(any(word in one for one in told) for word in words), told
        return error["message"]

    def delete(self, path: str) -> None:
        """Delete a resource that has no VM; it is gone afterwards."""
        done = self.call_and_wait("DELETE", path)
        assert "error" not in done, done
        assert self.call("GET", path.partition("?")[0])[0] == 404

    def script(self, *specs: Mapping[str, Any]) -> None:
        """Add faults."""
        body = {"key": f"faults-{time.monotonic_ns()}", "faults": list(specs)}
        assert self.call_ok("POST", "emulator/faults", body) == {"registered": True}

    @contextmanager
    def settings(self, **changes: Any) -> Iterator[None]:
        """Other settings for a while."""
        before = self.call_ok("GET", "emulator/settings")
        self.call_ok("POST", "emulator/settings", changes)
        yield
        self.call_ok("POST", "emulator/settings", {name: before[name] for name in changes})

    def wait_operation(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        """Waits for a compute or tpu operation; returns it when it has ended."""
        if operation.get("kind") == "compute#operation":
            path = operation["selfLink"].removeprefix(self.endpoint["url"])
            return self.call_ok("POST", f"{path}/wait")
        return wait_for(
            lambda: (done := self.call_ok("GET", f"tpu/v2/{operation['name']}")).get("done") and done, operation["name"]
        )

    def call_and_wait(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """A call that must succeed and starts an operation, which is waited for."""
        return self.wait_operation(self.call_ok(method, path, body))

    def create_network(self, name: str, *, ssh: bool = True, internal: bool = True) -> None:
        """A custom network with one subnetwork and, if asked for, rules that admit SSH and workers."""
        self.call_and_wait("POST", f"{COMPUTE}/global/networks", {"name": name, "autoCreateSubnetworks": False})
        body = {"name": name, "network": f"{PROJECT}/global/networks/{name}", "ipCidrRange": SUBNET_RANGE}
        self.call_and_wait("POST", f"{COMPUTE}/regions/{REGION}/subnetworks", body)
        if ssh:
            self.create_rule(f"{name}-ssh", name, ["22"], ["0.0.0.0/0"])
        if internal:
            self.create_rule(f"{name}-internal", name, None, [SUBNET_RANGE])

    def create_rule(self, name: str, network: str, ports: list[str] | None, sources: list[str]) -> None:
        """A firewall rule that allows TCP."""
        allowed = {"IPProtocol": "tcp"} | ({"ports": ports} if ports else {})
        body = {
            "name": name,
            "network": f"{PROJECT}/global/networks/{network}",
            "allowed": [allowed],
            "sourceRanges": sources,
        }
        self.call_and_wait("POST", f"{COMPUTE}/global/firewalls", body)

    def create_pod(self, kind: str = "v5litepod-8") -> dict[str, Any]:
        """A READY node `pod` in a network of its own, `net`."""
        self.create_network("net")
        return self.create_node("pod", "net", kind)

    def create_node(self, name: str, network: str, kind: str = "v5litepod-8", **more: Any) -> dict[str, Any]:
        """A READY node whose workers admit user `me` with `ssh_key`."""
        done = self.call_and_wait("POST", f"{NODES}?nodeId={name}", self.node_body(network, kind) | more)
        assert "error" not in done, done
        return self.call_ok("GET", f"{NODES}/{name}")

    def node_state(self, name: str) -> str | None:
        """None: there is no such node."""
        status, node = self.call("GET", f"{NODES}/{name}")
        return node["state"] if status == 200 else None

    def node_body(self, network: str, kind: str = "v5litepod-8") -> dict[str, Any]:
        return {
            "acceleratorType": kind,
            "runtimeVersion": RUNTIME,
            "networkConfig": {"network": network, "subnetwork": network},
            "metadata": {"ssh-keys": f"me:{self.public_key} me"},
        }

    async def connect(self, node: Mapping[str, Any], worker: int = 0, **options: Any) -> asyncssh.SSHClientConnection:
        """An SSH connection to a worker, with the port from ssh_config and the host key from the guest attributes."""
        address = node["networkEndpoints"][worker]["ipAddress"]
        items = wait_for(lambda: self.guest_attributes(node, worker), "guest attributes")
        item = next(item for item in items if item["namespace"] == "hostkeys")
        host_key = asyncssh.import_public_key(f"{item['key']} {item['value']}")
        defaults = {
            "username": "me",
            "client_keys": [self.ssh_key],
            "known_hosts": ([host_key], [], []),
            "config": [str(self.state / "ssh_config")],
        }
        return await asyncssh.connect(address, **(defaults | options))

    def guest_attributes(self, node: Mapping[str, Any], worker: int) -> list[dict[str, Any]]:
        """What a worker has published so far."""
        path = f"tpu/v2/{node['name']}:getGuestAttributes"
        status, answer = self.call("POST", path, {"workerIds": [str(worker)]})
        assert status in (200, 404), answer
        return answer["guestAttributes"][0]["queryValue"]["items"] if status == 200 else []

    def run_on_worker(
        self, node: Mapping[str, Any], command: str, worker: int = 0, **options: Any
    ) -> asyncssh.SSHCompletedProcess:
        """Runs a command on a worker over a connection of its own."""

        async def once() -> asyncssh.SSHCompletedProcess:
            connection = await self.connect(node, worker)
            try:
                return await connection.run(command, **options)
            finally:
                connection.close()
                await connection.wait_closed()

        return asyncio.run(once())

    def start_background(self, node: Mapping[str, Any], worker: int = 0) -> int:
        """Starts a detached program on a worker; returns its process id."""
        text = self.run_on_worker(node, "setsid nohup sleep 600 >/dev/null 2>&1 </dev/null & echo $!", worker).stdout
        assert isinstance(text, str)
        return int(text)

    def kill(self) -> None:
        """kill -9 of the server."""
        pid = self.endpoint["pid"]
        os.kill(pid, 9)
        wait_for(lambda: not is_alive(pid), "the server is dead")

    def request_log(self, after: int = 0) -> list[dict[str, Any]]:
        """The request log."""
        _, text, _ = self.send("GET", f"emulator/requests?after={after}")
        return [json.loads(line) for line in text.splitlines()]
