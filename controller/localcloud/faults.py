"""Scripted misfortune: what goes wrong, and when."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from controller.localcloud.errors import CloudError
from controller.localcloud.store import Document, Store

KINDS = ("preempted", "stockout", "http", "ssh_refused")


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Preempted(_Spec):
    """All READY nodes are preempted once: after an object has appeared, or so long after a node became READY."""

    kind: Literal["preempted"]
    after_object: str | None = Field(None, min_length=1, description="part of the name of an object just finalized")
    after_seconds: float | None = Field(None, ge=0, description="seconds since the node became READY")
    delay_seconds: float = Field(0.0, ge=0, description="additional wait after the trigger")

    @model_validator(mode="after")
    def _one_trigger(self) -> Preempted:
        if (self.after_object is None) == (self.after_seconds is None):
            raise ValueError("preempted needs exactly one of after_object and after_seconds")
        return self


class Stockout(_Spec):
    """The next `times` attempts to make a node find no capacity."""

    kind: Literal["stockout"]
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
    """Workers refuse SSH for so many seconds from the moment a node is READY; one worker, or all."""

    kind: Literal["ssh_refused"]
    seconds: float = Field(gt=0)
    worker: int | None = Field(None, ge=0)


Fault = Annotated[Preempted | Stockout | Http | SshRefused, Field(discriminator="kind")]
_FAULT: TypeAdapter[Any] = TypeAdapter(Fault)


def parse(spec: Any) -> Preempted | Stockout | Http | SshRefused:
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
        self._preempt: Callable[[], Awaitable[None]] | None = None
        self._ssh_changed: Callable[[], None] | None = None

    def resume(self, preempt: Callable[[], Awaitable[None]], ssh_changed: Callable[[], None]) -> None:
        """Takes what faults act through, and sets the clocks of those whose trigger has come already."""
        self._preempt = preempt
        self._ssh_changed = ssh_changed
        for name, fault in self._store.items("fault"):
            if fault["due"] is not None and fault["left"]:
                self._set_clock(name, fault)

    def close(self) -> None:
        """Stops the clocks; due times stay in the store."""
        for timer in self._timers:
            timer.cancel()

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
        for name, fault in self._open("preempted"):
            after = fault["spec"]["after_seconds"]
            if after is not None:
                self._trigger(name, fault, at + after + fault["spec"]["delay_seconds"])
        for name, fault in self._open("ssh_refused"):
            self._trigger(name, fault, time.time() + fault["spec"]["seconds"])
        if self._ssh_changed:
            self._ssh_changed()

    def object_finalized(self, name: str) -> None:
        """An object has appeared in a bucket."""
        for fault_name, fault in self._open("preempted"):
            wanted = fault["spec"]["after_object"]
            if wanted is not None and wanted in name:
                self._trigger(fault_name, fault, time.time() + fault["spec"]["delay_seconds"])

    def take_stockout(self) -> bool:
        """Whether this attempt to make a node finds no capacity."""
        return any(self._take(name, fault) for name, fault in self._open("stockout")[:1])

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
        return any(
            fault["due"] is not None and fault["spec"]["worker"] in (None, worker)
            for _, fault in self._store.items("fault")
            if fault["left"] and fault["spec"]["kind"] == "ssh_refused"
        )

    def _open(self, kind: str) -> list[tuple[str, Document]]:
        """The faults of a kind that have neither been triggered nor used up."""
        items = self._store.items("fault")
        return [(n, f) for n, f in items if f["spec"]["kind"] == kind and f["left"] and f["due"] is None]

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
        if fault["spec"]["kind"] == "preempted" and self._preempt:
            await self._preempt()
        elif self._ssh_changed:
            self._ssh_changed()
