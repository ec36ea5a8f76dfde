"""Everything outside the program, handed in: time, Google, SSH, the stream of events. Tests hand in others."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.core.clock import Clock
from controller.core.errors import SlipwayError
from controller.core.events import Events
from controller.gcp.client import GoogleClient
from controller.gcp.operations import wait_rpc
from controller.gcp.os_login import OsLogin

if TYPE_CHECKING:
    from controller.resources.pod.node import Node
    from controller.ssh.fleet import Fleet


@dataclass
class Context:
    """`pace` is how often something pending is asked for, in seconds; `state` the folder of keys and records."""

    project: str
    google: GoogleClient
    clock: Clock
    events: Events
    state: Path
    ssh_user: str
    pace: float
    make_fleet: Callable[[Context, Node], Fleet]
    billed: bool = True
    draw: Callable[[], float] = random.random
    """A number in [0, 1), to spread what many do at the same time."""
    find_public_ip: Callable[[], str | None] = lambda: None
    """Returns the address under which the workers see this machine, or None; may ask a web service."""
    iap: str = "wss://tunnel.cloudproxy.app/v4"
    """Where Google's Identity-Aware Proxy is."""
    os_login: bool | None = False
    """Are logins managed by Google? None: if the project says so."""
    before_pod_write: Callable[[], int] = lambda: 0
    """Called before each change to the pod: returns the token of our lease, raises if another controller holds it."""
    extra_ssh_keys: tuple[str, ...] = ()
    """More lines for the `ssh-keys` metadata of a new node, so that the user who handed over a run can still log in."""
    lease_path: str = ""
    """`BUCKET/POD` of that lease."""
    permission_denied: set[str] = field(default_factory=set)
    """Ids of optional resources that the caller may not create; they are not tried again."""
    _fleets: dict[str, Fleet] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def account_email(self, account: str) -> str:
        """The address of a service account: `account` is an id in the project, `default`, or an address already."""
        if "@" in account:
            return account
        if account == "default":
            return f"{self.project_number}-compute@developer.gserviceaccount.com"
        domain, _, project = self.project.rpartition(":")  # a project of a domain is called example.com:name
        return f"{account}@{project}{'.' * bool(domain)}{domain}.iam.gserviceaccount.com"

    @cached_property
    def project_number(self) -> str:
        """https://cloud.google.com/resource-manager/reference/rest/v1/projects/get"""
        return self.google.call("cloudresourcemanager", "projects.get", projectId=self.project)["projectNumber"]

    @property
    def keys(self) -> Path:
        """The folder of our SSH key, which is another one in every project."""
        return self.state / "keys" / self.project.replace(":", "_")

    def ssh_key_line(self) -> str:
        """Our public key as a line of a node's `ssh-keys` metadata; the key is made on first use."""
        from controller.ssh.client_key import public_key_line

        return f"{self.ssh_user}:{public_key_line(self.keys, self.ssh_user)}"

    @cached_property
    def uses_os_login(self) -> bool:
        """Is our key put into our OS Login profile, not into the node's metadata?"""
        return self._os_login.enforced if self.os_login is None else self.os_login

    def accepts_our_key(self, node: Node) -> bool:
        """Is our key known where the workers look for it?"""
        if self.uses_os_login:
            return self._os_login.login(self._public_key) is not None
        line = self.ssh_key_line()  # what was seen of a pod may be older than our key on it
        if line in node.status.ssh_keys.splitlines():
            return True
        found = node.find(self)
        return found is not None and line in found.status.ssh_keys.splitlines()

    def authorize_our_key(self, node: Node) -> None:
        """Make our key known there, beside those that are."""
        if self.uses_os_login:
            self._os_login.add(self._public_key)
        else:
            self._add_ssh_key(node)

    def login(self) -> str:
        """Who we are on the workers.

        Raises:
            SlipwayError: OS Login does not know our key.
        """
        if not self.uses_os_login:
            return self.ssh_user
        if (name := self._os_login.login(self._public_key)) is None:
            raise SlipwayError("your OS Login profile does not have our SSH key; `slipway up` puts it there")
        return name

    @cached_property
    def _os_login(self) -> OsLogin:
        return OsLogin(self.google, self.project)

    @property
    def _public_key(self) -> str:
        return self.ssh_key_line().partition(":")[2]

    def _add_ssh_key(self, node: Node) -> None:
        """What `gcloud compute tpus tpu-vm ssh` does with a running node."""
        answer = self.google.call("tpu", "projects.locations.nodes.get", name=node.path(self))
        metadata: dict[str, Any] = dict(answer.get("metadata", {}))
        lines = [*metadata.get("ssh-keys", "").splitlines(), self.ssh_key_line()]
        body = {"metadata": metadata | {"ssh-keys": "\n".join(filter(None, lines))}}
        operation = self.google.call(
            "tpu", "projects.locations.nodes.patch", name=node.path(self), updateMask="metadata", body=body
        )
        wait_rpc(self, "tpu", operation, "projects.locations.operations.get")

    def fleet(self, node: Node) -> Fleet:
        """The SSH connections to this incarnation of a node; those of an earlier one are closed."""
        with self._lock:
            if node.status.uid not in self._fleets:
                for uid in list(self._fleets):
                    self._fleets.pop(uid).close()
                self._fleets[node.status.uid] = self.make_fleet(self, node)
                self._fleets[node.status.uid].guard = lambda: (self.lease_path, self.before_pod_write())
            return self._fleets[node.status.uid]

    def close(self) -> None:
        """Close every connection."""
        self.google.close()
        with self._lock:
            for fleet in self._fleets.values():
                fleet.close()
            self._fleets.clear()
