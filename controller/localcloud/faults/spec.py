"""Schema of `cloud.faults`: the kinds of fault (`KINDS`), and their triggers."""

import random
import re
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from controller.localcloud.http.errors import ApiError

Symptom = Literal[
    "LOW_MEMORY", "OUT_OF_MEMORY", "EXECUTE_TIMED_OUT", "MESH_BUILD_FAIL", "HBM_OUT_OF_MEMORY", "PROJECT_ABUSE"
]
TRIGGERS = ("after_object", "after_seconds", "after_requests", "within_seconds")


class FaultSpec(BaseModel):
    """Base of all faults. `needs_trigger`: a trigger is required, because before it there is nothing to affect."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    needs_trigger: ClassVar[bool] = False
    default_trigger: ClassVar[dict[str, float]] = {}

    kind: str
    after_object: str | None = Field(None, min_length=1, description="part of the name of an object just finalized")
    after_seconds: float | None = Field(None, ge=0, description="seconds since a node became READY")
    after_requests: int | None = Field(None, ge=0, description="requests to Google's APIs since the script was loaded")
    within_seconds: float | None = Field(
        None, gt=0, description="at a random time (see `seed`), at most this many seconds after a node became READY"
    )
    delay_seconds: float = Field(0.0, ge=0, description="additional wait after the trigger")
    seed: int = Field(0, ge=0, description="seed of random choices")

    @model_validator(mode="before")
    @classmethod
    def _apply_default_trigger(cls, spec: Any) -> Any:
        """Apply the kind's default trigger, unless the script specifies one."""
        said = isinstance(spec, dict) and any(spec.get(trigger) is not None for trigger in TRIGGERS)
        return spec if said or not isinstance(spec, dict) else {**cls.default_trigger, **spec}

    @model_validator(mode="after")
    def _at_most_one_trigger(self) -> "FaultSpec":
        given = [name for name in TRIGGERS if getattr(self, name) is not None]
        if len(given) > 1 or (self.needs_trigger and not given):
            word = "exactly" if self.needs_trigger else "at most"
            raise ValueError(f"{self.kind} needs {word} one of {', '.join(TRIGGERS[:-1])} and {TRIGGERS[-1]}")
        return self

    @property
    def has_trigger(self) -> bool:
        return any(getattr(self, name) is not None for name in TRIGGERS)

    def seconds_after_ready(self) -> float | None:
        """Return the seconds from a node becoming READY to the strike, or None without such a trigger."""
        if self.within_seconds is not None:
            return random.Random(self.seed).uniform(0.0, self.within_seconds) + self.delay_seconds  # noqa: S311
        return None if self.after_seconds is None else self.after_seconds + self.delay_seconds


class OneShotSpec(FaultSpec):
    """Fault that strikes once."""

    needs_trigger: ClassVar[bool] = True


class _CountedSpec(FaultSpec):
    """Fault that affects the next `times` matching events."""

    times: int = Field(1, ge=1)


class LastingSpec(FaultSpec):
    """Fault that lasts for `seconds`."""

    seconds: float = Field(gt=0)


class _NoticedSpec(OneShotSpec):
    notice_seconds: float | None = Field(
        None, gt=0, description="how long before the fault the VMs' metadata servers announce it; null: they do not"
    )


class PreemptionSpec(_NoticedSpec):
    """Preemption of all READY nodes, or of one."""

    node: str | None = Field(None, min_length=1, description="name of the pod to preempt; null: all")


class MaintenanceSpec(_NoticedSpec):
    """Maintenance: nodes are REPAIRING for `seconds`, then READY again with rebooted VMs."""

    seconds: float = Field(gt=0)
    new_host_keys: bool = Field(True, description="the VMs are rebuilt, as on another host, with new SSH host keys")


class WorkerSpec(OneShotSpec):
    """Fault of one worker or of all."""

    worker: int | None = Field(None, ge=0)


