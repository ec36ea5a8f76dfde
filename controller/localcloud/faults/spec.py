"""Schema of `cloud.faults`: one class per kind of fault, and its trigger."""

import random
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

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


class _OneShotSpec(FaultSpec):
    """Fault that strikes once."""

    needs_trigger: ClassVar[bool] = True


class _CountedSpec(FaultSpec):
    """Fault that affects the next `times` matching events."""

    times: int = Field(1, ge=1)


class _LastingSpec(FaultSpec):
    """Fault that lasts for `seconds`."""

    seconds: float = Field(gt=0)


class _NoticedSpec(_OneShotSpec):
    notice_seconds: float | None = Field(
        None, gt=0, description="how long before the fault the VMs' metadata servers announce it; null: they do not"
    )


class PreemptionSpec(_NoticedSpec):
    """Preemption of all READY nodes, or of one."""

    kind: Literal["preempted"]  # pyright: ignore[reportIncompatibleVariableOverride]
    node: str | None = Field(None, min_length=1, description="name of the pod to preempt; null: all")


class MaintenanceSpec(_NoticedSpec):
    """Maintenance: nodes are REPAIRING for `seconds`, then READY again with rebooted VMs."""

    kind: Literal["maintenance"]  # pyright: ignore[reportIncompatibleVariableOverride]
    seconds: float = Field(gt=0)
    new_host_keys: bool = Field(True, description="the VMs are rebuilt, as on another host, with new SSH host keys")


class UnhealthySpec(_OneShotSpec):
    """Bad health of nodes, optionally with a symptom of one worker; programs keep running."""

    kind: Literal["unhealthy"]  # pyright: ignore[reportIncompatibleVariableOverride]
    health: Literal["TIMEOUT", "UNHEALTHY_TENSORFLOW", "UNHEALTHY_MAINTENANCE"] = "TIMEOUT"
    symptom: Symptom | None = None
    worker: int | None = Field(None, ge=0)
    words: str = "The TPU does not answer"


class ProgramKilledSpec(_OneShotSpec):
    """Kill of the program of one worker or of all; `out_of_memory` makes it an OOM kill."""

    kind: Literal["killed"]  # pyright: ignore[reportIncompatibleVariableOverride]
    worker: int | None = Field(None, ge=0)
    out_of_memory: bool = False


class ProgramFrozenSpec(_OneShotSpec):
    """SIGSTOP of the program of one worker or of all: it stays alive and does nothing."""

    kind: Literal["frozen"]  # pyright: ignore[reportIncompatibleVariableOverride]
    worker: int | None = Field(None, ge=0)


class ControllerKilledSpec(_OneShotSpec):
    """SIGKILL of the local Slipway process that sent the last request: the controller itself."""

    kind: Literal["controller_killed"]  # pyright: ignore[reportIncompatibleVariableOverride]


class WorkerClockSpec(_OneShotSpec):
    """Clock skew in seconds of one worker or of all, visible to the agent, from the strike on."""

    kind: Literal["worker_clock"]  # pyright: ignore[reportIncompatibleVariableOverride]
    seconds: float
    worker: int | None = Field(None, ge=0)


class CreationSpec(_CountedSpec):
    """Failure of the next `times` node creations in this zone and tier, at the request or in the operation."""

    zone: str | None = Field(None, description="null: any")
    capacity: str | None = Field(None, description="on_demand, spot, preemptible, reserved, flex_start; null: any")
    accelerator_type: str | None = Field(None, description="null: any")
    plane: Literal["tpu_api", "compute_engine"] | None = Field(None, description="null: any")
    at: Literal["request", "operation"] = Field("operation", description="fail the request, or the operation")


class StockoutSpec(CreationSpec):
    """No capacity."""

    kind: Literal["stockout"]  # pyright: ignore[reportIncompatibleVariableOverride]


class DeniedSpec(CreationSpec):
    """Exhausted quota of the project, or missing permission of the caller."""

    kind: Literal["quota", "permission"]  # pyright: ignore[reportIncompatibleVariableOverride]
    at: Literal["request", "operation"] = "request"


