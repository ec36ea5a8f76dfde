"""Lease of a pod or a run, stored as one object in the bucket: who acts on it, since when, and with which token.

Who asks its holder to release it writes an object of its own beside it. Cloud Storage takes one write of an object a
second, so in the lease itself a request would compete with the renewals: https://cloud.google.com/storage/quotas#objects

Every write of the lease has a generation precondition, so that one of two concurrent writers wins. The age is measured
by the server's clock: https://cloud.google.com/storage/docs/request-preconditions
"""

import getpass
import os
import socket
import uuid
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, TypeAdapter

from conf.strict_json import dumps, loads
from controller.agent.worker_processes import boot_id, start_time
from controller.core.errors import CloudError
from controller.core.json_documents import Document, FormatError, has_format
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import NotFoundError

D = TypeVar("D", bound=Document)
"""A document of this module."""
KEY = "lease"
"""Key of the object's custom metadata that holds the document, so that one request returns it and its age."""
MAX_TIMESTAMP = 2e11
"""Largest timestamp that a calendar date can express, in seconds since the epoch."""


class CheckedDocument(Document):
    """Document whose values are checked: anyone with write access to the bucket can write anything there."""

    @classmethod
    def from_json(cls, body: Any, where: str = "") -> Self:
        """Parse what `to_json` wrote. Raises FormatError, KeyError or ValueError if it is something else."""
        return TypeAdapter(cls).validate_python(vars(super().from_json(body, where)))


@dataclass(frozen=True)
class LeaseRecord(CheckedDocument):
    """Content of the lease object.

    Attributes:
        token: increases by one whenever another controller acquires the lease; requests with a smaller token are
            refused.
        id: unique id of the controller.
        holder: `user@host`, for display.
        process: machine boot and process of the holder; empty if unknown.
        since: time of acquisition by the holder's clock, for display.
        seconds: term; the lease expires when it has not been renewed for this long.
        asked: why another controller asked the holder to release the lease, once it has; empty if none did.
        released: whether the holder released the lease itself.
        said, exit_code: final message and exit code if the holder's work has ended; None if the run continues.
        pod: pod on which the holder drives the run; empty for a sweep.
    """

    KEYS: ClassVar = {
        "id": "holder_id",
        "since": "acquired",
        "seconds": "duration_seconds",
        "asked": "release_requested",
        "said": "message",
    }

    token: Annotated[int, Field(ge=1)]
    id: str
    holder: str
    driver: str
    run_id: str
    process: Annotated[str, Field(pattern=r"^(.*:\d{1,10}/.*)?$")]
    since: Annotated[float, Field(ge=0, le=MAX_TIMESTAMP)]
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    asked: str = ""
    released: bool = False
    said: str = ""
    exit_code: Annotated[int, Field(ge=0, le=255)] | None = None
    pod: str = ""

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        return f"{self.holder} ({self.driver}) for {self.run_id} since {since}"

    def has_holder_of(self, other: Self) -> bool:
        """Return whether one controller holds both, that of its pod and that of its run."""
        mine, theirs = ((one.holder, one.driver, one.run_id, one.process, one.pod) for one in (self, other))
        return mine == theirs


@dataclass(frozen=True)
class ReleaseRequest(CheckedDocument):
    """Content of the object beside the lease in which a controller asks another one to release it.

    Attributes:
        asked: why, and who asks.
        asker_id: unique id of the controller that asks.
        holder_id: unique id of the one that is asked; empty: each that began before the request was written, though it
            may not hold the lease yet.
    """

    KEYS: ClassVar = {"asked": "release_requested"}

    asked: str
    asker_id: str
    holder_id: str

    def is_for(self, controller_id: str, age: float, began: float) -> bool:
        """Return whether it asks this controller.

        Args:
            controller_id: its unique id.
            age: seconds since the request was written by the server's clock, rounded down.
            began: seconds since the controller began.
        """
        if self.holder_id:
            return self.holder_id == controller_id
        return self.asker_id != controller_id and age + 1 < began


@dataclass(frozen=True)
class LeaseSnapshot:
    """Lease record as read. `age` is the seconds since its last write by the server's clock, rounded down."""

    record: LeaseRecord
    generation: int
    age: float

    def is_free(self, gone: bool) -> bool:
        """Return whether another controller may acquire it. `gone`: the holder is known to be dead."""
        return self.record.released or gone or self.age >= self.record.seconds


class DamagedLeaseError(CloudError):
    """The object of the lease holds something else, in this generation."""

    def __init__(self, message: str, generation: int) -> None:
        super().__init__(message)
        self.generation = generation


