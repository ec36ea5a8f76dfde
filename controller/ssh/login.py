"""Our account on the workers: an SSH key in the metadata of the nodes, or in our OS Login profile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from controller.core.clock import Clock
from controller.core.errors import SlipwayError
from controller.gcp.client import GoogleClient, NotFoundError
from controller.gcp.operations import wait_rpc
from controller.gcp.os_login import OsLogin
from controller.ssh.client_key import public_key_line


@dataclass
class Login:
    """The SSH key of a project, and whether workers accept it.

    Attributes:
        user: our name on the workers, unless OS Login gives another.
        state: folder under which the keys are kept.
        os_login: whether Google manages the logins; None: ask the project.
        pace: seconds between polls of a running operation.
    """

    google: GoogleClient
    clock: Clock
    project: str
    user: str
    state: Path
    os_login: bool | None = False
    pace: float = 5.0

    @property
    def key_dir(self) -> Path:
        """Folder of the SSH key; each project has its own."""
        return self.state / "keys" / self.project.replace(":", "_")

    def key_line(self) -> str:
        """Return our public key as a line of `ssh-keys` metadata; the key is created on first use."""
        return f"{self.user}:{public_key_line(self.key_dir, self.user)}"

    @cached_property
    def uses_os_login(self) -> bool:
        """Whether our key belongs in our OS Login profile, not in the metadata of nodes."""
        return self._os_login.enforced if self.os_login is None else self.os_login

    def user_name(self) -> str:
        """Return our name on the workers.

        Raises:
            SlipwayError: OS Login does not know our key.
        """
        if not self.uses_os_login:
            return self.user
        if (name := self._os_login.login(self._public_key)) is None:
            raise SlipwayError("your OS Login profile does not have our SSH key; `slipway up` puts it there")
        return name

    def is_authorized(self, node: str, known_keys: str = "") -> bool:
        """Whether the workers of a node accept our key.

        Args:
            node: its full resource name.
            known_keys: its `ssh-keys` when it was last observed; our key may have been added since.
        """
        if self.uses_os_login:
            return self._os_login.login(self._public_key) is not None
        line = self.key_line()
        if line in known_keys.splitlines():
            return True
        try:
            return line in self._metadata(node).get("ssh-keys", "").splitlines()
        except NotFoundError:
            return False

    def authorize(self, node: str) -> None:
        """Make the workers accept our key, as `gcloud compute tpus tpu-vm ssh` does; other keys stay."""
        if self.uses_os_login:
            self._os_login.add(self._public_key)
            return
        metadata = self._metadata(node)
        lines = [*metadata.get("ssh-keys", "").splitlines(), self.key_line()]
        body = {"metadata": metadata | {"ssh-keys": "\n".join(filter(None, lines))}}
        operation = self.google.call(
            "tpu", "projects.locations.nodes.patch", name=node, updateMask="metadata", body=body
        )
        wait_rpc(self, "tpu", operation, "projects.locations.operations.get")

    def _metadata(self, node: str) -> dict[str, Any]:
        return dict(self.google.call("tpu", "projects.locations.nodes.get", name=node).get("metadata", {}))

    @cached_property
    def _os_login(self) -> OsLogin:
        return OsLogin(self.google, self.project)

    @property
    def _public_key(self) -> str:
        return self.key_line().partition(":")[2]
