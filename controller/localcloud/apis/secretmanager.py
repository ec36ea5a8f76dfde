"""Secret Manager v1: secrets and their versions (https://cloud.google.com/secret-manager/docs/reference/rest)."""

import base64
import re
import time
from typing import Any

from controller.localcloud.http.call import PROJECT_NUMBER, ApiCall, Handler, check_project, paginate, timestamp
from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Document, Store

_ID = re.compile(r"[A-Za-z0-9_-]{1,255}")


class SecretManager:
    """Handlers of the API. Payloads of versions have the kind "secretPayload", which the state view omits."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def handlers(self) -> dict[str, Handler]:
        secrets = "secretmanager.v1:projects.secrets."
        return {
            f"{secrets}create": self._create,
            f"{secrets}get": lambda call: self._secret(_name(call)),
            f"{secrets}list": self._list,
            f"{secrets}delete": self._delete,
            f"{secrets}addVersion": self._add_version,
            f"{secrets}versions.access": self._access,
        }

    def _create(self, call: ApiCall) -> Document:
        project, secret = call.path["projectsId"], call.query.get("secretId", "")
        check_project(project)
        if not _ID.fullmatch(secret):
            raise ApiError(400, f"Secret ID [{secret}] must match [a-zA-Z0-9_-]{{1,255}}.")
        if self._store.get("secret", secret):
            raise ApiError(409, f"Secret [projects/{PROJECT_NUMBER}/secrets/{secret}] already exists.")
        body = {
            "name": f"projects/{PROJECT_NUMBER}/secrets/{secret}",
            "replication": call.body.get("replication", {"automatic": {}}),
            "createTime": timestamp(time.time()),
            **({"labels": call.body["labels"]} if call.body.get("labels") else {}),
        }
        self._store.put("secret", secret, body)
        return body

    def _list(self, call: ApiCall) -> dict[str, Any]:
        check_project(call.path["projectsId"])
        return paginate(call, [body for _, body in self._store.items("secret")], "secrets")

    def _delete(self, call: ApiCall) -> Document:
        secret = _name(call)
        self._secret(secret)
        for name, _ in self._store.items("secretPayload", f"{secret}/"):
            self._store.delete("secretPayload", name)
        self._store.delete("secret", secret)
        return {}

    def _add_version(self, call: ApiCall) -> Document:
        secret = _name(call)
        self._secret(secret)
        number = len(self._store.items("secretPayload", f"{secret}/")) + 1
        data = call.body.get("payload", {}).get("data", "")
        try:
            base64.b64decode(data, validate=True)
        except ValueError as error:
            raise ApiError(400, f"payload.data: {error}") from error
        self._store.put("secretPayload", f"{secret}/{number:06d}", {"data": data})
        return {"name": f"projects/{PROJECT_NUMBER}/secrets/{secret}/versions/{number}", "state": "ENABLED"}

    def _access(self, call: ApiCall) -> Document:
        secret, version = _name(call), call.path["versionsId"]
        self._secret(secret)
        stored = self._store.items("secretPayload", f"{secret}/")
        number = len(stored) if version == "latest" else int(version) if version.isdigit() else 0
        if not 1 <= number <= len(stored):
            name = f"projects/{PROJECT_NUMBER}/secrets/{secret}/versions/{version}"
            raise ApiError(404, f"Secret Version [{name}] not found.")
        name = f"projects/{PROJECT_NUMBER}/secrets/{secret}/versions/{number}"
        return {"name": name, "payload": {"data": stored[number - 1][1]["data"]}}

    def _secret(self, secret: str) -> Document:
        found = self._store.get("secret", secret)
        if found is None:
            raise ApiError(404, f"Secret [projects/{PROJECT_NUMBER}/secrets/{secret}] not found.")
        return found


def _name(call: ApiCall) -> str:
    check_project(call.path["projectsId"])
    return call.path["secretsId"]
