"""OS Login v1 and user info (https://cloud.google.com/compute/docs/oslogin/rest/v1/users)."""

import hashlib
from collections.abc import Mapping

from controller.localcloud.http.call import PROJECT, ApiCall, Handler, check_project
from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Document, Store

EMAIL = "you@example.com"  # the user that the token authenticates
_USER = "you_example_com"
PROFILE_KIND = "loginProfile"
PROJECT_METADATA_KIND = "project-metadata"  # name in the store, of kind `setting`


def enables_oslogin(metadata: Mapping[str, str]) -> bool:
    """Return whether metadata enables OS Login."""
    return metadata.get("enable-oslogin", "").upper() == "TRUE"


def keys_for_user(store: Store, user: str) -> list[str]:
    """Return the SSH keys that let this OS Login user into a VM."""
    profile = store.get(PROFILE_KIND, EMAIL) if user == _USER else None
    return [key["key"] for key in (profile or {}).get("sshPublicKeys", {}).values()]


class OsLogin:
    """Login profile of the only user."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def handlers(self) -> dict[str, Handler]:
        return {
            "oauth2.v2:userinfo.get": lambda call: {"email": EMAIL, "verified_email": True},
            "oslogin.v1:users.getLoginProfile": self._get,
            "oslogin.v1:users.importSshPublicKey": self._import,
        }

    def _get(self, call: ApiCall) -> Document:
        _check_user(call)
        return self._store.get(PROFILE_KIND, EMAIL) or {"name": EMAIL}

    def _import(self, call: ApiCall) -> Document:
        _check_user(call)
        if "projectId" in call.query:
            check_project(call.query["projectId"])
        key = call.body.get("key", "").strip()
        if not key.startswith(("ssh-", "ecdsa-")):
            raise ApiError(400, "Invalid SSH public key")
        profile = self._store.get(PROFILE_KIND, EMAIL) or {"name": EMAIL, "sshPublicKeys": {}}
        fingerprint = hashlib.sha256(key.encode()).hexdigest()
        entry = {"key": key, "fingerprint": fingerprint, "name": f"users/{EMAIL}/sshPublicKeys/{fingerprint}"}
        profile["sshPublicKeys"][fingerprint] = entry
        account = {"username": _USER, "uid": "1234567890", "gid": "1234567890", "homeDirectory": f"/home/{_USER}"}
        account |= {"primary": True, "operatingSystemType": "LINUX", "accountId": PROJECT}
        account["name"] = f"users/{EMAIL}/projects/{PROJECT}"
        profile["posixAccounts"] = [account]
        self._store.put(PROFILE_KIND, EMAIL, profile)
        return {"loginProfile": profile}


def _check_user(call: ApiCall) -> None:
    user = call.path["usersId"]
    if user != EMAIL:
        raise ApiError(403, f"The caller is {EMAIL} and may not see the profile of {user}")
