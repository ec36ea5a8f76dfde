"""Account on the workers: an SSH key in the VMs' metadata, or in the user's OS Login profile."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from controller.core.clock import Clock
from controller.core.errors import SlipwayError
from controller.gcp.client import GoogleClient
from controller.gcp.errors import ConflictError, NotFoundError
from controller.gcp.os_login import OsLogin
from controller.gcp.worker_vms import WorkerVms
from controller.ssh.client_key import public_key_line

CONFLICT_SECONDS = 120.0
"""How long a node may be busy with another change before our key cannot be added."""


@dataclass
class Login:
    """SSH key of a project, and its access to the workers.

    Attributes:
        user: name on the workers, unless OS Login assigns another.
        state: folder that holds the keys.
        os_login: whether Google manages the logins; None: ask the project.
        poll_seconds: seconds between polls of a running operation.
    """

    google: GoogleClient
    clock: Clock
    project: str
    user: str
    state: Path
    os_login: bool | None = False
    poll_seconds: float = 5.0

    @property
    def key_dir(self) -> Path:
        """Return the folder of the project's SSH key."""
        return self.state / "keys" / self.project.replace(":", "_")

    def key_line(self) -> str:
        """Return the public key as a line of `ssh-keys` metadata; the key is created on first use."""
        return f"{self.user}:{public_key_line(self.key_dir, self.user)}"

    @cached_property
    def uses_os_login(self) -> bool:
        """Return whether the key belongs in the OS Login profile, not in the VMs' metadata."""
        return self._os_login.is_enforced if self.os_login is None else self.os_login

    def user_name(self) -> str:
        """Return the user name on the workers. Raises SlipwayError if the OS Login profile lacks the key."""
        if not self.uses_os_login:
            return self.user
        if (name := self._os_login.login(self._public_key)) is None:
            raise SlipwayError("your OS Login profile does not have Slipway's SSH key; `slipway up` adds it")
        return name

    def is_authorized(self, vms: WorkerVms, known_keys: str = "") -> bool:
        """Return whether the workers accept the key.

        Args:
            vms: the workers' VMs.
            known_keys: their `ssh-keys` when last observed; the key may have been added since.
        """
        if self.uses_os_login:
            return self._os_login.login(self._public_key) is not None
        line = self.key_line()
        if line in known_keys.splitlines():
            return True
        try:
            return line in vms.ssh_keys(self.google).splitlines()
        except NotFoundError:
            return False

    def authorize(self, vms: WorkerVms) -> None:
        """Make the workers accept the key, as `gcloud compute tpus tpu-vm ssh` does; other keys stay."""
        if self.uses_os_login:
            self._os_login.add_key(self._public_key)
            return
        late = self.clock.deadline(CONFLICT_SECONDS)
        while not self.is_authorized(vms):
            try:
                vms.add_ssh_key(self, self.key_line())
            except ConflictError:  # another client changes a VM at this moment, maybe for a key too
                if late():
                    raise
                self.clock.sleep(self.poll_seconds)
            else:
                return

    @cached_property
    def _os_login(self) -> OsLogin:
        return OsLogin(self.google, self.project)

    @property
    def _public_key(self) -> str:
        return self.key_line().partition(":")[2]
