"""Look up credentials once without the alarming, harmless messages of Google's libraries.

On a VM, credentials come from the metadata server. TensorStore looks for gcloud's file first and logs an error that it
is missing; google-auth warns where no metadata server answers, as on the emulated cloud. Whoever cannot be
authenticated learns so from the first access that fails.
"""

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import tensorstore

HARMLESS = re.compile(rb"google_auth_provider\.cc:\d+\] Could not find the credentials file")
TIMEOUT_SECONDS = 5.0
"""The lookup comes before the request, which may take long where the network is down."""


def find_credentials(folder: str) -> None:
    """Let TensorStore look up its credentials, which it does once per process, at the first access to gs://."""
    logging.getLogger("google.auth._default").setLevel(logging.ERROR)
    if not folder.startswith("gs://"):
        return
    failures = (ValueError, TimeoutError, PermissionError)  # the first real access reports them, after its retries
    with without_lines(HARMLESS), suppress(*failures):
        tensorstore.KvStore.open(f"{folder.rstrip('/')}/").result().read("credentials").result(TIMEOUT_SECONDS)


@contextmanager
def without_lines(pattern: re.Pattern[bytes]) -> Iterator[None]:
    """Leave out lines that C++ code of this process writes to file descriptor 2; others pass at once."""
    sys.stderr.flush()
    kept = os.dup(2)
    read_end, write_end = os.pipe()
    os.dup2(write_end, 2)
    os.close(write_end)

    def forward() -> None:
        with os.fdopen(read_end, "rb") as lines:
            for line in lines:
                if not pattern.search(line):
                    os.write(kept, line)

    thread = threading.Thread(target=forward, name="stderr")
    thread.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)  # closes the pipe, so that the thread ends
        thread.join()
        os.close(kept)
