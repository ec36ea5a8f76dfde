"""Queue for a busy pod: runs that wait with `up --queue`, in order of arrival.

Each waiting run is a small object in the bucket, rewritten while its controller lives; an object that has not been
rewritten for a while belongs to a dead controller and does not count.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from controller.context import Context
from controller.core.clock import Clock
from controller.core.formats import DamagedRecordError, Document
from controller.gcp.client import GoogleClient
from controller.gcp.errors import NotFoundError
from controller.lease.lease import Lease
from controller.plan.build import Plan
from controller.records.ledger import parse_record
from controller.resources.pod.node import Node
from controller.run.launch import running_runs

STALE_SECONDS = 120.0
REFRESH_SECONDS = 20.0


@dataclass(frozen=True)
class _WaitingRun(Document):
    """Place of a run in the queue, rewritten while its controller lives."""

    run_id: str
    since: float
    refreshed: float


class PodQueue:
    """Queue of one pod. Times are seconds since the epoch by each controller's own clock.

    A damaged object does not count; `problems` names it.
    """

    def __init__(self, google: GoogleClient, clock: Clock, bucket: str, pod: str) -> None:
        self._google, self._clock, self._bucket = google, clock, bucket
        self._prefix = f"pods/{pod}/waiting/"
        self.problems: list[str] = []

    def waiting_runs(self) -> list[str]:
        """Return the ids of the waiting runs, in order of arrival."""
        found: list[tuple[float, str]] = []
        try:
            items = list(
                self._google.list_all("storage", "objects.list", "items", bucket=self._bucket, prefix=self._prefix)
            )
        except NotFoundError:
            return []
        for item in items:
            try:
                content = self._google.download(self._bucket, item["name"])
                entry = parse_record(content, _WaitingRun.from_json, item["name"])
            except NotFoundError:
                continue  # it has just left the queue
            except DamagedRecordError as error:
                self.problems += [str(error)] if str(error) not in self.problems else []
                continue
            if self._clock.now() - entry.refreshed < STALE_SECONDS:
                found.append((entry.since, entry.run_id))
        return [run_id for _, run_id in sorted(found)]

    @contextmanager
    def enqueued(self, run_id: str) -> Iterator[Callable[[], None]]:
        """Queue a run while the context is open; call the yielded function regularly to stay in the queue."""
        since = self._clock.now()
        last_refresh = 0.0

        def refresh() -> None:
            nonlocal last_refresh
            now = self._clock.now()
            if now - last_refresh >= REFRESH_SECONDS:
                last_refresh = now
                entry = _WaitingRun(run_id, since, refreshed=now).to_json()
                self._google.upload(self._bucket, self._name(run_id), json.dumps(entry).encode())

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


@dataclass(frozen=True)
class QueueWaiter:
    """Waits for the runs that are ahead of this one on its pod."""

    plan: Plan
    context: Context
    turns: PodQueue
    lease: Lease
    poll_seconds: float
    note: Callable[[str], None]

    @contextmanager
    def enqueued(self) -> Iterator[None]:
        """Wait for our turn, then keep it until the context ends."""
        if self.lease.held:
            yield
            return
        with self.turns.enqueued(self.plan.run_id) as refresh:
            told: list[str] = []
            while ahead := self._runs_ahead():
                if ahead != told:
                    self.note(f"waiting for {', '.join(ahead)}")
                    told = ahead
                self.context.clock.sleep(self.poll_seconds)
                refresh()
            yield

    def _runs_ahead(self) -> list[str]:
        """Return the runs ahead of this one: those running or being driven on the pod and those queued earlier."""
        node = self.plan.observe_pod(self.context)
        running = set[str]()
        if isinstance(node, Node) and node.is_ready and node.accepts_our_key(self.context):
            running = running_runs(node.fleet(self.context))
        if (other := self.lease.current_other()) is not None:
            running.add(other.record.run_id)
        if self.plan.run_id in running:
            return []
        return [*sorted(running), *self._queued_before()]

    def _queued_before(self) -> list[str]:
        line = self.turns.waiting_runs()
        return line[: line.index(self.plan.run_id)] if self.plan.run_id in line else line
