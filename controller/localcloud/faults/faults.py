"""Scripted faults: which are armed, active or over, and which requests they affect. `spec.py` defines them.

A fault waits for its trigger and is `due` at a time. Then it either strikes once, affects the next matching events
(until none is `left`), or lasts for its `seconds`.
"""

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.localcloud.faults.refusals import policy_violation, rate_limited
from controller.localcloud.faults.spec import CREATION_KINDS, LASTING_KINDS, ONE_SHOT_KINDS, parse_fault
from controller.localcloud.http.call import ApiCall, timestamp
from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Document, Store

FaultAction = Callable[[Document], Awaitable[None]]
Words = Callable[[Document, str, str, str], ApiError | None]
STALL_SECONDS = 0.5
"""Seconds that a request may hang during a brownout before its connection breaks."""
_STORAGE_PATH = re.compile(r"/(upload/|download/|batch/)?storage/")
"""Paths of Cloud Storage's JSON API: https://cloud.google.com/storage/docs/json_api."""
_MAX_RECENT = 100
"""Maximum number of strike times kept per fault."""


@dataclass(frozen=True)
class BrokenConnection:
    """Break of a connection `at` the request, during the upload, or at the answer, after a stall."""

    phase: str
    stall_seconds: float = 0.0


class Faults:
    """Registered faults, each with the strikes `left`, the time it is or was `due`, and the times it `struck`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._timers: set[asyncio.Task[None]] = set()
        self._actions: Mapping[str, FaultAction] = {}
        self._on_ssh_change: Callable[[], None] = lambda: None
        self._requests = store.last_log_sequence()

    def resume(self, acts: Mapping[str, FaultAction], ssh_changed: Callable[[], None]) -> None:
        """Set the action of each kind of fault, and restart the timers of faults already triggered."""
        self._actions = acts
        self._on_ssh_change = ssh_changed
        for name, fault in self._store.items("fault"):
            if fault["due"] is not None and fault["left"]:
                self._set_clock(name, fault)

    def close(self) -> None:
        """Cancel the timers; due times stay in the store."""
        for timer in self._timers:
            timer.cancel()

    def clear(self) -> None:
        """Delete every fault, including those about to strike."""
        self.close()
        for kind in ("fault", "faults", "queuedHold"):
            for name, _ in self._store.items(kind):
                self._store.delete(kind, name)
        self._on_ssh_change()

    def register(self, key: str, specs: list[Any], ready_at: float | None) -> bool:
        """Add a list of faults under a key, all or none; return False if the key is already known.

        `ready_at` is when a currently READY node became READY. Raises ApiError 400 on an invalid spec.
        """
        faults = [parse_fault(spec) for spec in specs]
        if self._store.get("faults", key):
            return False
        with self._store.transaction():
            self._store.put("faults", key, {"count": len(faults)})
            for index, fault in enumerate(faults):
                entry = {"spec": fault.model_dump(), "left": getattr(fault, "times", 1), "due": None, "struck": []}
                entry |= {"after_ready": fault.seconds_after_ready(), "begun": self._requests}
                name = f"{key}/{index:03d}"
                self._store.put("fault", name, entry)
                if not fault.triggers:
                    self._arm(name, entry, time.time() + fault.delay_seconds)
        if ready_at is not None:
            self.on_node_ready(ready_at)
        return True

    # Triggers

    def on_node_ready(self, at: float) -> None:
        """Start the timers that count from a node becoming READY."""
        for name, fault in self._untriggered():
            if fault["after_ready"] is not None:
                # The fault must begin before a client that it refuses can get in.
                self._arm(name, fault, max(at + fault["after_ready"], time.time()))
        self._on_ssh_change()

    def on_object_finalized(self, name: str) -> None:
        self._trigger("after_object", lambda wanted, _: wanted in name)

    def on_request(self) -> None:
        """Trigger faults that wait for a number of requests to Google's APIs."""
        self._requests += 1
        self._trigger("after_requests", lambda wanted, fault: self._requests - fault["begun"] > wanted)

    def _trigger(self, key: str, has_come: Callable[[Any, Document], bool]) -> None:
        for name, fault in self._untriggered():
            if (wanted := fault["spec"][key]) is not None and has_come(wanted, fault):
                self._arm(name, fault, time.time() + fault["spec"]["delay_seconds"])

    # Effects on requests, nodes and workers

    def refuse_creation(
        self,
        at: str,
        zone: str,
        capacity: str,
        accelerator: str,
        words: Words | None = None,
        kinds: Sequence[str] = CREATION_KINDS,
    ) -> None:
        """Raise the error of this attempt to create a node if a fault applies; `at` is request or operation.

        `words` makes the error from the fault, zone, tier and type; by default it is the TPU API's.
        """
        for name, fault in self._active(*kinds):
            spec = fault["spec"]
            met = {"zone": zone, "capacity": capacity, "accelerator_type": accelerator}
            met["plane"] = "compute_engine" if words else "tpu_api"
            if spec["at"] == at and all(spec[key] in (None, value) for key, value in met.items()):
                refusal = (words or creation_error)(spec, zone, capacity, accelerator)
                if refusal is not None:
                    self._consume(name, fault)
                    refusal.is_counted = True
                    raise refusal

    def take(self, kind: str, **met: str) -> Document | None:
        """Return the spec of the fault of this kind that affects the event at hand, and count it; None without one."""
        for name, fault in self._active(kind):
            if met.items() <= fault["spec"].items():
                self._consume(name, fault)
                return fault["spec"]
        return None

    def standing(self, kind: str) -> list[Document]:
        """Return the specs of the faults of this kind that are in effect at the moment."""
        return [fault["spec"] for _, fault in self._active(kind)]

    def hides(self, place: str, created: str) -> bool:
        """Return whether lists leave out what is in a zone or region and was made at that time, in RFC 3339."""
        if any(spec["place"] == place for spec in self.standing("unreachable")):
            return True
        return any(created > timestamp(time.time() - spec["seconds"]) for spec in self.standing("lagging_lists"))

    def worker_without_chip(self) -> int | None:
        """Return the worker of the next node that boots without one of its chips, or None."""
        spec = self.take("chip_missing")
        return spec["worker"] if spec else None

    def intercept(self, laptop: bool, http: str, path: str) -> BrokenConnection | None:
        """Raise the refusal that a fault has for this request of the laptop or of a worker; return how it breaks."""
        who = "laptop" if laptop else "workers"
        for name, fault in self._active("http", "rate_limit", "cut", "brownout", "bucket_outage", "partition"):
            spec = fault["spec"]
            if "match" in spec and re.search(spec["match"], f"{http} {path}"):
                self._consume(name, fault)
                if spec["kind"] == "cut":
                    return BrokenConnection(spec["at"])
                raise rate_limited(spec) if spec["kind"] == "rate_limit" else _scripted_error(spec)
            if spec["kind"] == "partition" and spec["client"] == who:
                self._record_hit(name, fault)
                return BrokenConnection("request")
            draw = random.Random(f"{spec['seed']}/{self._requests}")  # noqa: S311 - reproducible for a given seed
            outage = spec["kind"] == "bucket_outage" and _STORAGE_PATH.match(path)
            brownout = spec["kind"] == "brownout" and spec["client"] in (None, who) and draw.random() < spec["share"]
            if outage or brownout:
                self._record_hit(name, fault)
                if refusal := draw.choice((_OVERLOADED, _TOO_MANY if brownout else _OVERLOADED, None)):
                    raise refusal
                return BrokenConnection("request", STALL_SECONDS)
        return None

    def denied_permissions(self, laptop: bool) -> frozenset[str]:
        """Return the permissions that the laptop, or all workers, have lost."""
        who = "laptop" if laptop else "workers"
        specs = [*self.standing("denied"), *self.standing("late_grant")]
        return frozenset(spec["permission"] for spec in specs if spec["client"] == who)

    def check_policies(self, call: ApiCall) -> None:
        """Raise the refusal of a request that an organization policy forbids."""
        for name, fault in self._active("policy"):
            if refusal := policy_violation(fault["spec"], call):
                self._record_hit(name, fault)
                raise refusal

    def freezes_ssh(self, worker: int) -> bool:
        cut_off = any(spec["client"] == "laptop" for spec in self.standing("partition"))
        return cut_off or self.affects(worker, "ssh_frozen")

    def affects(self, worker: int, kind: str) -> bool:
        """Return whether a lasting fault of this kind affects a worker at the moment."""
        return any(spec["worker"] in (None, worker) for spec in self.standing(kind))

    # Bookkeeping and timers

    def _untriggered(self) -> list[tuple[str, Document]]:
        return [(name, fault) for name, fault in self._store.items("fault") if fault["due"] is None]

    def _active(self, *kinds: str) -> Iterator[tuple[str, Document]]:
        now = time.time()
        for name, fault in self._store.items("fault"):
            spec, due = fault["spec"], fault["due"]
            if spec["kind"] not in kinds or not fault["left"] or due is None or due > now:
                continue
            if spec["kind"] not in LASTING_KINDS or now < due + spec["seconds"]:
                yield name, fault

    def _consume(self, name: str, fault: Document) -> None:
        self._record_hit(name, {**fault, "left": fault["left"] - 1})

    def _record_hit(self, name: str, fault: Document) -> None:
        struck = [*fault["struck"], time.time()][:_MAX_RECENT]
        self._store.put("fault", name, {**fault, "struck": struck})

    def _arm(self, name: str, fault: Document, due: float) -> None:
        fault = {**fault, "due": due}
        self._store.put("fault", name, fault)
        self._set_clock(name, fault)

    def _set_clock(self, name: str, fault: Document) -> None:
        if fault["spec"]["kind"] in (*ONE_SHOT_KINDS, *LASTING_KINDS):
            self._store.start_task(self._timers, self._fire(name, fault), f"fault {name}")

    async def _fire(self, name: str, fault: Document) -> None:
        spec = fault["spec"]
        await asyncio.sleep(max(0.0, fault["due"] - time.time()))
        if spec["kind"] in ONE_SHOT_KINDS:
            self._consume(name, fault)
            await self._act(spec)
            return
        self._record_hit(name, fault)
        self._on_ssh_change()
        await self._act(spec)
        await asyncio.sleep(max(0.0, fault["due"] + spec["seconds"] - time.time()))
        self._store.put("fault", name, {**(self._store.get("fault", name) or fault), "left": 0})
        self._on_ssh_change()
        await self._act(spec)

    async def _act(self, spec: Document) -> None:
        """Do what a fault does, at the beginning or the end of a lasting one; the action determines which."""
        if act := self._actions.get(spec["kind"]):
            await act(spec)