class ProgramKilledSpec(WorkerSpec):
    """`out_of_memory` makes it an OOM kill."""

    out_of_memory: bool = False


class UnhealthySpec(OneShotSpec):
    """Bad health of nodes, optionally with a symptom of one worker; programs keep running."""

    health: Literal["TIMEOUT", "UNHEALTHY_TENSORFLOW", "UNHEALTHY_MAINTENANCE"] = "TIMEOUT"
    symptom: Symptom | None = None
    worker: int | None = Field(None, ge=0)
    words: str = "The TPU does not answer"


class WorkerClockSpec(OneShotSpec):
    """Clock skew in seconds of one worker or of all, visible to the agent, from the strike on."""

    seconds: float
    worker: int | None = Field(None, ge=0)


class CreationSpec(_CountedSpec):
    """Failure of the next `times` node creations in this zone and tier, at the request or in the operation."""

    zone: str | None = Field(None, description="null: any")
    capacity: str | None = Field(None, description="on_demand, spot, preemptible, reserved, flex_start; null: any")
    accelerator_type: str | None = Field(None, description="null: any")
    plane: Literal["tpu_api", "compute_engine"] | None = Field(None, description="null: any")
    at: Literal["request", "operation"] = Field("operation", description="fail the request, or the operation")


class RefusalSpec(CreationSpec):
    """Failure of a creation that is found out at the request."""

    at: Literal["request", "operation"] = "request"


class FailureSpec(CreationSpec):
    """Internal error of Google's."""

    code: int = Field(500, ge=400, le=599, description="HTTP status code")
    message: str = "An internal error has occurred"


class PermissionSpec(FaultSpec):
    """Loss of one permission, whatever the roles contain, as by a deny policy of the organization."""

    permission: str = Field(pattern=r"^[a-z]+\.[a-zA-Z.]+$", description="e.g. compute.networks.create")
    client: Literal["laptop", "workers"] = Field("laptop", description="who loses it")


class EndpointsSpec(_CountedSpec):
    """Wrong number of VMs in the next `times` nodes."""

    endpoints: int = Field(ge=1)


class ChipMissingSpec(_CountedSpec):
    """One chip less on a worker of the next `times` nodes that boot."""

    worker: int = Field(0, ge=0)


class SliceCreationSpec(_CountedSpec):
    """End of the next `times` slices of Compute Engine in another state than ACTIVE."""

    state: Literal["FAILED", "INCOMPLETE", "ACTIVE_DEGRADED"]
    worker: int = Field(0, ge=0, description="the VM that does not run if INCOMPLETE")
    message: str = "An internal error has occurred"


class SliceStateSpec(OneShotSpec):
    """Change of the topology of all ACTIVE slices of Compute Engine.

    REACTIVATING: all VMs are down for `seconds`, then the slice is ACTIVE again. INCOMPLETE: VM `worker` has stopped.
    FAILED: all have. ACTIVE_DEGRADED: all run.
    """

    state: Literal["REACTIVATING", "INCOMPLETE", "FAILED", "ACTIVE_DEGRADED"]
    worker: int = Field(0, ge=0)
    seconds: float = Field(1.0, gt=0)
    message: str = "An internal error has occurred"


class QueuedStateSpec(_CountedSpec):
    """Failure of the next `times` queued resources that would become ACTIVE, or `seconds` in PROVISIONING."""

    state: Literal["SUSPENDED", "FAILED", "PROVISIONING"]
    message: str = "The request could not be served"
    seconds: float = Field(0.0, ge=0, description="how long a request stays in PROVISIONING")