class NamedRefusalSpec(CreationSpec):
    """A refusal in the words of field reports: of a type in this zone and tier, or "Reservation not found"."""

    kind: Literal["type_denied", "no_reservation"]  # pyright: ignore[reportIncompatibleVariableOverride]
    at: Literal["request", "operation"] = "request"


class InternalSpec(CreationSpec):
    """Code 13 without a reason, which TPU creations meet every day."""

    kind: Literal["internal"]  # pyright: ignore[reportIncompatibleVariableOverride]


class FailureSpec(CreationSpec):
    """Internal error of Google's."""

    kind: Literal["failure"]  # pyright: ignore[reportIncompatibleVariableOverride]
    code: int = Field(500, ge=400, le=599, description="HTTP status code")
    message: str = "An internal error has occurred"


class PermissionSpec(FaultSpec):
    """Loss of one permission, whatever the roles contain, as by a deny policy of the organization."""

    kind: Literal["denied"]  # pyright: ignore[reportIncompatibleVariableOverride]
    permission: str = Field(pattern=r"^[a-z]+\.[a-zA-Z.]+$", description="e.g. compute.networks.create")
    client: Literal["laptop", "workers"] = Field("laptop", description="who loses it")


class TokensExpiredSpec(_OneShotSpec):
    """End of all access tokens issued so far: they are refused with 401."""

    kind: Literal["tokens_expired"]  # pyright: ignore[reportIncompatibleVariableOverride]


class EndpointsSpec(_CountedSpec):
    """Wrong number of VMs in the next `times` nodes."""

    kind: Literal["endpoints"]  # pyright: ignore[reportIncompatibleVariableOverride]
    endpoints: int = Field(ge=1)


class ChipMissingSpec(_CountedSpec):
    """One chip less on a worker of the next `times` nodes that boot."""

    kind: Literal["chip_missing"]  # pyright: ignore[reportIncompatibleVariableOverride]
    worker: int = Field(0, ge=0)


class SliceCreationSpec(_CountedSpec):
    """End of the next `times` slices of Compute Engine in another state than ACTIVE."""

    kind: Literal["slice_creation"]  # pyright: ignore[reportIncompatibleVariableOverride]
    state: Literal["FAILED", "INCOMPLETE", "ACTIVE_DEGRADED"]
    worker: int = Field(0, ge=0, description="the VM that does not run if INCOMPLETE")
    message: str = "An internal error has occurred"


class SliceStateSpec(_OneShotSpec):
    """Change of the topology of all ACTIVE slices of Compute Engine.

    REACTIVATING: all VMs are down for `seconds`, then the slice is ACTIVE again. INCOMPLETE: VM `worker` has stopped.
    FAILED: all have. ACTIVE_DEGRADED: all run.
    """

    kind: Literal["slice_state"]  # pyright: ignore[reportIncompatibleVariableOverride]
    state: Literal["REACTIVATING", "INCOMPLETE", "FAILED", "ACTIVE_DEGRADED"]
    worker: int = Field(0, ge=0)
    seconds: float = Field(1.0, gt=0)
    message: str = "An internal error has occurred"


class QueuedStateSpec(_CountedSpec):
    """Failure of the next `times` queued resources that would become ACTIVE, or `seconds` in PROVISIONING."""

    kind: Literal["queued"]  # pyright: ignore[reportIncompatibleVariableOverride]
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

    kind: Literal["http"]  # pyright: ignore[reportIncompatibleVariableOverride]
    status: int = Field(ge=400, le=599)
    retry_after: int | None = Field(None, ge=0, description="value of the Retry-After header in seconds")
    message: str | None = Field(None, description="message of the error response")
    reason: str | None = Field(None, description="its machine-readable reason, e.g. SERVICE_DISABLED")


class ConnectionCutSpec(_RequestSpec):
    """Broken connection of the next `times` matching requests: before the work, mid-upload, or before the answer."""

    kind: Literal["cut"]  # pyright: ignore[reportIncompatibleVariableOverride]
    at: Literal["request", "upload", "answer"] = "answer"


class BrownoutSpec(_LastingSpec):
    """Brownout: a share of all requests fails with 503, 429, or a connection that stalls and breaks."""

    kind: Literal["brownout"]  # pyright: ignore[reportIncompatibleVariableOverride]
    share: float = Field(gt=0, le=1)
    client: Literal["laptop", "workers"] | None = Field(None, description="whose requests; null: all")


