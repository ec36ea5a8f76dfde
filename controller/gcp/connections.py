"""Connections to Google, through the proxy that the environment names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from conf.proxies import settle_proxies, unusable_proxy
from controller.core.errors import ConfigError

if TYPE_CHECKING:
    import httplib2


def use_proxies(to_google: bool) -> None:
    """Settle what the environment says of proxies. Raises ConfigError if Google cannot be reached through them."""
    settle_proxies()
    if to_google and (problem := unusable_proxy()):
        raise ConfigError(problem)


def make_connection(timeout: float | None = None) -> httplib2.Http:
    """Return a new connection; timeout: seconds, None: the library's."""
    from googleapiclient.http import build_http  # a plain Http takes the 308 of a resumable upload for a redirect

    http = build_http()
    http.proxy_info = _proxy
    if timeout is not None:
        http.timeout = timeout
    return http


def _proxy(scheme: Any) -> Any:
    """Return the proxy for a scheme, its name and password decoded, which httplib2 sends as they are in the address."""
    import httplib2

    found: Any = httplib2.proxy_info_from_environment(scheme)
    if found is not None and found.proxy_user:
        found.proxy_user, found.proxy_pass = unquote(found.proxy_user), unquote(found.proxy_pass or "")
    return found
