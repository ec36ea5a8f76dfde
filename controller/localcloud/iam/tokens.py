"""Access tokens: issued by the metadata servers of VMs and, for a refresh token, by the OAuth server; they expire.

A token states who holds it and until when, and is signed with the emulated cloud's own token. That one, in
endpoint.json, stands for the user's refresh token, and for tools that cannot refresh is a token that does not expire.
"""

import hashlib
import hmac
import time
from typing import Any

from controller.localcloud.http.errors import ApiError
from controller.localcloud.iam.callers import LAPTOP, USER_SCOPES
from controller.localcloud.iam.refusals import unauthenticated
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store

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
        if _are_equal(token, self._secret):
            return LAPTOP
        text, _, signature = token.rpartition(".")
        if not text.startswith(f"{_PREFIX}.") or not _are_equal(signature, self._sign(text)):
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
        if not _are_equal(form.get("refresh_token", ""), self._secret):
            raise ApiError(400, "invalid_grant")
        return {**self.issue(LAPTOP), "scope": " ".join(USER_SCOPES)}

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret.encode(), text.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()[:32]


def _are_equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="surrogateescape"), other.encode(errors="surrogateescape"))