class _RequestSpec(_CountedSpec):
    match: str

    @field_validator("match")
    @classmethod
    def _is_regex(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return value


class HttpSpec(_RequestSpec):
    """HTTP `status` for the next `times` requests whose "METHOD /path" matches."""

    status: int = Field(ge=400, le=599)
    retry_after: int | None = Field(None, ge=0, description="value of the Retry-After header in seconds")
    message: str | None = Field(None, description="message of the error response")
    reason: str | None = Field(None, description="its machine-readable reason, e.g. SERVICE_DISABLED")


class ConnectionCutSpec(_RequestSpec):
    """Broken connection of the next `times` matching requests: before the work, mid-upload, or before the answer."""

    at: Literal["request", "upload", "answer"] = "answer"


class BrownoutSpec(LastingSpec):
    """Brownout: a share of all requests fails with 503, 429, or a connection that stalls and breaks."""

    share: float = Field(gt=0, le=1)
    client: Literal["laptop", "workers"] | None = Field(None, description="whose requests; null: all")


class PartitionSpec(LastingSpec):
    """Network partition: between the laptop and both Google's APIs and the workers, or between workers and APIs."""

    client: Literal["laptop", "workers"] = "laptop"


class DiskFullSpec(LastingSpec):
    """Full disk of one worker or of all: nothing can be written (Linux only)."""

    needs_trigger: ClassVar[bool] = True
    worker: int | None = Field(None, ge=0)


class FromReadySpec(LastingSpec):
    """Fault of one worker or of all, by default from when a node is READY."""

    default_trigger: ClassVar[dict[str, float]] = {"after_seconds": 0.0}
    worker: int | None = Field(None, ge=0)


KINDS: dict[str, type[FaultSpec]] = {
    "preempted": PreemptionSpec,
    "maintenance": MaintenanceSpec,
    "unhealthy": UnhealthySpec,
    "killed": ProgramKilledSpec,
    "frozen": WorkerSpec,  # SIGSTOP of the program: it stays alive and does nothing
    "controller_killed": OneShotSpec,  # SIGKILL of the local Slipway process that sent the last request
    "worker_clock": WorkerClockSpec,
    "tokens_expired": OneShotSpec,  # end of all access tokens issued so far: they are refused with 401
    "slice_state": SliceStateSpec,
    "stockout": CreationSpec,  # no capacity
    "quota": RefusalSpec,  # exhausted
    "permission": RefusalSpec,  # of the caller, which lacks it
    "type_denied": RefusalSpec,  # of a type in this zone and tier, in the words of field reports
    "no_reservation": RefusalSpec,  # "Reservation not found", in the words of field reports
    "internal": CreationSpec,  # code 13 without a reason, which TPU creations meet every day
    "failure": FailureSpec,
    "denied": PermissionSpec,
    "endpoints": EndpointsSpec,
    "chip_missing": ChipMissingSpec,
    "queued": QueuedStateSpec,
    "slice_creation": SliceCreationSpec,
    "http": HttpSpec,
    "cut": ConnectionCutSpec,
    "brownout": BrownoutSpec,
    "bucket_outage": LastingSpec,  # all requests to Cloud Storage fail with 503, or stall and break; the others do not
    "partition": PartitionSpec,
    "disk_full": DiskFullSpec,
    "chip_held": FromReadySpec,  # a process holds the first chip
    "ssh_refused": FromReadySpec,
    "ssh_frozen": FromReadySpec,
}
"""Schema of each kind of fault."""
ONE_SHOT_KINDS, CREATION_KINDS, LASTING_KINDS = (
    tuple(kind for kind, schema in KINDS.items() if issubclass(schema, base))
    for base in (OneShotSpec, CreationSpec, LastingSpec)
)


def parse_fault(spec: Any) -> FaultSpec:
    """Parse a fault as written in YAML; raise ApiError 400 naming the invalid key, or the known kinds."""
    kind = spec.get("kind") if isinstance(spec, dict) else None
    if kind not in KINDS:
        raise ApiError(400, f"cloud.faults: unknown kind {kind!r}; known: {', '.join(KINDS)}")
    try:
        return KINDS[kind].model_validate(spec)
    except ValidationError as error:
        text = "; ".join(": ".join([*(str(part) for part in one["loc"]), one["msg"]]) for one in error.errors())
        raise ApiError(400, f"cloud.faults ({kind}): {text}") from error
