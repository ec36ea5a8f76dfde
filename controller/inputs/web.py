"""Files of the web: what a server tells of one before it is fetched, and what its refusals mean."""

import errno
import urllib.error
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from controller.inputs.assets import AssetFile
from controller.inputs.hub import ATTEMPTS, HUGGING_FACE, PAUSE_SECONDS, SourceError

TIMEOUT_SECONDS = 60.0
CHECK_SECONDS = 10.0
"""Of a request of `plan`."""
REFUSED_WITHOUT_TOKEN = (401, 403, 404)
"""Answers of servers to a request without a token for a file that needs one."""


class DownloadError(SourceError):
    """A server does not give a file of the web."""


class TokenNeededError(SourceError):
    """Only who has the token can read a file, and the token stays on this machine."""


class FoundFile(NamedTuple):
    """A file on a server: its size, if that is told, and the address at which no token is needed any more."""

    size: int | None
    address: str


def token_for(source: AssetFile, secrets: Mapping[str, str]) -> str | None:
    """Return the bearer token for a download, if any."""
    place = urlsplit(source.url or "")
    if source.token is None and (place.scheme, place.hostname) == ("https", HUGGING_FACE):
        return secrets.get("HF_TOKEN")
    return secrets.get(source.token or "")


def place_of(url: str) -> str:
    """Return an address without its query, which may be a key to the file."""
    return url.partition("?")[0]


def explain(error: Exception, url: str, token: str | None) -> DownloadError:
    """Return what a failed request means, in a line."""
    place = place_of(url)
    if not isinstance(error, urllib.error.HTTPError):
        reason = getattr(error, "reason", None) or error
        return DownloadError(f"cannot fetch {place}: {reason}", lasting=False)
    error.close()
    if error.code in (401, 403):
        asked = "it requires a token: set env.secrets.HF_TOKEN, or files.….token_secret"
        why = "the token does not grant access" if token else asked
        return DownloadError(f"{place} refused access ({error.code}): {why}", True, error.code)
    if 300 <= error.code < 400:
        message = f"cannot fetch {place}: it is redirected in a circle, or not to http ({error.code})"
        return DownloadError(message, True, error.code)
    lasting = error.code < 500 and error.code not in (408, 429)
    return DownloadError(f"cannot fetch {place}: {error}", lasting, error.code)


def is_full(error: Exception) -> bool:
    """Return whether a disk was full."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


def find_file(url: str, token: str | None, timeout: float = TIMEOUT_SECONDS) -> FoundFile:
    """Ask for the first byte of a file, as its download will.

    Raises:
        DownloadError: the server refuses it, or does not answer.
    """
    from http.client import HTTPException  # with ssl; most verbs ask nobody
    from urllib.request import Request, urlopen

    request = Request(url, headers={"Range": "bytes=0-0"})  # noqa: S310 - http(s) by schema
    if token:  # hosts redirect to storage, which must not get the token
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urlopen(request, timeout=timeout) as answer:  # noqa: S310
            told = answer.headers.get("Content-Length")
            if answer.status == 206:
                told = (answer.headers.get("Content-Range") or "").rpartition("/")[2]
            return FoundFile(int(told) if (told or "").isdigit() else None, answer.url)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # it is empty
            error.close()
            return FoundFile(0, url)
        raise explain(error, url, token) from None
    except (OSError, HTTPException, ValueError) as error:
        raise explain(error, url, token) from None


def find_open_file(url: str, token: str | None, timeout: float = TIMEOUT_SECONDS) -> FoundFile:
    """Return the size of a file, and where a machine without the token can read it, for a while at least.

    Raises:
        DownloadError: the server refuses it, or does not answer.
        TokenNeededError: its server sends it itself, to those with a token.
    """
    try:
        return FoundFile(find_file(url, None, timeout).size, url)
    except DownloadError as error:
        if not token or error.status not in REFUSED_WITHOUT_TOKEN:
            raise
    found = find_file(url, token, timeout)
    if urlsplit(found.address).netloc == urlsplit(url).netloc:
        raise TokenNeededError(f"{place_of(url)} is sent only to those with a token, which stays on this machine")
    return found


def with_patience(ask: Callable[[], FoundFile], sleep: Callable[[float], None]) -> FoundFile:
    """Ask again where that may help."""
    for pause in (PAUSE_SECONDS * 2**number for number in range(ATTEMPTS - 1)):
        try:
            return ask()
        except DownloadError as error:
            if error.lasting:
                raise
        sleep(pause)
    return ask()
