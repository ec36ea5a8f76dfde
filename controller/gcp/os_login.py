"""OS Login: where a project enforces it, our SSH key goes into our Google profile, not into a node's metadata.

https://cloud.google.com/compute/docs/oslogin
"""

from functools import cached_property

from controller.core.errors import SlipwayError
from controller.gcp.client import GoogleClient
from controller.gcp.errors import ForbiddenError, NotFoundError


class OsLogin:
    """The caller's OS Login profile in a project."""

    def __init__(self, google: GoogleClient, project: str) -> None:
        self._google, self._project = google, project

    @cached_property
    def is_enforced(self) -> bool:
        """Return whether the project's metadata enforces OS Login; False without permission to read it."""
        try:
            answer = self._google.call("compute", "projects.get", project=self._project)
        except ForbiddenError:
            return False
        items = answer.get("commonInstanceMetadata", {}).get("items", [])
        return any(i["key"] == "enable-oslogin" and i.get("value", "").upper() == "TRUE" for i in items)

    def login(self, public_key: str) -> str | None:
        """Return our user name on the VMs, or None until this key is in our profile."""
        name = f"users/{self._email}"
        try:
            profile = self._google.call("oslogin", "users.getLoginProfile", name=name, projectId=self._project)
        except NotFoundError:
            return None
        keys = [key.get("key", "").split()[:2] for key in profile.get("sshPublicKeys", {}).values()]
        accounts = sorted(profile.get("posixAccounts", []), key=lambda account: not account.get("primary", False))
        return accounts[0]["username"] if accounts and public_key.split()[:2] in keys else None

    def add_key(self, public_key: str) -> None:
        """Add a key to our profile, which also creates the account."""
        self._google.call(
            "oslogin",
            "users.importSshPublicKey",
            parent=f"users/{self._email}",
            projectId=self._project,
            body={"key": public_key},
        )

    @cached_property
    def _email(self) -> str:
        if known := self._google.service_account:
            return known
        email = self._google.call("oauth2", "userinfo.get").get("email")
        if not email:
            raise SlipwayError(
                "OS Login needs your email address, which these credentials do not include; run `gcloud auth "
                "application-default login` again, or set ssh.os_login=false if the project allows it"
            )
        return email
