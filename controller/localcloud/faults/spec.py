"""What can go wrong in the emulated cloud, as `cloud.faults` words it: one class per kind, and when each strikes."""

from __future__ import annotations

import random
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from controller.localcloud.http.errors import CloudError

Symptoms = Literal[
    "LOW_MEMORY", "OUT_OF_MEMORY", "EXECUTE_TIMED_OUT", "MESH_BUILD_FAIL", "HBM_OUT_OF_MEMORY", "PROJECT_ABUSE"
]
TRIGGERS = ("after_object", "after_seconds", "after_requests", "within_seconds")


class Spec(BaseModel):
    """Strikes when its trigger comes. `must_wait`: there is one, for it would strike before anything is there."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    must_wait: ClassVar[bool] = False
    default_trigger: ClassVar[dict[str, float]] = {}

    kind: str
    after_object: str | None = Field(None, min_length=1, description="part of the name of an object just finalized")
    after_seconds: float | None = Field(None, ge=0, description="seconds since a node became READY")
    after_requests: int | None = Field(None, ge=0, description="requests to Google's APIs since the script was told")
    within_seconds: float | None = Field(
        None, gt=0, description="at a moment drawn from `seed`, at most so many seconds after a node became READY"
    )
    delay_seconds: float = Field(0.0, ge=0, description="additional wait after the trigger")
    seed: int = Field(0, ge=0, description="of whatever is drawn")

    @model_validator(mode="before")
    @classmethod
    def _with_its_trigger(cls, spec: Any) -> Any:
        """What strikes at a moment of its own unless the script says when."""
        said = isinstance(spec, dict) and any(spec.get(trigger) is not None for trigger in TRIGGERS)
        return spec if said or not isinstance(spec, dict) else {**cls.default_trigger, **spec}

    @model_validator(mode="after")
    def _at_most_one_trigger(self) -> Spec:
        given = [name for name in TRIGGERS if getattr(self, name) is not None]
        if len(given) > 1 or (self.must_wait and not given):
            word = "exactly" if self.must_wait else "at most"
            raise ValueError(f"{self.kind} needs {word} one of {', '.join(TRIGGERS[:-1])} and {TRIGGERS[-1]}")
        return self

    @property
    def waits(self) -> bool:
        return any(getattr(self, name) is not None for name in TRIGGERS)

    def seconds_after_ready(self) -> float | None:
        """When it strikes after a node became READY; None where that is no trigger of it."""
        if self.within_seconds is not None:
            return random.Random(self.seed).uniform(0.0, self.within_seconds) + self.delay_seconds  # noqa: S311
        return None if self.after_seconds is None else self.after_seconds + self.delay_seconds


class _Blow(Spec):
    """Strikes once, and is over."""

    must_wait: ClassVar[bool] = True


class _Counted(Spec):
    """Strikes the next `times` things that it is about."""

    times: int = Field(1, ge=1)


class _Lasting(Spec):
    """Lasts for so many seconds."""

    seconds: float = Field(gt=0)


class _Noticed(_Blow):
    notice_seconds: float | None = Field(
        None, gt=0, description="so long before, the VMs' metadata servers say that it will come; null: they do not"
    )


class Preempted(_Noticed):
    """All READY nodes are taken back."""

    kind: Literal["preempted"]  # pyright: ignore[reportIncompatibleVariableOverride]


class Maintenance(_Noticed):
    """They are REPAIRING for so many seconds, and then READY again, their VMs rebooted."""

    kind: Literal["maintenance"]  # pyright: ignore[reportIncompatibleVariableOverride]
    seconds: float = Field(gt=0)


class Unhealthy(_Blow):
    """Google calls them ill, and names a symptom of one worker if there is one; what runs there runs on."""

    kind: Literal["unhealthy"]  # pyright: ignore[reportIncompatibleVariableOverride]
    health: Literal["TIMEOUT", "UNHEALTHY_TENSORFLOW", "UNHEALTHY_MAINTENANCE"] = "TIMEOUT"
    symptom: Symptoms | None = None
    worker: int | None = Field(None, ge=0)
    words: str = "The TPU does not answer"


class Killed(_Blow):
    """The program of one worker, or of all, is killed; `out_of_memory`: by its kernel."""

    kind: Literal["killed"]  # pyright: ignore[reportIncompatibleVariableOverride]
    worker: int | None = Field(None, ge=0)
    out_of_memory: bool = False


class Frozen(_Blow):
    """The program of one worker, or of all, is stopped by a signal: it is there and does nothing."""

    kind: Literal["frozen"]  # pyright: ignore[reportIncompatibleVariableOverride]
    worker: int | None = Field(None, ge=0)


class ControllerKilled(_Blow):
    """kill -9 of the process on this machine that sent the last request: the controller itself."""

    kind: Literal["controller_killed"]  # pyright: ignore[reportIncompatibleVariableOverride]


class WorkerClock(_Blow):
    """From now on the clock of one worker, or of all, is wrong by so many seconds, as far as its agent can see."""

    kind: Literal["worker_clock"]  # pyright: ignore[reportIncompatibleVariableOverride]
    seconds: float
    worker: int | None = Field(None, ge=0)


class Creation(_Counted):
    """The next `times` attempts to make a node there, in that tier, are refused: when asked for, or later."""

    zone: str | None = Field(None, description="null: any")
    capacity: str | None = Field(None, description="on_demand, spot, preemptible, reserved, flex_start; null: any")
    at: Literal["request", "operation"] = Field("operation", description="refused at once, or the operation fails")


class Stockout(Creation):
    """No capacity."""

    kind: Literal["stockout"]  # pyright: ignore[reportIncompatibleVariableOverride]


class Quota(Creation):
    """The project's quota is spent."""

    kind: Literal["quota"]  # pyright: ignore[reportIncompatibleVariableOverride]
    at: Literal["request", "operation"] = "request"


