"""Resource kind: a secret in Secret Manager, which the lab fills in the console."""

from typing import Any

API, MARK = "secretmanager", {"managed-by": "slipway"}


class LabSecret:
    """The secret `lab-key`; `config` is the composed config."""

    def __init__(self, config: Any) -> None:
        self.name = "lab-key"
        self.wanted = {"replication": {"automatic": {}}}
        self.apis = ["secretmanager.googleapis.com"]

    def read(self, google: Any, project: str) -> dict[str, Any]:
        """Return what there is; a 404 of `google.call` means that the secret does not exist."""
        found = google.call(API, "projects.secrets.get", name=f"projects/{project}/secrets/{self.name}")
        managed = found.get("labels", {}).items() >= MARK.items()
        return {"replication": found["replication"], "managed": managed}

    def create(self, google: Any, project: str) -> None:
        """Create the secret without a version."""
        body = {**self.wanted, "labels": MARK}
        google.call(API, "projects.secrets.create", parent=f"projects/{project}", secretId=self.name, body=body)

    def delete(self, google: Any, project: str) -> None:
        """Delete the secret with its versions."""
        google.call(API, "projects.secrets.delete", name=f"projects/{project}/secrets/{self.name}")
