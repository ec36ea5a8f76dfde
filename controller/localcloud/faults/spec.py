"""Schema of `cloud.faults`: the kinds of fault (`KINDS`), and their triggers."""

import random
import re
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from controller.localcloud.http.errors import ApiError

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

    @property
    def triggers(self) -> list[str]:
        return [name for name in TRIGGERS if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _at_most_one_trigger(self) -> "FaultSpec":
        if len(self.triggers) > 1 or (self.needs_trigger and not self.triggers):
            word = "exactly" if self.needs_trigger else "at most"
            raise ValueError(f"needs {word} one of {', '.join(TRIGGERS[:-1])} and {TRIGGERS[-1]}")
        return self

    def seconds_after_ready(self) -> float | None:
        """Return the seconds from a node becoming READY to the strike, or None without such a trigger."""
        if self.within_seconds is not None:
            return random.Random(self.seed).uniform(0.0, self.within_seconds) + self.delay_seconds  # noqa: S311
        return None if self.after_seconds is None else self.after_seconds + self.delay_seconds


class OneShotSpec(FaultSpec):
    """Fault that strikes once."""

    needs_trigger: ClassVar[bool] = True


class CountedSpec(FaultSpec):
    """Fault that affects the next `times` matching events."""

    times: int = Field(1, ge=1)


class CreationSpec(CountedSpec):
    """Failure of the next `times` node creations in this zone and tier, at the request or in the operation."""

    zone: str | None = Field(None, description="null: any")
    capacity: str | None = Field(None, description="on_demand, spot, preemptible, reserved, flex_start; null: any")
    accelerator_type: str | None = Field(None, description="null: any")
    plane: Literal["tpu_api", "compute_engine"] | None = Field(None, description="null: any")
    at: Literal["request", "operation"] = Field("operation", description="fail the request, or the operation")


class LastingSpec(FaultSpec):
    """Fault that lasts for `seconds`."""

    seconds: float = Field(gt=0)


class FromReadySpec(LastingSpec):
    """Lasting fault of one worker or of all, by default from when a node is READY."""

    default_trigger: ClassVar[dict[str, float]] = {"after_seconds": 0.0}
    worker: int | None = Field(None, ge=0)


class DiskFullSpec(FromReadySpec):
    """Full disk of one worker or of all, from a moment that is said: nothing can be written (Linux only)."""

    needs_trigger, default_trigger = True, {}


def _check_regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return value


_SECONDS = (float, Field(gt=0))
_NOTICE = (float | None, Field(None, gt=0, description="how long before it the metadata servers announce it, if so"))
_WORKER = (int | None, Field(None, ge=0))
_FIRST_WORKER = (int, Field(0, ge=0))
_MATCH = (Annotated[str, AfterValidator(_check_regex)], Field(description="of METHOD /path"))
_WHO = Literal["laptop", "workers"]
_HEALTH = Literal["TIMEOUT", "UNHEALTHY_TENSORFLOW", "UNHEALTHY_MAINTENANCE"]
_SYMPTOM = Literal[
    "LOW_MEMORY", "OUT_OF_MEMORY", "EXECUTE_TIMED_OUT", "MESH_BUILD_FAIL", "HBM_OUT_OF_MEMORY", "PROJECT_ABUSE"
]
_CONSTRAINT = Literal[
    "compute.vmExternalIpAccess", "compute.requireShieldedVm", "compute.restrictCloudNATUsage",
    "gcp.resourceLocations", "iam.disableServiceAccountCreation",
]  # fmt: skip
_INTERNAL = "An internal error has occurred"


def _kind(base: type[FaultSpec], **fields: Any) -> type[FaultSpec]:
    """Return a schema with these fields, each a type with its default, beside those of `base`."""
    return create_model("Fault", __base__=base, **fields)


_refused = _kind(CreationSpec, at=(Literal["request", "operation"], "request"))  # found out at the request
KINDS: dict[str, type[FaultSpec]] = {
    # of all READY nodes, or of one
    "preempted": _kind(OneShotSpec, notice_seconds=_NOTICE, node=(str | None, Field(None, min_length=1))),
    # nodes are REPAIRING for `seconds`, then READY again with rebooted VMs: rebuilt, as on another host
    "maintenance": _kind(OneShotSpec, notice_seconds=_NOTICE, seconds=_SECONDS, new_host_keys=(bool, True)),
    # optionally with a symptom of one worker; programs keep running
    "unhealthy": _kind(
        OneShotSpec,
        health=(_HEALTH, "TIMEOUT"),
        symptom=(_SYMPTOM | None, None),
        worker=_WORKER,
        words=(str, "The TPU does not answer"),
    ),
    "killed": _kind(OneShotSpec, worker=_WORKER, out_of_memory=(bool, False)),
    "frozen": _kind(OneShotSpec, worker=_WORKER),  # SIGSTOP of the program: it stays alive and does nothing
    "controller_killed": OneShotSpec,  # SIGKILL of the local Slipway process that sent the last request
    "worker_clock": _kind(OneShotSpec, seconds=(float, ...), worker=_WORKER),  # skew that the agent sees from then on
    "tokens_expired": OneShotSpec,  # end of all access tokens issued so far: they are refused with 401
    # of the topology of all ACTIVE slices of Compute Engine. REACTIVATING: all VMs are down for `seconds`, then the
    # slice is ACTIVE again. INCOMPLETE: VM `worker` has stopped. FAILED: all have. ACTIVE_DEGRADED: all run.
    "slice_state": _kind(
        OneShotSpec,
        state=(Literal["REACTIVATING", "INCOMPLETE", "FAILED", "ACTIVE_DEGRADED"], ...),
        worker=_FIRST_WORKER,
        seconds=(float, Field(1.0, gt=0)),
        message=(str, _INTERNAL),
    ),
    "stockout": CreationSpec,  # no capacity
    "quota": _refused,  # exhausted
    "permission": _refused,  # of the caller, which lacks it
    "type_denied": _refused,  # of a type in this zone and tier, in the words of field reports
    "no_reservation": _refused,  # "Reservation not found", in the words of field reports
    "internal": CreationSpec,  # code 13 without a reason, which TPU creations meet every day
    "failure": _kind(CreationSpec, code=(int, Field(500, ge=400, le=599)), message=(str, _INTERNAL)),
    # a zone or region that lists of all places leave out and name: TPU in `unreachable`, Compute Engine in
    # `unreachables` or by a warning of the scope
    "unreachable": _kind(FaultSpec, place=(str, Field(min_length=1)), told=(Literal["field", "warning"], "warning")),
    # a type of the TPU API, or a machine type, that a zone lists beside those of conf/tpu_types.yaml; it cannot be made
    "offered": _kind(
        FaultSpec,
        zone=(str, Field(min_length=1)),
        type=(str | None, Field(None, min_length=1)),
        machine_type=(str | None, Field(None, min_length=1)),
    ),
    "lagging_lists": _kind(FaultSpec, seconds=_SECONDS),  # what is younger is in no list of pods' parts
    # groups do not show the state of their topology: https://cloud.google.com/compute/docs/reference/rest/v1 documents
    # the field as output only, and not when it is filled in
    "topology_hidden": FaultSpec,
    "open_operation": _kind(CountedSpec, verb=(str, Field(min_length=1)), seconds=_SECONDS),  # of Compute Engine
    # how nodes show their type, image and network: left out, as full names, or another image than the requested one
    "echo": _kind(FaultSpec, form=(Literal["absent", "full", "other"], ...)),
    # loss of one permission, whatever the roles contain, as by a deny policy of the organization
    "denied": _kind(FaultSpec, permission=(str, Field(pattern=r"^[a-z]+\.[a-zA-Z.]+$")), client=(_WHO, "laptop")),
    # lack of one permission for `seconds`, as of a role that was bound a moment ago
    "late_grant": _kind(LastingSpec, permission=(str, Field(pattern=r"^[a-z]+\.[a-zA-Z.]+$")), client=(_WHO, "laptop")),
    # an organization policy, which refuses and is shown; `location`: the region that gcp.resourceLocations allows
    "policy": _kind(FaultSpec, constraint=(_CONSTRAINT, ...), location=(str, "us-central1")),
    # one request too many: of the project's in a minute, of the user's, changes of one resource or operations at the
    # same time, each 403; or 429 with RetryInfo, as newer APIs send it
    "rate_limit": _kind(
        CountedSpec,
        match=_MATCH,
        form=(Literal["project", "user", "resource", "operations", "retry_info"], "project"),
    ),
    "billing_disabled": FaultSpec,  # of the project: it has no billing account
    "endpoints": _kind(CountedSpec, endpoints=(int, Field(ge=1))),  # wrong number of VMs in the next nodes
    "chip_missing": _kind(CountedSpec, worker=_FIRST_WORKER),  # of the next nodes that boot
    # failure of the next queued resources that would become ACTIVE, or `seconds` in PROVISIONING
    "queued": _kind(
        CountedSpec,
        state=(Literal["SUSPENDED", "FAILED", "PROVISIONING"], ...),
        message=(str, "The request could not be served"),
        seconds=(float, Field(0.0, ge=0)),
    ),
    # end of the next slices of Compute Engine in another state than ACTIVE; INCOMPLETE: VM `worker` does not run
    "slice_creation": _kind(
        CountedSpec,
        state=(Literal["FAILED", "INCOMPLETE", "ACTIVE_DEGRADED"], ...),
        worker=_FIRST_WORKER,
        message=(str, _INTERNAL),
    ),
    # another answer; `retry_after` in seconds, and a machine-readable reason, such as SERVICE_DISABLED; or its `body`
    "http": _kind(
        CountedSpec,
        match=_MATCH,
        status=(int, Field(ge=400, le=599)),
        retry_after=(int | None, Field(None, ge=0)),
        message=(str | None, None),
        reason=(str | None, None),
        body=(str | None, None),
        code=(str | None, Field(None, description="canonical code of the newer APIs, reason of the older ones")),
    ),
    # broken connection: before the work, mid-upload, or before the answer
    "cut": _kind(CountedSpec, match=_MATCH, at=(Literal["request", "upload", "answer"], "answer")),
    # a share of all requests fails with 503, 429, or a connection that stalls and breaks
    "brownout": _kind(LastingSpec, share=(float, Field(gt=0, le=1)), client=(_WHO | None, None)),
    "bucket_outage": LastingSpec,  # all requests to Cloud Storage fail with 503, or stall and break; the others do not
    # between the laptop and both Google's APIs and the workers, or between workers and APIs
    "partition": _kind(LastingSpec, client=(_WHO, "laptop")),
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
    if not isinstance(kind, str) or kind not in KINDS:
        near = get_close_matches(str(kind), KINDS, n=1)
        said = f"unknown kind {kind!r};{f' did you mean {near[0]}?' if near else ''}" if kind else "has no kind;"
        raise ApiError(400, f"cloud.faults: {said} known: {', '.join(KINDS)}")
    try:
        return KINDS[kind].model_validate(spec)
    except ValidationError as error:
        found = [_said(one, KINDS[kind]) for one in error.errors()]
        raise ApiError(400, f"cloud.faults: {kind}: {'; '.join(found)}") from error


def _said(error: Any, schema: type[FaultSpec]) -> str:
    """Return what pydantic refuses in a fault, with the keys that it has."""
    key, message = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"unknown key {key}; keys: {', '.join(schema.model_fields)}"
    return f"{key}: {message[0].lower()}{message[1:]}" if key else message