class Permission(Creation):
    """The caller may not."""

    kind: Literal["permission"]  # pyright: ignore[reportIncompatibleVariableOverride]
    at: Literal["request", "operation"] = "request"


class Failure(Creation):
    """Something breaks on Google's side."""

    kind: Literal["failure"]  # pyright: ignore[reportIncompatibleVariableOverride]
    code: int = Field(500, ge=400, le=599, description="as HTTP would say it")
    message: str = "An internal error has occurred"


class Endpoints(_Counted):
    """The next `times` nodes get another number of VMs than their type has."""

    kind: Literal["endpoints"]  # pyright: ignore[reportIncompatibleVariableOverride]
    endpoints: int = Field(ge=1)


class QueuedState(_Counted):
    """The next `times` queued resources that would become ACTIVE end otherwise."""

    kind: Literal["queued"]  # pyright: ignore[reportIncompatibleVariableOverride]
    state: Literal["SUSPENDED", "FAILED"]
    message: str = "The request could not be served"


class _OfRequests(_Counted):
    match: str

    @field_validator("match")
    @classmethod
    def _is_regex(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return value


class Http(_OfRequests):
    """The next `times` requests whose "METHOD /path" matches are answered with `status`."""

    kind: Literal["http"]  # pyright: ignore[reportIncompatibleVariableOverride]
    status: int = Field(ge=400, le=599)
    retry_after: int | None = Field(None, ge=0, description="seconds, as the header Retry-After says them")
    message: str | None = Field(None, description="what the answer says")
    reason: str | None = Field(None, description="its machine-readable reason, e.g. SERVICE_DISABLED")


class Cut(_OfRequests):
    """The connection of the next `times` requests that match breaks: before anything is done, in the middle of the
    bytes of an upload, or after it was done and before the answer."""

    kind: Literal["cut"]  # pyright: ignore[reportIncompatibleVariableOverride]
    at: Literal["request", "upload", "answer"] = "answer"


class Brownout(_Lasting):
    """For so many seconds a share of all requests fails: 503, 429, or a connection that stalls and breaks."""

    kind: Literal["brownout"]  # pyright: ignore[reportIncompatibleVariableOverride]
    share: float = Field(gt=0, le=1)
    client: Literal["laptop", "workers"] | None = Field(None, description="whose requests; null: everybody's")


class Partition(_Lasting):
    """For so many seconds nothing gets through: from the laptop neither to Google's APIs nor to the workers, or from
    the workers to Google's APIs."""

    kind: Literal["partition"]  # pyright: ignore[reportIncompatibleVariableOverride]
    client: Literal["laptop", "workers"] = "laptop"


class DiskFull(_Lasting):
    """For so many seconds nothing can be written to the disk of one worker, or of all (Linux only)."""

    kind: Literal["disk_full"]  # pyright: ignore[reportIncompatibleVariableOverride]
    must_wait: ClassVar[bool] = True
    worker: int | None = Field(None, ge=0)


class _OfSsh(_Lasting):
    default_trigger: ClassVar[dict[str, float]] = {"after_seconds": 0.0}
    worker: int | None = Field(None, ge=0)


class SshRefused(_OfSsh):
    """Workers refuse SSH, from the moment a node is READY unless the script says otherwise; one, or all."""

    kind: Literal["ssh_refused"]  # pyright: ignore[reportIncompatibleVariableOverride]


class SshFrozen(_OfSsh):
    """SSH connections are open and nobody answers; of one worker, or of all."""

    kind: Literal["ssh_frozen"]  # pyright: ignore[reportIncompatibleVariableOverride]


Fault = Annotated[
    Preempted | Maintenance | Unhealthy | Killed | Frozen | ControllerKilled | WorkerClock
    | Stockout | Quota | Permission | Failure | Endpoints | QueuedState
    | Http | Cut | Brownout | Partition | DiskFull | SshRefused | SshFrozen,
    Field(discriminator="kind"),
]  # fmt: skip
_FAULT: TypeAdapter[Any] = TypeAdapter(Fault)
BLOWS = ("preempted", "maintenance", "unhealthy", "killed", "frozen", "controller_killed", "worker_clock")
CREATION = ("stockout", "quota", "permission", "failure")
LASTING = ("brownout", "partition", "disk_full", "ssh_refused", "ssh_frozen")
KINDS = (*BLOWS, *CREATION, "endpoints", "queued", "http", "cut", *LASTING)


def parse(spec: Any) -> Spec:
    """One fault as written in YAML; CloudError 400 that names the key, and the kinds for an unknown one."""
    kind = spec.get("kind") if isinstance(spec, dict) else None
    if kind not in KINDS:
        raise CloudError(400, f"cloud.faults: unknown kind {kind!r}; known: {', '.join(KINDS)}")
    try:
        return _FAULT.validate_python(spec)
    except ValidationError as error:
        words = "; ".join(
            ": ".join([*(str(part) for part in problem["loc"][1:]), problem["msg"]]) for problem in error.errors()
        )
        raise CloudError(400, f"cloud.faults ({kind}): {words}") from error
