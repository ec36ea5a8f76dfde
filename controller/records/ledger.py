"""Record of a run in the bucket: `runs/<id>/` with plan, launches, per-worker exit codes and logs, and the result.

Objects that must be created once have a generation precondition, so that two controllers cannot both win.
https://cloud.google.com/storage/docs/request-preconditions
"""

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

from controller.core.formats import Document, dump, load
from controller.gcp.client import GoogleClient
from controller.gcp.errors import ConflictError, NotFoundError


@dataclass(frozen=True)
class Launch(Document):
    """One start of the program on one incarnation of the pod, by the controller with this lease token."""

    KEYS: ClassVar = {"lease": "lease_token"}

    attempt: int
    node_uid: str
    time: float
    lease: int = 0


@dataclass(frozen=True)
class Result(Document):
    """Result of a run. `summary` is the content of the program's summary.json.

    `cleanup` is the cleanup policy for the pod, needed if a controller is killed before it could apply it.
    """

    run_id: str
    outcome: str
    attempts: int
    ended: float
    seconds: float
    summary: dict[str, Any] = field(default_factory=dict)
    cleanup: str = "keep"


class Ledger:
    """Reader and writer of the record of one run."""

    def __init__(self, google: GoogleClient, bucket: str, run_id: str) -> None:
        self._google, self.bucket, self.run_id = google, bucket, run_id
        self.prefix = f"runs/{run_id}"

    def result(self) -> Result | None:
        """Return the result; None if the run has not finished successfully or does not exist."""
        content = self.read("result.json")
        return None if content is None else Result.from_json(json.loads(content), f"{self.prefix}/result.json")

    def record_result(self, result: Result) -> None:
        """Record the result; only the first one counts."""
        self.create("result.json", json.dumps(result.to_json(), indent=1))

    def launches(self) -> list[Launch]:
        """Return every launch, oldest first."""
        try:
            items = list(
                self._google.list_all(
                    "storage", "objects.list", "items", bucket=self.bucket, prefix=f"{self.prefix}/launches/"
                )
            )
        except NotFoundError:
            return []
        names = [item["name"] for item in items]
        found = [Launch.from_json(json.loads(self._google.download(self.bucket, name)), name) for name in names]
        return sorted(found, key=lambda launch: launch.attempt)

    def record_launch(self, launch: Launch) -> bool:
        """Record a launch before it is made; return False if another controller recorded this attempt first."""
        return self.create(f"launches/{launch.attempt:04d}.json", json.dumps(launch.to_json()))

    def record_cancellation(self) -> None:
        """Mark the latest attempt as cancelled, so that the controller that follows it does not restart it."""
        if launches := self.launches():
            self.create(f"cancels/{launches[-1].attempt:04d}.json", dump({}))

    def is_cancelled(self, attempt: int) -> bool:
        return self.read(f"cancels/{attempt:04d}.json") is not None

    def incidents(self) -> list[dict[str, Any]]:
        """Return the incidents of the run, oldest first: each failed attempt and the response to it."""
        try:
            where = {"bucket": self.bucket, "prefix": f"{self.prefix}/verdicts/"}
            items = list(self._google.list_all("storage", "objects.list", "items", **where))
        except NotFoundError:
            return []
        names = sorted(item["name"] for item in items)
        return [json.loads(self._google.download(self.bucket, name)) for name in names]

    def add_incident(self, number: int, document: dict[str, Any]) -> None:
        """Record an incident; the first one with a number counts."""
        self.create(f"verdicts/{number:04d}.json", json.dumps(document, indent=1))

    def checkpoints(self) -> list[int]:
        """Return the steps of the run's checkpoints: the numbers of the folders `checkpoints/N`."""
        where: dict[str, Any] = {"bucket": self.bucket, "prefix": f"{self.prefix}/checkpoints/", "delimiter": "/"}
        found: list[int] = []
        try:
            while True:
                answer = self._google.call("storage", "objects.list", **where)
                names = [prefix.rstrip("/").rpartition("/")[2] for prefix in answer.get("prefixes", ())]
                found += [int(number[0]) for name in names if (number := re.findall(r"\d+", name))]
                if not (token := answer.get("nextPageToken")):
                    return found
                where["pageToken"] = token
        except NotFoundError:
            return []

    def checkpoint_time(self, step: int) -> float | None:
        """Return when the last object of a checkpoint was written, in seconds since the epoch; None if it is gone."""
        where = {"bucket": self.bucket, "prefix": f"{self.prefix}/checkpoints/{step}/"}
        items = self._google.list_all(
            "storage", "objects.list", "items", fields="items(updated),nextPageToken", **where
        )
        return max((datetime.fromisoformat(item["updated"]).timestamp() for item in items), default=None)

    def write(self, name: str, text: str) -> None:
        """Write a document of the run, replacing any earlier one."""
        self._google.upload(self.bucket, f"{self.prefix}/{name}", text.encode())

    def exists(self, name: str) -> bool:
        return self.read(name) is not None

    def log_object(self, worker: int, attempt: int) -> str:
        return f"{self.prefix}/logs/attempt-{attempt}/worker-{worker}.log"

    def exit_object(self, worker: int, attempt: int) -> str:
        return f"{self.prefix}/logs/attempt-{attempt}/worker-{worker}.exit.json"

    def exit_status(self, worker: int, attempt: int) -> str | None:
        """Return `code 1` or the signal; None while the program runs there or if its end was not recorded."""
        name = self.exit_object(worker, attempt)
        content = self.read(name.removeprefix(f"{self.prefix}/"))
        if content is None:
            return None
        ended = load(content, name)
        return f"code {ended['code']}" if ended.get("code") is not None else ended.get("signal") or "an error"

    def read(self, name: str) -> bytes | None:
        """Return a document of the run, or None if it does not exist."""
        try:
            return self._google.download(self.bucket, f"{self.prefix}/{name}")
        except NotFoundError:
            return None

    def create(self, name: str, text: str) -> bool:
        """Write a document unless it exists; return whether it was written."""
        try:
            self._google.upload(self.bucket, f"{self.prefix}/{name}", text.encode(), generation=0)
        except ConflictError:
            return False
        return True
