"""Dependencies of the controller: clock, Google client, SSH and the event stream. Tests inject their own."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from controller.core.clock import Clock
from controller.core.events import Events
from controller.gcp.client import GoogleClient
from controller.ssh.fleet import Fleet, Fleets, SshTarget
from controller.ssh.login import Login


@dataclass(frozen=True)
class SurplusSlice:
    """A slice that was billed and never used. `began`: seconds since the epoch."""

    uid: str
    pod: str
    accelerator_type: str
    zone: str
    capacity: str
    began: float


@dataclass
class Context:
    """Dependencies of a run. `poll_seconds`: between polls of operations; `state_dir`: folder of keys and records."""

    project: str
    google: GoogleClient
    clock: Clock
    events: Events
    state_dir: Path
    ssh_login: Login
    poll_seconds: float
    make_fleet: Callable[[SshTarget], Fleet]
    """Opens the SSH connections to a pod; `fleets` keeps them."""
    is_billed: bool = True
    random_float: Callable[[], float] = random.random
    """Returns a random number in [0, 1), used for jitter."""
    find_public_ip: Callable[[], str | None] = lambda: None
    """Returns this machine's address as the workers see it, or None; may query a web service."""
    before_pod_write: Callable[[], int] = lambda: 0
    """Called before each change to the pod; returns the token of our lease, raises if another controller holds it."""
    on_surplus: Callable[[SurplusSlice], None] = lambda _: None
    """Called with each slice that was granted beside the pod, before it is given back and after; a run counts it."""
    extra_ssh_keys: tuple[str, ...] = ()
    """Further lines of a new node's `ssh-keys` metadata, so that the user who handed over a run can still log in."""
    lease_path: str = ""
    """`BUCKET/POD` of that lease."""
    bucket: str = ""
    """Holds records that are of no single run."""
    permission_denied: set[str] = field(default_factory=set)
    """Ids of optional resources that the caller may not create; they are not retried."""
    known_accounts: dict[str, bool] = field(default_factory=dict)
    """Addresses of service accounts that exist although IAM may not show them yet; whether this session made them."""
    fleets: Fleets = field(init=False)

    def __post_init__(self) -> None:
        self.fleets = Fleets(
            self.make_fleet,
            lambda: (self.lease_path, self.before_pod_write()),
            lambda message: self.events.note("ssh", message),
        )

    def account_email(self, account: str) -> str:
        """Return the address of a service account, given an id in the project, `default` or an address."""
        if "@" in account:
            return account
        if account == "default":
            return f"{self.project_number}-compute@developer.gserviceaccount.com"
        domain, _, project = self.project.rpartition(":")  # a project of a domain is called example.com:name
        return f"{account}@{project}{'.' * bool(domain)}{domain}.iam.gserviceaccount.com"

    @cached_property
    def project_number(self) -> str:
        """Number of the project: https://cloud.google.com/resource-manager/reference/rest/v1/projects/get."""
        return self.google.call("cloudresourcemanager", "projects.get", projectId=self.project)["projectNumber"]

    def close(self) -> None:
        self.google.close()
        self.fleets.close()
