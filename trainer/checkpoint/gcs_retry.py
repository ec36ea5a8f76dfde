"""How the clients of object storage behave: patient, since an outage of minutes must not end a run of days.

TensorStore, which moves the arrays, repeats a refused request 32 times, for about a quarter of an hour. gcsfs, which
moves everything else, gives up after half a minute unless it is told otherwise.
"""

from __future__ import annotations

from typing import Any

import fsspec
from gcsfs import GCSFileSystem
from gcsfs.retry import retry_request

MAX_ATTEMPTS = 25
"""Of gcsfs's own six attempts each, which take half a minute, with pauses of up to half a minute between."""


class RetryingFileSystem(GCSFileSystem):
    """gs:// as gcsfs knows it, with more attempts."""

    @retry_request(retries=MAX_ATTEMPTS)  # pyright: ignore[reportCallIssue]
    async def _request(self, *args: Any, **kwargs: Any) -> Any:
        return await super()._request(*args, **kwargs)


def install_gcs_retries() -> None:
    """Let every gs:// path of this process be read and written so; to be called before the first one is."""
    for scheme in ("gs", "gcs"):
        fsspec.register_implementation(scheme, RetryingFileSystem, clobber=True)
