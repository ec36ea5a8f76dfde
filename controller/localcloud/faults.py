"""Scripted misfortune: what goes wrong, and when."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from controller.localcloud.errors import CloudError
from controller.localcloud.store import Document, Store

TRIGGERED = ("preempted", "maintenance", "unhealthy", "killed", "frozen")
KINDS = (
    *TRIGGERED,
    "stockout",
    "quota",
    "permission",
    "failure",
    "endpoints",
    "queued",
    "http",
    "ssh_refused",
    "ssh_frozen",
)
Symptoms = Literal[
    "LOW_MEMORY", "OUT_OF_MEMORY", "EXECUTE_TIMED_OUT", "MESH_BUILD_FAIL", "HBM_OUT_OF_MEMORY", "PROJECT_ABUSE"
]
_CREATION = ("stockout", "quota", "permission", "failure")


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Triggered(_Spec):
    """Strikes all READY nodes once: after an object has appeared, or so long after a node became READY."""

    kind: str
    after_object: str | None = Field(None, min_length=1, description="part of the name of an object just finalized")
    after_seconds: float | None = Field(None, ge=0, description="seconds since the node became READY")
    delay_seconds: float = Field(0.0, ge=0, description="additional wait after the trigger")

    @model_validator(mode="after")
    def _one_trigger(self) -> _Triggered:
        if (self.after_object is None) == (self.after_seconds is None):
            raise ValueError(f"{self.kind} needs exactly one of after_object and after_seconds")
        return self


class Preempted(_Triggered):
    """They are taken back."""

    kind: Literal["preempted"]  # pyright: ignore[reportIncompatibleVariableOverride]


class Maintenance(_Triggered):
    """They are REPAIRING for so many seconds, and then READY again, their VMs rebooted."""

    kind: Literal["maintenance"]  # pyright: ignore[reportIncompatibleVariableOverride]
    seconds: float = Field(gt=0)


class Unhealthy(_Triggered):
    """Google calls them ill, and names a symptom of one worker if there is one; what runs there runs on."""

    kind: Literal["unhealthy"]  # pyright: ignore[reportIncompatibleVariableOverride]
    health: Literal["TIMEOUT", "UNHEALTHY_TENSORFLOW", "UNHEALTHY_MAINTENANCE"] = "TIMEOUT"
    symptom: Symptoms | None = None
    worker: int | None = Field(None, ge=0)
    words: str = "The TPU does not answer"


class Killed(_Triggered):
    """The program of one worker, or of all, is killed; `out_of_memory`: by its kernel."""

    kind: Literal["killed"]  # pyright: ignore[reportIncompatibleVariableOverride]
    worker: int | None = Field(None, ge=0)
    out_of_memory: bool = False


class Frozen(_Triggered):
    """The program of one worker, or of all, is stopped by a signal: it is there and does nothing."""

    kind: Literal["frozen"]  # pyright: ignore[reportIncompatibleVariableOverride]
    worker: int | None = Field(None, ge=0)


class _Creation(_Spec):
    """The next `times` attempts to make a node there, in that tier, are refused: when asked for, or later."""

    times: int = Field(1, ge=1)
    zone: str | None = Field(None, description="null: any")
    capacity: str | None = Field(None, description="on_demand, spot, preemptible, reserved, flex_start; null: any")
    at: Literal["request", "operation"] = Field("operation", description="refused at once, or the operation fails")


class Stockout(_Creation):
    """No capacity."""

    kind: Literal["stockout"]


class Quota(_Creation):
    """The project's quota is spent."""

    kind: Literal["quota"]
    at: Literal["request", "operation"] = "request"


class Permission(_Creation):
    """The caller may not."""

    kind: Literal["permission"]
    at: Literal["request", "operation"] = "request"


class Failure(_Creation):
    """Something breaks on Google's side."""

    kind: Literal["failure"]
    code: int = Field(500, ge=400, le=599, description="as HTTP would say it")
    message: str = "An internal error has occurred"


class Endpoints(_Spec):
    """The next `times` nodes get another number of VMs than their type has."""

    kind: Literal["endpoints"]
    endpoints: int = Field(ge=1)
    times: int = Field(1, ge=1)


class QueuedState(_Spec):
    """The next `times` queued resources that would become ACTIVE end otherwise."""

    kind: Literal["queued"]
    state: Literal["SUSPENDED", "FAILED"]
    message: str = "The request could not be served"
    times: int = Field(1, ge=1)


