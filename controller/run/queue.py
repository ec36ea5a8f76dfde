"""Queue for a busy pod: runs that wait with `up --queue`, in order of arrival.

Each waiting run is a small object in the bucket, rewritten while its controller lives; an object that has not been
rewritten for a while belongs to a dead controller and does not count.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from controller.core.clock import Clock
from controller.core.formats import dump, load
from controller.gcp.client import GoogleClient, NotFoundError

STALE_SECONDS = 120.0
REFRESH_SECONDS = 20.0


class PodQueue:
    """Queue of one pod. Times are seconds since the epoch by each controller's own clock."""

    def __init__(self, google: GoogleClient, clock: Clock, bucket: str, pod: str) -> None:
        self._google, self._clock, self._bucket = google, clock, bucket
        self._prefix = f"pods/{pod}/waiting/"

    def waiting(self) -> list[str]:
        """Return the ids of the waiting runs, in order of arrival."""
        found: list[tuple[float, str]] = []
        try:
            items = list(
                self._google.pages("storage", "objects.list", "items", bucket=self._bucket, prefix=self._prefix)
            )
        except NotFoundError:
            return []
        for item in items:
            try:
                entry = load(self._google.download(self._bucket, item["name"]), item["name"])
            except NotFoundError:
                continue  # it has just left the queue
            if self._clock.now() - entry["refreshed"] < STALE_SECONDS:
                found.append((entry["since"], entry["run_id"]))
        return [run_id for _, run_id in sorted(found)]

    @contextmanager
    def joined(self, run_id: str) -> Iterator[Callable[[], None]]:
        """Queue a run while the context is open; call the yielded function regularly to stay in the queue."""
        since = self._clock.now()
        seen = 0.0

        def refresh() -> None:
            nonlocal seen
            now = self._clock.now()
            if now - seen >= REFRESH_SECONDS:
                seen = now
                entry = {"run_id": run_id, "since": since, "refreshed": now}
                self._google.upload(self._bucket, self._name(run_id), dump(entry).encode())

        refresh()
        try:
            yield refresh
        finally:
            self._leave(run_id)

    def _leave(self, run_id: str) -> None:
        try:
            self._google.call("storage", "objects.delete", bucket=self._bucket, object=self._name(run_id))
        except NotFoundError:
            return

    def _name(self, run_id: str) -> str:
        return f"{self._prefix}{run_id}.json"