_OVERLOADED = ApiError(503, "The service is currently unavailable.")
_TOO_MANY = ApiError(429, "Too many requests: the rate limit is exceeded.")


def _scripted_error(spec: Document) -> ApiError:
    text, reason, code = spec["message"] or f"Scripted fault: {spec['status']}", spec["reason"], spec["code"]
    info = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason}] if reason else None
    sent = {"retry_after": spec["retry_after"], "raw": spec["body"]}
    return ApiError(spec["status"], text, status=code, reason=code, details=info, **sent)


def creation_error(spec: Document, zone: str, capacity: str, accelerator: str) -> ApiError:
    """Return the error for a failed node creation, in Google's wording."""
    match spec["kind"]:
        case "stockout":
            return ApiError(
                429,
                f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes '
                "are offered (see https://cloud.google.com/tpu/docs/regions)",
            )
        case "quota":
            tier = "Preemptible" if capacity in ("spot", "preemptible") else ""
            name = f"TPU{tier}PerProjectPerZoneForTPUAPI"
            return ApiError(429, f"Quota limit '{name}' has been exceeded. Limit: 0 in zone {zone}.")
        case "permission":
            return ApiError(403, f"Permission 'tpu.nodes.create' denied on 'projects/p/locations/{zone}'")
        case "type_denied":  # of a type, zone and tier; the same project may have another tier there
            wanted = f'accelerator type "{accelerator}" in location "{zone}"'
            return ApiError(403, f"User does not have permission to submit requests for {wanted}.")
        case "no_reservation":  # on spot and on demand it means no capacity
            return ApiError(404, "Reservation not found.")
        case "internal":
            return ApiError(500, "an internal error has occurred")
    return ApiError(spec["code"], spec["message"])