class Http(_Spec):
    """The next `times` requests whose "METHOD /path" matches are answered with `status`."""

    kind: Literal["http"]
    status: int = Field(ge=400, le=599)
    match: str
    times: int = Field(1, ge=1)
    retry_after: int | None = Field(None, ge=0, description="seconds, as the header Retry-After says them")
    message: str | None = Field(None, description="what the answer says")
    reason: str | None = Field(None, description="its machine-readable reason, e.g. SERVICE_DISABLED")

    @field_validator("match")
    @classmethod
    def _is_regex(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return value


class SshRefused(_Spec):
    """Workers refuse SSH for so many seconds from the moment a node is READY, or an object appears; one, or all."""

    kind: Literal["ssh_refused"]
    seconds: float = Field(gt=0)
    worker: int | None = Field(None, ge=0)
    after_object: str | None = Field(None, min_length=1)


class SshFrozen(_Spec):
    """SSH connections are open and nobody answers, for so many seconds from the moment a node is READY, or an object
    appears; of one worker, or of all."""

    kind: Literal["ssh_frozen"]
    seconds: float = Field(gt=0)
    worker: int | None = Field(None, ge=0)
    after_object: str | None = Field(None, min_length=1)


Fault = Annotated[
    Preempted
    | Maintenance
    | Unhealthy
    | Killed
    | Frozen
    | Stockout
    | Quota
    | Permission
    | Failure
    | Endpoints
    | QueuedState
    | Http
    | SshRefused
    | SshFrozen,
    Field(discriminator="kind"),
]
_FAULT: TypeAdapter[Any] = TypeAdapter(Fault)


def parse(spec: Any) -> Fault:
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


class Faults:
    """The registered faults. Each is stored with what is `left` of it and `due`, the time set by its trigger."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._timers: set[asyncio.Task[None]] = set()
        self._acts: Mapping[str, Callable[[Document], Awaitable[None]]] = {}
        self._ssh_changed: Callable[[], None] | None = None

    def resume(
        self, acts: Mapping[str, Callable[[Document], Awaitable[None]]], ssh_changed: Callable[[], None]
    ) -> None:
        """Takes what faults act through, by kind, and sets the clocks of those whose trigger has come already."""
        self._acts = acts
        self._ssh_changed = ssh_changed
        for name, fault in self._store.items("fault"):
            if fault["due"] is not None and fault["left"]:
                self._set_clock(name, fault)

    def close(self) -> None:
        """Stops the clocks; due times stay in the store."""
        for timer in self._timers:
            timer.cancel()

    def clear(self) -> None:
        """Forgets every fault, also those that are about to strike."""
        self.close()
        for kind in ("fault", "faults"):
            for name, _ in self._store.items(kind):
                self._store.delete(kind, name)
        if self._ssh_changed:
            self._ssh_changed()

    def register(self, key: str, specs: list[Any], ready_at: float | None) -> bool:
        """Adds a list of faults under a key, all or none; False when the key is known already.

        `ready_at`: when a node that is READY now became so. CloudError 400 on a wrong spec.
        """
        faults = [parse(spec) for spec in specs]
        if self._store.get("faults", key):
            return False
        with self._store.transaction():
            self._store.put("faults", key, {"count": len(faults)})
            for index, fault in enumerate(faults):
                times = getattr(fault, "times", 1)
                entry = {"spec": fault.model_dump(), "left": times, "due": None}
                self._store.put("fault", f"{key}/{index:03d}", entry)
        if ready_at is not None:
            self.node_ready(ready_at)
        return True

    def node_ready(self, at: float) -> None:
        """A node is READY: the clocks that run from there start."""
        for name, fault in self._triggered():
            after = fault["spec"]["after_seconds"]
            if after is not None:
                self._trigger(name, fault, at + after + fault["spec"]["delay_seconds"])
        for name, fault in self._about_ssh():
            if fault["spec"]["after_object"] is None:
                self._trigger(name, fault, time.time() + fault["spec"]["seconds"])
        if self._ssh_changed:
            self._ssh_changed()

    def object_finalized(self, name: str) -> None:
        """An object has appeared in a bucket."""
        for fault_name, fault in self._triggered():
            wanted = fault["spec"]["after_object"]
            if wanted is not None and wanted in name:
                self._trigger(fault_name, fault, time.time() + fault["spec"]["delay_seconds"])
        for fault_name, fault in self._about_ssh():
            if fault["spec"]["after_object"] is not None and fault["spec"]["after_object"] in name:
                self._trigger(fault_name, fault, time.time() + fault["spec"]["seconds"])
                if self._ssh_changed:
                    self._ssh_changed()

    def refusal(self, at: str, zone: str, capacity: str) -> Coroutine[Any, Any, Any] | None:
        """Raises, when it is awaited, why this attempt to make a node fails; `at` is request or operation.

        None: it does not. What a handler raises by itself undoes what it has stored, the count of the fault too.
        """
        for kind in _CREATION:
            for name, fault in self._open(kind):
                spec = fault["spec"]
                if spec["at"] == at and spec["zone"] in (None, zone) and spec["capacity"] in (None, capacity):
                    return self._refuse(name, fault, _refusal(spec, zone, capacity))
        return None

    async def _refuse(self, name: str, fault: Document, refusal: CloudError) -> Any:
        self._take(name, fault)
        raise refusal

    def vms(self, wanted: int) -> int:
        """How many VMs the next node gets instead of what its type has."""
        for name, fault in self._open("endpoints"):
            self._take(name, fault)
            return fault["spec"]["endpoints"]
        return wanted

    def queued_end(self) -> tuple[str, str] | None:
        """State and message that a queued resource ends in instead of becoming ACTIVE."""
        for name, fault in self._open("queued"):
            self._take(name, fault)
            return fault["spec"]["state"], fault["spec"]["message"]
        return None

    def answer_for(self, http: str, path: str) -> CloudError | None:
        """What this request shall be refused with, if anything."""
        for name, fault in self._open("http"):
            spec = fault["spec"]
            if re.search(spec["match"], f"{http} {path}"):
                self._take(name, fault)
                words = spec.get("message") or f"Scripted fault: {spec['status']}"
                reason = spec.get("reason")
                info = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason}] if reason else None
                return CloudError(spec["status"], words, details=info, retry_after=spec.get("retry_after"))
        return None

    def refuses_ssh(self, worker: int) -> bool:
        """Whether this worker refuses SSH now."""
        return self._under_way("ssh_refused", worker)

    def freezes_ssh(self, worker: int) -> bool:
        """Whether this worker does not answer on SSH now."""
        return self._under_way("ssh_frozen", worker)

    def _under_way(self, kind: str, worker: int) -> bool:
        return any(
            fault["due"] is not None and fault["spec"]["worker"] in (None, worker)
            for _, fault in self._store.items("fault")
            if fault["left"] and fault["spec"]["kind"] == kind
        )

    def _open(self, kind: str) -> list[tuple[str, Document]]:
        """The faults of a kind that have neither been triggered nor used up."""
        items = self._store.items("fault")
        return [(n, f) for n, f in items if f["spec"]["kind"] == kind and f["left"] and f["due"] is None]

    def _triggered(self) -> list[tuple[str, Document]]:
        return [found for kind in TRIGGERED for found in self._open(kind)]

    def _about_ssh(self) -> list[tuple[str, Document]]:
        return [*self._open("ssh_refused"), *self._open("ssh_frozen")]

    def _take(self, name: str, fault: Document) -> bool:
        self._store.put("fault", name, {**fault, "left": fault["left"] - 1})
        return True

    def _trigger(self, name: str, fault: Document, due: float) -> None:
        fault = {**fault, "due": due}
        self._store.put("fault", name, fault)
        self._set_clock(name, fault)

    def _set_clock(self, name: str, fault: Document) -> None:
        timer = asyncio.get_running_loop().create_task(self._strike(name, fault))
        self._timers.add(timer)
        timer.add_done_callback(self._timers.discard)

    async def _strike(self, name: str, fault: Document) -> None:
        await asyncio.sleep(max(0.0, fault["due"] - time.time()))
        self._take(name, fault)
        if act := self._acts.get(fault["spec"]["kind"]):
            await act(fault["spec"])
        elif self._ssh_changed:
            self._ssh_changed()


def _refusal(spec: Document, zone: str, capacity: str) -> CloudError:
    """A refusal to make a node, in the words that Google has for it."""
    match spec["kind"]:
        case "stockout":
            return CloudError(
                429,
                f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes '
                "are offered (see https://cloud.google.com/tpu/docs/regions)",
            )
        case "quota":
            tier = "Preemptible" if capacity in ("spot", "preemptible") else ""
            name = f"TPU{tier}PerProjectPerZoneForTPUAPI"
            return CloudError(429, f"Quota limit '{name}' has been exceeded. Limit: 0 in zone {zone}.")
        case "permission":
            return CloudError(403, f"Permission 'tpu.nodes.create' denied on 'projects/p/locations/{zone}'")
    return CloudError(spec["code"], spec["message"])
