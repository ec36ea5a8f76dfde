"""The lease of a pod as an object in the bucket: who acts on the pod, since when, and under which number.

It is written with generation preconditions alone, so that of two who write one wins, and its age is taken from the
server's own clock: https://cloud.google.com/storage/docs/request-preconditions
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import uuid
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import Field, TypeAdapter

from controller.agent.process import boot_id, start_time
from controller.core.errors import CloudError
from controller.core.formats import checked, has_format, stamped
from controller.gcp.client import GoogleClient, NotFoundError

KEY = "lease"
"""Of the object's own metadata, in which the lease can be read with the object's age in one request."""
MAX_TIMESTAMP = 2e11
"""Of what a calendar can say, in seconds since the epoch."""


@dataclass(frozen=True)
class LeaseRecord:
    """What the object says.

    Attributes:
        token: grows by one whenever another controller takes the lease: what carries a smaller one comes too late.
        id: of the controller, unlike any other's.
        holder: `user@host`, for people.
        process: which process of which boot of which machine; empty where that cannot be known.
        since: when it was taken, by the holder's clock; for people.
        seconds: without a word from the holder for so long, it counts no more.
        asked: why somebody wants the holder to let go; empty while nobody does.
        released: the holder has let go by itself.
        said, exit_code: its last words, where what it did has come to an end; None where the run goes on.
    """

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

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        return f"{self.holder} ({self.driver}) for {self.run_id} since {since}"

    def to_json(self) -> dict[str, Any]:
        """Return the content of `lease.json`."""
        holder = {"holder_id": self.id, "holder": self.holder, "driver": self.driver, "process": self.process}
        term = {"run_id": self.run_id, "acquired": self.since, "duration_seconds": self.seconds}
        end = {"release_requested": self.asked, "released": self.released, "message": self.said}
        return stamped({"token": self.token, **holder, **term, **end, "exit_code": self.exit_code})

    @classmethod
    def from_json(cls, body: Any, where: str = "lease.json") -> LeaseRecord:
        """Return the term that `to_json` wrote; keys of a later slipway are ignored.

        Raises:
            FormatError: it has another format.
            KeyError, ValueError: it is not a lease.
        """
        body = checked(body, where)
        term = cls(
            token=body["token"],
            id=body["holder_id"],
            holder=body["holder"],
            driver=body["driver"],
            process=body["process"],
            run_id=body["run_id"],
            since=body["acquired"],
            seconds=body["duration_seconds"],
            asked=body["release_requested"],
            released=body["released"],
            said=body["message"],
            exit_code=body["exit_code"],
        )
        return TypeAdapter(cls).validate_python(vars(term))


@dataclass(frozen=True)
class LeaseSnapshot:
    """A term as it was read. `age` in seconds since it was last written, by the server's clock, rounded down."""

    term: LeaseRecord
    generation: int
    age: float

    def free(self, gone: bool) -> bool:
        """May another one take it? `gone`: the holder is known to be dead."""
        return self.term.released or gone or self.age >= self.term.seconds


class LeaseStore(Protocol):
    """Where the lease lies."""

    def read(self) -> LeaseSnapshot | None:
        """None: nobody ever had it."""
        ...

    def write(self, term: LeaseRecord, generation: int) -> int:
        """Replace what has this generation (0: nothing); the new generation.

        Raises:
            Conflict: something else is there.
        """
        ...


@dataclass(frozen=True)
class BucketLeaseStore:
    """`pods/NAME/lease.json`, or `sweeps/ID/lease.json`."""

    google: GoogleClient
    bucket: str
    of: str
    among: Literal["pods", "sweeps"] = "pods"

    @property
    def name(self) -> str:
        return f"{self.among}/{self.of}/lease.json"

    def read(self) -> LeaseSnapshot | None:
        try:
            answer, now = self.google.metadata(self.bucket, self.name)
        except NotFoundError:
            return None
        where = f"gs://{self.bucket}/{self.name}"
        try:  # whoever can write to the bucket can write anything there
            body = json.loads(answer.get("metadata", {}).get(KEY, ""))
            term = LeaseRecord.from_json(body, where) if has_format(body) else None
        except (KeyError, ValueError, RecursionError):
            term = None
        if term is None:
            pod = " and then the pod (`slipway down`), whose workers remember the lease" if self.among == "pods" else ""
            raise CloudError(
                f"{where} is no lease that slipway wrote; once no controller acts there any more, delete it "
                f"(`gcloud storage rm {where}`){pod}"
            )
        return LeaseSnapshot(
            term, int(answer["generation"]), now - datetime.fromisoformat(answer["updated"]).timestamp()
        )

    def write(self, term: LeaseRecord, generation: int) -> int:
        text = json.dumps(term.to_json())
        answer = self.google.upload(
            self.bucket, self.name, text.encode(), generation=generation, metadata={KEY: text}
        )  # fmt: skip
        return int(answer["generation"])


@dataclass(frozen=True)
class Identity:
    """A controller: this one, by default."""

    driver: str
    run_id: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    holder: str = field(default_factory=lambda: f"{getpass.getuser()}@{socket.gethostname()}")
    process: str = field(default_factory=lambda: _process_id())

    def is_known_dead(self, other: LeaseRecord) -> bool:
        """Is the holder a process of this very boot of this machine, and dead? No need to wait for that one."""
        where, _, which = other.process.rpartition(":")
        pid, _, began = which.partition("/")
        return bool(where) and where == self.process.rpartition(":")[0] and start_time(int(pid)) != began

    def term(self, token: int, since: float, seconds: float) -> LeaseRecord:
        return LeaseRecord(token, self.id, self.holder, self.driver, self.run_id, self.process, since, seconds)

    def of(self, run_id: str) -> Self:
        """The same controller, on behalf of another run."""
        return type(self)(self.driver, run_id, self.id, self.holder, self.process)


def _process_id() -> str:
    """`BOOT:NAMESPACE:PID/START`; empty where there is no /proc to tell one container of a machine from another."""
    spaces = Path("/proc/self/ns/pid")
    if not spaces.exists():
        return ""
    return f"{boot_id()}:{spaces.readlink().name.replace(':', '')}:{os.getpid()}/{start_time(os.getpid())}"
