"""The file system behind gs://, for all libraries of a process: patient with requests, and honest about folders.

TensorStore, which moves the arrays, retries a request 32 times, for about a quarter of an hour. gcsfs, which moves
everything else, gives up after half a minute by default. What writes does not wait longer than that quarter of an hour
(`trainer/checkpoint/outage.py` bridges it). What reads, such as a data set in a bucket, has nothing else to do: it
waits as long as `checkpoint.max_outage_hours`.
"""

import logging
import time
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from gcsfs import GCSFileSystem
from gcsfs.retry import is_retriable, retry_request

from trainer.corpus.files import as_stream

MAX_ATTEMPTS = 25
"""Attempts, each of gcsfs's own six tries, which take half a minute, with pauses of up to half a minute between."""


class BucketFileSystem(GCSFileSystem):
    """gcsfs's file system for gs://, with more attempts, without a memory of listings.

    Other workers and attempts write to the same bucket, so a listing that is kept is soon wrong. A bucket has no
    folders: one without objects lists as empty, whether it has been there or not.

    max_outage_hours: how long a read is tried again; a log line a round shows that the program is not hung.
    """

    def __init__(self, *args: Any, max_outage_hours: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **{"use_listings_cache": False} | kwargs)
        # not with aiohttp's trust_env, which refuses requests where ~/.netrc has a default entry
        place = urlsplit(self.base)
        if not proxy_bypass(place.netloc) and (proxy := getproxies().get(place.scheme)):
            self.session_kwargs = {"proxy": proxy} | self.session_kwargs
        self._max_outage_seconds = 3600 * max_outage_hours

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        """Open an object, to read it as a binary stream of Python, whichever library asks."""
        opened = super()._open(path, mode, *args, **kwargs)
        return as_stream(opened) if mode == "rb" else opened

    async def _ls(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """List the objects and folders in a folder. Raises FileNotFoundError if there is no such bucket."""
        try:
            return await super()._ls(path, *args, **kwargs)
        except FileNotFoundError:
            bucket, folder, _ = self.split_path(path)
            if not folder:
                raise
            await self._do_list_objects(bucket, max_results=1)  # raises it if the bucket itself is not there
            return []

    async def _request(self, method: str, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        while True:
            try:
                return await self._request_for_minutes(method, *args, **kwargs)
            except Exception as error:
                lasted = time.monotonic() - began
                if method.upper() != "GET" or not is_retriable(error) or lasted >= self._max_outage_seconds:
                    raise
                logging.warning("a read from the bucket has failed for %.0f minutes: %s", lasted / 60, error)

    @retry_request(retries=MAX_ATTEMPTS)  # pyright: ignore[reportCallIssue]
    async def _request_for_minutes(self, *args: Any, **kwargs: Any) -> Any:
        return await super()._request(*args, **kwargs)
