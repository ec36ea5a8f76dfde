"""What the controller gets from outside: time, Google, SSH and the stream of events. Tests pass in others."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from controller.core.clock import Clock
from controller.core.events import Events
from controller.gcp.client import GoogleClient
from controller.ssh.fleets import Fleets, SshTarget
from controller.ssh.login import Login

if TYPE_CHECKING:
    from controller.ssh.fleet import Fleet


@dataclass
class Context:
    """`pace` is how often something pending is asked for, in seconds; `state` the folder of keys and records."""

    project: str
    google: GoogleClient
    clock: Clock
    events: Events
    state: Path
    login: Login
    pace: float
    make_fleet: Callable[[SshTarget], Fleet]
    """Opens the SSH connections to a pod; `fleets` keeps them."""
    billed: bool = True
    draw: Callable[[], float] = random.random
    """A number in [0, 1), to spread what many do at the same time."""
    find_public_ip: Callable[[], str | None] = lambda: None
    """Returns the address under which the workers see this machine, or None; may ask a web service."""
    before_pod_write: Callable[[], int] = lambda: 0
    """Called before each change to the pod: returns the token of our lease, raises if another controller holds it."""
    extra_ssh_keys: tuple[str, ...] = ()
    """More lines for the `ssh-keys` metadata of a new node, so that the user who handed over a run can still log in."""
    lease_path: str = ""
    """`BUCKET/POD` of that lease."""
    permission_denied: set[str] = field(default_factory=set)
    """Ids of optional resources that the caller may not create; they are not tried again."""
    fleets: Fleets = field(init=False)

    def __post_init__(self) -> None:
        self.fleets = Fleets(self.make_fleet, lambda: (self.lease_path, self.before_pod_write()))

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
        """https://cloud.google.com/resource-manager/reference/rest/v1/projects/get."""
        return self.google.call("cloudresourcemanager", "projects.get", projectId=self.project)["projectNumber"]

    def close(self) -> None:
        """Close every connection."""
        self.google.close()
        self.fleets.close()
