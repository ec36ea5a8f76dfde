"""Scripted misfortune: which of it is armed, under way or over, and whom it meets. What there is: `faultspec.py`.

A fault waits for its trigger, is `due` at a time, and from then on either strikes at once (a blow), meets the next
things it is about (until none is `left`), or lasts for its `seconds`.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from controller.localcloud.faults.spec import CREATION_KINDS, LASTING_KINDS, ONE_SHOT_KINDS, parse_fault
from controller.localcloud.http import internal_errors
from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Document, Store

FaultAction = Callable[[Document], Awaitable[None]]
STALL_SECONDS = 0.5
"""How long a request of a brown-out may hang before its connection breaks."""
_MAX_RECENT = 100
"""Of how many strikes of one fault the times are kept."""


@dataclass(frozen=True)
class BrokenConnection:
    """The connection of a request is to break `at` its request, in its upload, or at its answer, after a stall."""

    at: str
    stall_seconds: float = 0.0


class Faults:
    """The registered faults: each with what is `left` of it, when it is or was `due`, and when it `struck`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._timers: set[asyncio.Task[None]] = set()
        self._actions: Mapping[str, FaultAction] = {}
        self._on_ssh_change: Callable[[], None] | None = None
        self._requests = store.last_log_sequence()

    def resume(self, acts: Mapping[str, FaultAction], ssh_changed: Callable[[], None]) -> None:
        """Takes what faults act through, by kind, and sets the clocks of those whose trigger has come already."""
        self._actions = acts
        self._on_ssh_change = ssh_changed
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
        self._notify_ssh()

    def register(self, key: str, specs: list[Any], ready_at: float | None) -> bool:
        """Adds a list of faults under a key, all or none; False when the key is known already.

        `ready_at`: when a node that is READY now became so. CloudError 400 on a wrong spec.
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
                if not fault.waits:
                    self._arm(name, entry, time.time() + fault.delay_seconds)
        if ready_at is not None:
            self.on_node_ready(ready_at)
        return True

    # The triggers

    def on_node_ready(self, at: float) -> None:
        """A node is READY: the clocks that run from there start."""
        for name, fault in self._untriggered():
            if fault["after_ready"] is not None:
                # Whoever is refused by a fault must not get in before it has begun.
                self._arm(name, fault, max(at + fault["after_ready"], time.time()))
        self._notify_ssh()

    def on_object_finalized(self, name: str) -> None:
        """An object has appeared in a bucket."""
        for fault_name, fault in self._untriggered():
            wanted = fault["spec"]["after_object"]
            if wanted is not None and wanted in name:
                self._arm(fault_name, fault, time.time() + fault["spec"]["delay_seconds"])

    def on_request(self) -> None:
        """A request to one of Google's APIs has come."""
        self._requests += 1
        for name, fault in self._untriggered():
            wanted = fault["spec"]["after_requests"]
            if wanted is not None and self._requests - fault["begun"] > wanted:
                self._arm(name, fault, time.time() + fault["spec"]["delay_seconds"])

    # Whom they meet

    def refusal(self, at: str, zone: str, capacity: str) -> Coroutine[Any, Any, Any] | None:
        """Raises, when it is awaited, why this attempt to make a node fails; `at` is request or operation.

        None: it does not. What a handler raises by itself undoes what it has stored, the count of the fault too.
        """
        for name, fault in self._active(*CREATION_KINDS):
            spec = fault["spec"]
            if spec["at"] == at and spec["zone"] in (None, zone) and spec["capacity"] in (None, capacity):
                return self._refuse(name, fault, creation_error(spec, zone, capacity))
        return None

    async def _refuse(self, name: str, fault: Document, refusal: ApiError) -> Any:
        self._take(name, fault)
        raise refusal

    def vms(self, wanted: int) -> int:
        """How many VMs the next node gets instead of what its type has."""
        for name, fault in self._active("endpoints"):
            self._take(name, fault)
            return fault["spec"]["endpoints"]
        return wanted

    def queued_failure(self) -> tuple[str, str] | None:
        """State and message that a queued resource ends in instead of becoming ACTIVE."""
        for name, fault in self._active("queued"):
            self._take(name, fault)
            return fault["spec"]["state"], fault["spec"]["message"]
        return None

    def meets(self, laptop: bool, http: str, path: str) -> ApiError | BrokenConnection | None:
        """What befalls this request of the laptop, or of a worker, if anything."""
        who = "laptop" if laptop else "workers"
        for name, fault in self._active("http", "cut", "brownout", "partition"):
            spec = fault["spec"]
            if "match" in spec and re.search(spec["match"], f"{http} {path}"):
                self._take(name, fault)
                return BrokenConnection(spec["at"]) if spec["kind"] == "cut" else scripted_error(spec)
            if spec["kind"] == "partition" and spec["client"] == who:
                self._note(name, fault)
                return BrokenConnection("request")
            if spec["kind"] == "brownout" and spec["client"] in (None, who):
                draw = random.Random(f"{spec['seed']}/{self._requests}")  # noqa: S311 - the same for the same seed
                if draw.random() < spec["share"]:
                    self._note(name, fault)
                    return draw.choice((_OVERLOADED, _TOO_MANY, BrokenConnection("request", STALL_SECONDS)))
        return None

    def refuses_ssh(self, worker: int) -> bool:
        """Whether this worker refuses SSH now."""
        return self._affects_worker(worker, "ssh_refused")

    def freezes_ssh(self, worker: int) -> bool:
        """Whether this worker does not answer on SSH now."""
        cut_off = any(fault["spec"]["client"] == "laptop" for _, fault in self._active("partition"))
        return cut_off or self._affects_worker(worker, "ssh_frozen")

    def fills_disk(self, worker: int) -> bool:
        """Whether nothing can be written on this worker now."""
        return self._affects_worker(worker, "disk_full")

    def _affects_worker(self, worker: int, kind: str) -> bool:
        return any(fault["spec"]["worker"] in (None, worker) for _, fault in self._active(kind))

    # What is left of them, and their clocks

    def _untriggered(self) -> list[tuple[str, Document]]:
        """The faults whose trigger has not come."""
        return [(name, fault) for name, fault in self._store.items("fault") if fault["due"] is None]

    def _active(self, *kinds: str) -> Iterator[tuple[str, Document]]:
        """The faults of these kinds that meet whoever comes now."""
        now = time.time()
        for name, fault in self._store.items("fault"):
            spec, due = fault["spec"], fault["due"]
            if spec["kind"] not in kinds or not fault["left"] or due is None or due > now:
                continue
            if spec["kind"] not in LASTING_KINDS or now < due + spec["seconds"]:
                yield name, fault

    def _take(self, name: str, fault: Document) -> None:
        self._note(name, {**fault, "left": fault["left"] - 1})

    def _note(self, name: str, fault: Document) -> None:
        """Put on record that it has struck."""
        struck = [*fault["struck"], time.time()][:_MAX_RECENT]
        self._store.put("fault", name, {**fault, "struck": struck})

    def _arm(self, name: str, fault: Document, due: float) -> None:
        fault = {**fault, "due": due}
        self._store.put("fault", name, fault)
        self._set_clock(name, fault)

    def _set_clock(self, name: str, fault: Document) -> None:
        if fault["spec"]["kind"] in (*ONE_SHOT_KINDS, *LASTING_KINDS):
            timer = asyncio.get_running_loop().create_task(self._fire(name, fault), name=f"fault {name}")
            self._timers.add(timer)
            timer.add_done_callback(self._timers.discard)
            timer.add_done_callback(partial(internal_errors.record_task_error, self._store))

    async def _fire(self, name: str, fault: Document) -> None:
        spec = fault["spec"]
        await asyncio.sleep(max(0.0, fault["due"] - time.time()))
        act = self._actions.get(spec["kind"])
        if spec["kind"] in ONE_SHOT_KINDS:
            self._take(name, fault)
            if act:
                await act(spec)
            return
        self._note(name, fault)
        await self._run_lasting(act, spec)
        await asyncio.sleep(max(0.0, fault["due"] + spec["seconds"] - time.time()))
        self._store.put("fault", name, {**(self._store.get("fault", name) or fault), "left": 0})
        await self._run_lasting(act, spec)

    async def _run_lasting(self, act: FaultAction | None, spec: Document) -> None:
        """It has begun, or is over: whoever acts on it looks which."""
        self._notify_ssh()
        if act:
            await act(spec)

    def _notify_ssh(self) -> None:
        if self._on_ssh_change:
            self._on_ssh_change()


_OVERLOADED = ApiError(503, "The service is currently unavailable.")
_TOO_MANY = ApiError(429, "Too many requests: the rate limit is exceeded.")


def scripted_error(spec: Document) -> ApiError:
    """What a scripted answer says."""
    words = spec["message"] or f"Scripted fault: {spec['status']}"
    reason = spec["reason"]
    info = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason}] if reason else None
    return ApiError(spec["status"], words, details=info, retry_after=spec["retry_after"])


def creation_error(spec: Document, zone: str, capacity: str) -> ApiError:
    """A refusal to make a node, in the words that Google has for it."""
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
    return ApiError(spec["code"], spec["message"])