class BucketOutageSpec(_LastingSpec):
    """Outage of Cloud Storage: everybody's requests to it fail with 503, or stall and break; the other APIs work."""

    kind: Literal["bucket_outage"]  # pyright: ignore[reportIncompatibleVariableOverride]


class PartitionSpec(_LastingSpec):
    """Network partition: between the laptop and both Google's APIs and the workers, or between workers and APIs."""

    kind: Literal["partition"]  # pyright: ignore[reportIncompatibleVariableOverride]
    client: Literal["laptop", "workers"] = "laptop"


class DiskFullSpec(_LastingSpec):
    """Full disk of one worker or of all: nothing can be written (Linux only)."""

    kind: Literal["disk_full"]  # pyright: ignore[reportIncompatibleVariableOverride]
    needs_trigger: ClassVar[bool] = True
    worker: int | None = Field(None, ge=0)


class ChipHeldSpec(_LastingSpec):
    """A process that holds the first chip of one worker or of all, by default from when a node is READY."""

    kind: Literal["chip_held"]  # pyright: ignore[reportIncompatibleVariableOverride]
    default_trigger: ClassVar[dict[str, float]] = {"after_seconds": 0.0}
    worker: int | None = Field(None, ge=0)


class SshSpec(_LastingSpec):
    """Refused or unresponsive SSH connections of one worker or of all, by default from when a node is READY."""

    kind: Literal["ssh_refused", "ssh_frozen"]  # pyright: ignore[reportIncompatibleVariableOverride]
    default_trigger: ClassVar[dict[str, float]] = {"after_seconds": 0.0}
    worker: int | None = Field(None, ge=0)


AnyFaultSpec = Annotated[
    PreemptionSpec | MaintenanceSpec | UnhealthySpec | ProgramKilledSpec | ProgramFrozenSpec | ControllerKilledSpec
    | WorkerClockSpec | TokensExpiredSpec | PermissionSpec
    | StockoutSpec | DeniedSpec | NamedRefusalSpec | InternalSpec | FailureSpec
    | EndpointsSpec | ChipMissingSpec | QueuedStateSpec | SliceCreationSpec | SliceStateSpec
    | ChipHeldSpec | HttpSpec | ConnectionCutSpec | BrownoutSpec | BucketOutageSpec | PartitionSpec | DiskFullSpec
    | SshSpec,
    Field(discriminator="kind"),
]  # fmt: skip
_FAULT_ADAPTER: TypeAdapter[Any] = TypeAdapter(AnyFaultSpec)
ONE_SHOT_KINDS = (
    "preempted",
    "maintenance",
    "unhealthy",
    "killed",
    "frozen",
    "controller_killed",
    "worker_clock",
    "tokens_expired",
    "slice_state",
)
CREATION_KINDS = ("stockout", "quota", "permission", "type_denied", "no_reservation", "internal", "failure")
LASTING_KINDS = ("brownout", "bucket_outage", "partition", "disk_full", "chip_held", "ssh_refused", "ssh_frozen")
FAULT_KINDS = (
    *ONE_SHOT_KINDS, *CREATION_KINDS, "denied", "endpoints", "chip_missing", "queued", "slice_creation", "http", "cut",
    *LASTING_KINDS,
)  # fmt: skip


def parse_fault(spec: Any) -> FaultSpec:
    """Parse a fault as written in YAML; raise ApiError 400 naming the invalid key, or the known kinds."""
    kind = spec.get("kind") if isinstance(spec, dict) else None
    if kind not in FAULT_KINDS:
        raise ApiError(400, f"cloud.faults: unknown kind {kind!r}; known: {', '.join(FAULT_KINDS)}")
    try:
        return _FAULT_ADAPTER.validate_python(spec)
    except ValidationError as error:
        text = "; ".join(
            ": ".join([*(str(part) for part in problem["loc"][1:]), problem["msg"]]) for problem in error.errors()
        )
        raise ApiError(400, f"cloud.faults ({kind}): {text}") from error