@dataclass(frozen=True)
class BucketLeaseStore:
    """Lease store at `pods/NAME/lease.json`, `runs/ID/lease.json` or `sweeps/ID/lease.json` in the bucket.

    The latest request to release the lease is in `release.json` beside it.
    """

    google: GoogleClient
    bucket: str
    owner: str
    collection: Literal["pods", "runs", "sweeps"] = "pods"

    @property
    def object_name(self) -> str:
        return f"{self.collection}/{self.owner}/lease.json"

    @property
    def request_name(self) -> str:
        return f"{self.collection}/{self.owner}/release.json"

    def read(self) -> LeaseSnapshot | None:
        if (found := self._read(self.object_name, LeaseRecord)) is None:
            return None
        term, generation, age = found
        if term is None:
            where = f"gs://{self.bucket}/{self.object_name}"
            pod = (
                " and then the pod (`slipway down`), whose workers remember the lease"
                if self.collection == "pods"
                else ""
            )
            raise DamagedLeaseError(
                f"{where} is not a lease written by slipway; once no controller uses it, delete it "
                f"(`gcloud storage rm {where}`){pod}",
                generation,
            )
        return LeaseSnapshot(term, generation, age)

    def write(self, term: LeaseRecord, generation: int) -> int:
        return self._write(self.object_name, term, generation)

    def read_request(self) -> tuple[ReleaseRequest, float] | None:
        """Return the latest request to release the lease, and its age in seconds; None also if it cannot be read."""
        try:
            found = self._read(self.request_name, ReleaseRequest)
        except FormatError:  # of a later Slipway
            return None
        return None if found is None or found[0] is None else (found[0], found[2])

    def has_bucket(self) -> bool:
        where = {"bucket": self.bucket, "prefix": self.request_name}
        try:
            self.google.call("storage", "objects.list", **where, maxResults=1)
        except NotFoundError:
            return False
        return True

    def write_request(self, request: ReleaseRequest) -> None:
        self._write(self.request_name, request, None)

    def _read(self, name: str, kind: type[D]) -> tuple[D | None, int, float] | None:
        """Return an object's document, None if it is damaged, with its generation and age; None without the object."""
        try:
            answer, now = self.google.object_metadata(self.bucket, name)
        except NotFoundError:
            return None
        try:
            body = loads(answer.get("metadata", {}).get(KEY, ""))
            document = kind.from_json(body, f"gs://{self.bucket}/{name}") if has_format(body) else None
        except (KeyError, ValueError, RecursionError):
            document = None
        return document, int(answer["generation"]), now - datetime.fromisoformat(answer["updated"]).timestamp()

    def _write(self, name: str, document: Document, generation: int | None) -> int:
        text = dumps(document.to_json())
        answer = self.google.upload(self.bucket, name, text.encode(), generation=generation, metadata={KEY: text})
        return int(answer["generation"])


@dataclass(frozen=True)
class Identity:
    """Identity of a controller; by default of this process."""

    driver: str
    run_id: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    holder: str = field(default_factory=lambda: f"{getpass.getuser()}@{socket.gethostname()}")
    process: str = field(default_factory=lambda: process_id())
    pod: str = ""

    def is_known_dead(self, other: LeaseRecord) -> bool:
        """Return whether the holder is a dead process of this boot of this machine, which nobody needs to wait for."""
        where, _, which = other.process.rpartition(":")
        pid, _, began = which.partition("/")
        return bool(where) and where == self.process.rpartition(":")[0] and start_time(int(pid)) != began

    def new_record(self, token: int, since: float, seconds: float) -> LeaseRecord:
        who = (self.id, self.holder, self.driver, self.run_id, self.process)
        return LeaseRecord(token, *who, since, seconds, pod=self.pod)

    def for_run(self, run_id: str) -> Self:
        """Return the identity of the same controller for another run."""
        return replace(self, run_id=run_id)


def has_ended(process: str) -> bool:
    """Return whether a process that `process_id` named on this machine has surely ended."""
    where, _, which = process.rpartition(":")
    here = process_id().rpartition(":")[0]
    if not where or not here:
        return False
    if where != here:
        return where.partition(":")[0] != here.partition(":")[0]  # before this boot; or in another container
    pid, _, began = which.partition("/")
    return start_time(int(pid)) != began


def process_id() -> str:
    """Return `BOOT:NAMESPACE:PID/START`, or "" without /proc, which tells the containers of a machine apart."""
    spaces = Path("/proc/self/ns/pid")
    if not spaces.exists():
        return ""
    return f"{boot_id()}:{spaces.readlink().name.replace(':', '')}:{os.getpid()}/{start_time(os.getpid())}"
