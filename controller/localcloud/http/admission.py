"""Access control of the emulated cloud: only local programs that know the token, or hold one issued for it."""

import hmac
import ipaddress
import re
from dataclasses import dataclass

from aiohttp import web

from controller.localcloud.http.errors import ApiError
from controller.localcloud.iam.callers import LAPTOP
from controller.localcloud.iam.refusals import unauthenticated
from controller.localcloud.iam.tokens import Tokens

IAP_CLIENT = "bot:iap-tunneler"
"""Origin header of Identity-Aware Proxy clients; no web page can send it."""


@dataclass(frozen=True)
class AdmittedRequest:
    """Admitted request. `path` lacks the prefix that carried the token; `base` is the root URL for this client."""

    client: str  # "laptop", or "UID/INDEX" of the worker that sent it
    path: str  # still percent-encoded, no leading slash
    root_url: str
    quota_project: str | None = None  # the project that the request counts against, if it names one


def admit(request: web.Request, token: str, tokens: Tokens, url: str) -> AdmittedRequest:
    """Check Host, Origin and the token, which is a Bearer token or part of the path.

    Paths: /t/TOKEN/... from the laptop, /w/TOKEN/UID/INDEX/... from a worker. Raises ApiError 401 or 403.
    """
    check_origin(request)
    path = request.raw_path.partition("?")[0].lstrip("/")
    parts = path.split("/")
    quota_project = request.headers.get("X-Goog-User-Project") or request.query.get("userProject")
    if parts[0] == "t" and len(parts) > 2 and _tokens_equal(parts[1], token):
        return AdmittedRequest(LAPTOP, "/".join(parts[2:]), f"{url}t/{token}/", quota_project)
    if parts[0] == "w" and len(parts) > 4 and _tokens_equal(parts[1], token):
        worker = f"{parts[2]}/{parts[3]}"
        return AdmittedRequest(worker, "/".join(parts[4:]), f"{url}w/{token}/{worker}/", quota_project)
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise unauthenticated("CREDENTIALS_MISSING")
    return AdmittedRequest(tokens.identify(bearer.strip()), path, url, quota_project)


def check_origin(request: web.Request) -> None:
    """Keep web pages out (DNS rebinding, cross-site requests). Raises ApiError 403."""
    host = request.headers.get("Host", "")
    if not _is_loopback(host):
        raise ApiError(403, f"Host {host!r} is not a loopback address")
    if request.headers.get("Origin", IAP_CLIENT) != IAP_CLIENT:
        raise ApiError(403, "Requests from web pages are refused")


def _is_loopback(host: str) -> bool:
    """Return whether a host, with or without a port, is loopback. Anyone can own a name such as 127.example.com."""
    name = re.sub(r":\d*$", "", host)
    try:
        return name == "localhost" or ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _tokens_equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())
