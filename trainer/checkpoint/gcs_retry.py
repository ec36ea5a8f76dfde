"""Retries of the object storage clients, since an outage of minutes must not end a run of days.

TensorStore, which moves the arrays, retries a request 32 times, for about a quarter of an hour. gcsfs, which moves
everything else, gives up after half a minute by default.
"""

from typing import Any

from gcsfs import GCSFileSystem
from gcsfs.retry import retry_request

MAX_ATTEMPTS = 25
"""Attempts, each of gcsfs's own six tries, which take half a minute, with pauses of up to half a minute between."""


class RetryingFileSystem(GCSFileSystem):
    """gcsfs's file system for gs://, with more attempts."""

    @retry_request(retries=MAX_ATTEMPTS)  # pyright: ignore[reportCallIssue]
    async def _request(self, *args: Any, **kwargs: Any) -> Any:
        return await super()._request(*args, **kwargs)
