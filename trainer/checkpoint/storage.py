"""The storage of a run's results: credentials, how arrays are written, does it answer, what errors mean that not."""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from orbax.checkpoint import type_handlers

from trainer.pretrained.integrity import OUTAGE_PATTERN

PROBE_SECONDS = 5.0
"""Longest wait for the answer to one probe; training stands still meanwhile."""
MAX_PROBE_INTERVAL_SECONDS = 30.0
"""Longest interval between two probes during an outage; shortly after its start they are more frequent."""
PROBE_RETRIES = 2
"""Retries of a probe: one lost request is no outage."""
REFUSAL_PATTERN = re.compile(r"UNAUTHENTICATED|PERMISSION_DENIED|NOT_FOUND|INVALID_ARGUMENT")
"""Status codes of answers: waiting would not help, and the first real request reports what is wrong."""
PROBED_OBJECT = "checkpoints/probe"
"""Object that is looked up; it need not exist."""
SMALLEST_SLICE_BYTES = 1 << 20
"""Smallest part of an array that one of its replicas writes for the others; each new slice costs a compilation."""
MAX_RESTORE_BYTES = 96 * 10**9
"""Bytes that are read at the same time, Orbax's own bound."""


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """Return a handler in which replicas share the writing of large arrays.

    It bounds no bytes that are written at the same time. With a bound, which is Orbax's default, each array changes the
    manifest of its process, and Cloud Storage takes one change of an object a second; without, one transaction does.
    """
    handler = type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SMALLEST_SLICE_BYTES)
    registry = type_handlers.create_type_handler_registry((jax.Array, handler))
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=registry,
        handler_impl=ocp.BasePyTreeCheckpointHandler(
            restore_concurrent_bytes=MAX_RESTORE_BYTES, type_handler_registry=registry
        ),
    )


class RunStorage:
    """The folder of a run's results, as seen from this process.

    Attributes:
        is_remote: whether it can fail to answer; a local folder cannot.
    """

    def __init__(
        self, folder: str, probe: Callable[[], bool] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare without a request.

        Args:
            folder: `dir` of the run file: `gs://BUCKET/runs/ID`, or a local folder.
            probe: replaces the request to Cloud Storage.
            clock: seconds.
        """
        self.folder = folder.rstrip("/")
        self.is_remote = probe is not None or folder.startswith("gs://")
        self._probe = probe or self._read_object
        self.clock = clock
        self._store: Any = None
        self._lock = threading.Lock()  # the loop asks, and the thread of uploads
        self._down_since: float | None = None
        self._probed_at = 0.0

    def answers(self) -> bool:
        """Return whether the storage answers now; takes PROBE_SECONDS at most.

        During an outage the last answer is repeated for a while, so that callers may ask after each update.
        """
        if not self.is_remote:
            return True
        with self._lock:
            return self._ask()

    def _ask(self) -> bool:
        now = self.clock()
        if self._down_since is not None:
            lasted = now - self._down_since
            if now - self._probed_at < min(MAX_PROBE_INTERVAL_SECONDS, max(1.0, lasted / 4)):
                return False
        self._probed_at = now
        if self._probe():
            self._down_since = None
            return True
        self._down_since = now if self._down_since is None else self._down_since
        return False

    @contextmanager
    def tolerated(self, what: str) -> Iterator[None]:
        """Turn an outage in the context into a warning: what is written there is written again later."""
        try:
            yield
        except Exception as error:
            if not is_outage(error):
                raise
            logging.warning("%s was not uploaded, the bucket does not answer: %s", what, first_line(error))

    def _read_object(self) -> bool:
        import tensorstore  # a run in a local folder needs none here

        retries = {"max_retries": PROBE_RETRIES, "initial_delay": "200ms", "max_delay": "1s"}
        try:
            if self._store is None:
                bucket, _, path = self.folder.removeprefix("gs://").partition("/")
                spec = {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}
                context = tensorstore.Context({"gcs_request_retries": retries})
                self._store = tensorstore.KvStore.open(spec, context=context).result(PROBE_SECONDS)
            self._store.read(PROBED_OBJECT).result(PROBE_SECONDS)
        except (ValueError, OSError) as error:  # TensorStore's errors; a TimeoutError is an OSError
            return bool(REFUSAL_PATTERN.search(str(error)))
        return True


def create_file(path: epath.Path, content: bytes) -> None:
    """Write a whole file that does not exist yet. Raises FileExistsError, and leaves what is there."""
    if str(path).startswith("gs://"):
        files, there = fsspec.core.url_to_fs(str(path))
        # ifGenerationMatch=0. In one request: of an upload in parts gcsfs hides why it was refused.
        files.pipe_file(there, content, mode="create", chunksize=len(content) + 1)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(f"{path}.{os.getpid()}.partial")
    draft.write_bytes(content)
    try:
        os.link(draft, path)
    finally:
        draft.unlink()


def is_outage(error: BaseException) -> bool:
    """Return whether an error means that the storage does not serve requests now, not that an object is bad."""
    if isinstance(error, (FileNotFoundError, FileExistsError)):
        return False
    if isinstance(error, OSError) or OUTAGE_PATTERN.search(str(error)):
        return True
    code = getattr(error, "code", None)
    if code in (401, 403, 408, 429) or (isinstance(code, int) and 500 <= code < 600):
        return True
    return any("aiohttp" in kind.__module__ or "google.auth" in kind.__module__ for kind in type(error).__mro__)


def outage_of(act: Callable[[], object]) -> str:
    """Act, and return the error of an outage in one line; empty if there was none. Other errors are raised."""
    try:
        act()
    except Exception as error:
        if not is_outage(error):
            raise
        return first_line(error)
    return ""


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


HARMLESS = re.compile(rb"google_auth_provider\.cc:\d+\] Could not find the credentials file")
TIMEOUT_SECONDS = 5.0
"""The lookup comes before the request, which may take long where the network is down."""


def find_credentials(folder: str) -> None:
    """Let TensorStore look up its credentials, which it does once per process, at the first access to gs://.

    On a VM, credentials come from the metadata server. TensorStore looks for gcloud's file first and logs an error that
    it is missing; google-auth warns where no metadata server answers, as on the emulated cloud: alarming, harmless
    messages. Whoever cannot be authenticated learns so from the first access that fails.
    """
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
