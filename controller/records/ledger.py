"""The record of a run in the bucket: `runs/<id>/` with plan, launches, per-worker exits and logs, and the result.

Objects that must exist once are created with a generation precondition, so that two controllers cannot both win.
https://cloud.google.com/storage/docs/request-preconditions
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from controller.core.formats import checked, load, stamped
from controller.gcp.client import ConflictError, GoogleClient, NotFoundError


@dataclass(frozen=True)
class Launch:
    """One start of the program on one incarnation of the pod, by the controller with that number of the lease."""

    attempt: int
    node_uid: str
    time: float
    lease: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the content of `launches/NNNN.json`."""
        return stamped({
            "attempt": self.attempt, "node_uid": self.node_uid, "time": self.time, "lease_token": self.lease
        })  # fmt: skip

    @classmethod
    def from_json(cls, body: Any, where: str = "launch") -> Launch:
        """Raises FormatError for another format."""
        body = checked(body, where)
        return cls(body["attempt"], body["node_uid"], body["time"], body["lease_token"])


@dataclass(frozen=True)
class Result:
    """How a run ended. `summary` is what the program left in summary.json.

    `cleanup` is what was to be done with its pod: a controller may have been killed before it was.
    """

    run_id: str
    outcome: str
    attempts: int
    ended: float
    seconds: float
    summary: dict[str, Any] = field(default_factory=dict)
    cleanup: str = "keep"

    def to_json(self) -> dict[str, Any]:
        """Return the content of `result.json`."""
        how = {"run_id": self.run_id, "outcome": self.outcome, "attempts": self.attempts}
        return stamped({
            **how, "ended": self.ended, "seconds": self.seconds, "summary": self.summary, "cleanup": self.cleanup
        })  # fmt: skip

    @classmethod
    def from_json(cls, body: Any, where: str = "result.json") -> Result:
        """Raises FormatError for another format."""
        body = checked(body, where)
        how = (body["run_id"], body["outcome"], body["attempts"])
        return cls(*how, body["ended"], body["seconds"], body["summary"], body["cleanup"])


class Ledger:
    """Reads and writes the record of one run."""

    def __init__(self, google: GoogleClient, bucket: str, run_id: str) -> None:
        self._google, self.bucket, self.run_id = google, bucket, run_id
        self.prefix = f"runs/{run_id}"

    def result(self) -> Result | None:
        """None while the run has not ended well, or when there is no such run."""
        content = self.read("result.json")
        return None if content is None else Result.from_json(json.loads(content), f"{self.prefix}/result.json")

    def finish(self, result: Result) -> None:
        """Record the end; the first one counts."""
        self.create("result.json", json.dumps(result.to_json(), indent=1))

    def launches(self) -> list[Launch]:
        """Every launch, oldest first."""
        try:
            items = list(
                self._google.pages(
                    "storage", "objects.list", "items", bucket=self.bucket, prefix=f"{self.prefix}/launches/"
                )
            )
        except NotFoundError:
            return []
        names = [item["name"] for item in items]
        found = [Launch.from_json(json.loads(self._google.download(self.bucket, name)), name) for name in names]
        return sorted(found, key=lambda launch: launch.attempt)

    def record(self, launch: Launch) -> bool:
        """Record a launch before it is made; False if another controller recorded this attempt first."""
        return self.create(f"launches/{launch.attempt:04d}.json", json.dumps(launch.to_json()))

    def cancel(self) -> None:
        """Record that the latest attempt is ended on purpose, so that whoever follows it does not start it again."""
        if launches := self.launches():
            self.create(f"cancels/{launches[-1].attempt:04d}.json", json.dumps(stamped({})))

    def cancelled(self, attempt: int) -> bool:
        return self.read(f"cancels/{attempt:04d}.json") is not None

    def episodes(self) -> list[dict[str, Any]]:
        """How each attempt so far ended that did not end well, and what was done about it, oldest first."""
        try:
            where = {"bucket": self.bucket, "prefix": f"{self.prefix}/verdicts/"}
            items = list(self._google.pages("storage", "objects.list", "items", **where))
        except NotFoundError:
            return []
        names = sorted(item["name"] for item in items)
        return [json.loads(self._google.download(self.bucket, name)) for name in names]

    def add_incident(self, number: int, document: dict[str, Any]) -> None:
        """Put such an end on record; the first of a number counts."""
        self.create(f"verdicts/{number:04d}.json", json.dumps(document, indent=1))

    def write(self, name: str, text: str) -> None:
        """Write a document that describes the run, replacing an older one."""
        self._google.upload(self.bucket, f"{self.prefix}/{name}", text.encode())

    def has(self, name: str) -> bool:
        """Is there a document of that name?"""
        return self.read(name) is not None

    def log_object(self, worker: int, attempt: int) -> str:
        return f"{self.prefix}/logs/attempt-{attempt}/worker-{worker}.log"

    def exit_object(self, worker: int, attempt: int) -> str:
        return f"{self.prefix}/logs/attempt-{attempt}/worker-{worker}.exit.json"

    def ending(self, worker: int, attempt: int) -> str | None:
        """`code 1`, or the signal; None while the program runs there, or when its end was not recorded."""
        name = self.exit_object(worker, attempt)
        content = self.read(name.removeprefix(f"{self.prefix}/"))
        if content is None:
            return None
        ended = load(content, name)
        return f"code {ended['code']}" if ended.get("code") is not None else ended.get("signal") or "an error"

    def read(self, name: str) -> bytes | None:
        """A document of the run, None where there is none."""
        try:
            return self._google.download(self.bucket, f"{self.prefix}/{name}")
        except NotFoundError:
            return None

    def create(self, name: str, text: str) -> bool:
        """Write a document unless there is one; says whether there was none."""
        try:
            self._google.upload(self.bucket, f"{self.prefix}/{name}", text.encode(), generation=0)
        except ConflictError:
            return False
        return True
