"""Dependencies of the controller: clock, Google client, SSH and the event stream. Tests inject their own.

With them goes the progress of a long transfer: an event now and then with bytes and rate.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from controller.core.events import Events
from controller.core.local_notes import LocalNotes
from controller.core.this_process import Clock
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
    refused_since: dict[str, float] = field(default_factory=dict)
    """Where a pod may be although Google refuses to say so, and since when; seconds since the epoch."""
    known_accounts: dict[str, bool] = field(default_factory=dict)
    """Addresses of service accounts that exist although IAM may not show them yet; whether this session made them."""
    fleets: Fleets = field(init=False)
    local_notes: LocalNotes = field(init=False)

    def __post_init__(self) -> None:
        self.local_notes = LocalNotes(self.events)
        self.fleets = Fleets(
            self.make_fleet,
            lambda: (self.lease_path, self.before_pod_write()),
            lambda message: self.events.note("ssh", message),
            self.clock.raise_if_interrupted,
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


EVERY_SECONDS = 1.0


class Progress:
    """Of one resource; threads may share it. `total` is in bytes, 0 where it is not known."""

    def __init__(self, context: Context, subject: str, total: int = 0) -> None:
        self._context, self._subject, self._total = context, subject, total
        self._began = self._last_event = context.clock.now()
        self._transferred = 0
        self._lock = threading.Lock()

    def advance(self, size: int) -> None:
        """So many bytes more have been moved (fewer, where some have to be sent again)."""
        with self._lock:
            self._transferred += size
            now = self._context.clock.now()
            if now - self._last_event < EVERY_SECONDS:
                return
            self._last_event = now
            rate = self._transferred / (now - self._began)
        whole = f" of {format_size(self._total)}" if self._total else ""
        message = f"{format_size(self._transferred)}{whole}, {format_size(rate)}/s"
        data = {"bytes": self._transferred, "total": self._total, "bytes_per_second": round(rate)}
        self._context.events.emit("progress", self._subject, message, **data)


def format_size(size: float) -> str:
    """`1.2 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
