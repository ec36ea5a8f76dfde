"""Who sends a request: the user on the laptop, or the service account of a VM; and the access tokens that tell.

A token states who holds it and until when, and is signed with the emulated cloud's own token. That one, in
endpoint.json, stands for the user's refresh token, and for tools that cannot refresh is a token that does not expire.
"""

import hashlib
import hmac
import time
from dataclasses import dataclass
from typing import Any

from controller.localcloud.apis.oslogin import EMAIL
from controller.localcloud.http.call import DEFAULT_ACCOUNT
from controller.localcloud.http.errors import ApiError, unauthenticated
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store
from controller.localcloud.vms.hosts import Vms

LAPTOP = "laptop"
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
USER_SCOPES = (
    "openid",
    "https://www.googleapis.com/auth/userinfo.email",
    CLOUD_PLATFORM,
    "https://www.googleapis.com/auth/sqlservice.login",
)
"""Scopes of `gcloud auth application-default login`."""


@dataclass(frozen=True)
class Caller:
    """Caller of a request.

    Attributes:
        client: "laptop", or "UID/INDEX" of the VM that sent it.
        email: address of the user or service account; "" for a VM without one.
        scopes: scopes of the token.
        inherited: roles that the caller has in the project without being named in its policy.
    """

    client: str
    email: str
    scopes: frozenset[str]
    inherited: tuple[str, ...] = ()

    @property
    def member(self) -> str:
        return f"{'user' if self.client == LAPTOP else 'serviceAccount'}:{self.email}"


class Callers:
    """Finds the caller of a client."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings

    def find(self, client: str) -> Caller:
        if client == LAPTOP:
            return Caller(LAPTOP, EMAIL, frozenset(USER_SCOPES), self._settings.caller_roles)
        uid, _, index = client.partition("/")
        account = next((n["serviceAccount"] for _, n in self._store.items("node") if n["id"] == uid), None)
        if account is not None:  # https://cloud.google.com/tpu/docs/reference/rest/v2/ServiceAccount: none means all
            email, scopes = account["email"], account.get("scope") or [CLOUD_PLATFORM]
        else:
            instance = Vms(self._store).instance_of(uid, int(index or 0)) or {}
            accounts = instance.get("serviceAccounts") or [{"email": "", "scopes": []}]
            email, scopes = accounts[0]["email"], accounts[0].get("scopes", [])
        return Caller(client, email, frozenset(scopes), ("roles/editor",) if email == DEFAULT_ACCOUNT else ())


EXPIRED_KIND, EXPIRED_NAME = "setting", "tokensExpired"
_PREFIX = "ya29"


class Tokens:
    def __init__(self, store: Store, settings: Settings, secret: str) -> None:
        self._store, self._settings, self._secret = store, settings, secret

    def issue(self, client: str) -> dict[str, Any]:
        """Return the answer of a token endpoint for a client: "laptop", or "UID/INDEX" of a VM."""
        lifetime = self._settings.token_seconds
        now = time.time()
        text = f"{_PREFIX}.{now * 1e6:.0f}.{(now + lifetime) * 1e6:.0f}.{client.replace('/', '_')}"
        return {"access_token": f"{text}.{self._sign(text)}", "expires_in": int(lifetime), "token_type": "Bearer"}

    def identify(self, token: str) -> str:
        """Return the client that holds a token. Raises ApiError 401 if it is unknown or has expired."""
        if are_equal(token, self._secret):
            return LAPTOP
        text, _, signature = token.rpartition(".")
        if not text.startswith(f"{_PREFIX}.") or not are_equal(signature, self._sign(text)):
            raise unauthenticated("ACCESS_TOKEN_TYPE_UNSUPPORTED")
        _, issued, until, client = text.split(".")
        ended = (self._store.get(EXPIRED_KIND, EXPIRED_NAME) or {"time": 0.0})["time"]
        if self._settings.is_strict and (time.time() * 1e6 >= int(until) or int(issued) <= ended * 1e6):
            raise unauthenticated()
        return client.replace("_", "/")

    def refresh(self, form: dict[str, str]) -> dict[str, Any]:
        """Answer the OAuth server's token endpoint: https://www.rfc-editor.org/rfc/rfc6749#section-6."""
        if form.get("grant_type") != "refresh_token":
            raise ApiError(400, "unsupported_grant_type")
        if not are_equal(form.get("refresh_token", ""), self._secret):
            raise ApiError(400, "invalid_grant")
        return {**self.issue(LAPTOP), "scope": " ".join(USER_SCOPES)}

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret.encode(), text.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()[:32]


def are_equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="surrogateescape"), other.encode(errors="surrogateescape"))
