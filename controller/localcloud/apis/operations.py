"""Long-running operations: they take time, survive a restart, and end with an effect or an error."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from controller.localcloud.delays import operation_kind
from controller.localcloud.http.call import timestamp
from controller.localcloud.http.errors import ApiError, internal_error
from controller.localcloud.settings import Settings
from controller.localcloud.store import Document, Store

BULK_INSERT = "bulkInsert"
"""Verb of what a group of VMs does by itself; its user may ask for something else meanwhile."""

# What an operation does when it is due. It gets the target's name and must be idempotent: a killed emulator runs it
# again. Returns the seconds until it should be retried, or None when done.
Effect = Callable[[str], Awaitable[float | None]]

_RETENTION_SECONDS = 24 * 3600.0


class Operations:
    """Operations of all APIs, by name, e.g. `projects/p/locations/z/operations/operation-7`."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._effects: Mapping[str, Effect] = {}
        self._on_undone: Callable[[], None] = lambda: None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def resume(self, effects: Mapping[str, Effect], undone: Callable[[], None]) -> None:
        """Register effects by name, reschedule unfinished operations of an earlier process, and drop old ones.

        `undone` is called after a target is restored to its state before an operation.
        """
        self._effects = effects
        self._on_undone = undone
        for name, operation in self._store.items("operation"):
            if not operation["done"]:
                self._schedule(name, operation["due"])
            elif operation["ended"] < time.time() - _RETENTION_SECONDS:
                self._store.delete("operation", name)

    def begin(
        self,
        verb: str,
        target: str,
        effect: str | None = None,
        before: tuple[str, Document] | None = None,
        seconds: float = 0.0,
        delay: str = "",
        parent: str = "",
    ) -> Document:
        """Start an operation on `target` and return its document; `effect` runs when it ends.

        `before` is the target's kind and previous document, restored if a bug of the emulator makes the effect fail.
        `seconds`: how much longer than others it takes. `delay`: its row of the delays, if not that of its verb.
        `parent`: where it is listed, if not where its target is.
        """
        now = time.time()
        number = self._store.next_number("operation", 10**6)
        operation = {
            "name": f"{parent or target.rsplit('/', 2)[0]}/operations/operation-{number}",
            "number": number,
            "verb": verb,
            "target": target,
            "effect": effect,
            "before": before,
            "created": now,
            "due": now + self._settings.delay(delay or operation_kind(verb, target), target) + seconds,
            "done": False,
        }
        self._store.put("operation", operation["name"], operation)
        self._schedule(operation["name"], operation["due"])
        return operation

    def get(self, name: str) -> Document:
        """Return the stored document; raise ApiError 404 if there is none."""
        return self._store.require("operation", name, f"Operation '{name}' was not found")

    def list_under(self, parent: str) -> list[Document]:
        return [operation for _, operation in self._store.items("operation", f"{parent}/operations/")]

    def current_verb(self, target: str) -> str:
        """Return the verb of the operation in progress on exactly this resource, such as `insert`, or ""."""
        verbs = (operation["verb"] for operation in self._unfinished() if operation["target"] == target)
        return next((verb for verb in verbs if verb != BULK_INSERT), "")

    def cancel_for(self, target: str, verb: str = "") -> None:
        """Cancel the operations in progress, or those of one verb, on a resource that is being deleted."""
        for operation in self._unfinished():
            if operation["target"] == target and verb in ("", operation["verb"]):
                self._finish(operation["name"], ApiError(499, f"Operation on {target} was cancelled").rpc_status())

    def _unfinished(self) -> list[Document]:
        scheduled = (self._store.get("operation", name) for name in self._tasks)
        return [operation for operation in scheduled if operation and not operation["done"]]

    async def wait(self, name: str, seconds: float) -> Document:
        """Return the operation once it has ended, or as it stands after `seconds`."""
        if (task := self._tasks.get(name)) is not None:
            await asyncio.wait([task], timeout=seconds)
        return self.get(name)

    async def close(self) -> None:
        """Cancel all timers; unfinished operations stay in the store for the next process."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _schedule(self, name: str, due: float) -> None:
        task = asyncio.get_running_loop().create_task(self._run(name, due))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _run(self, name: str, due: float) -> None:
        await asyncio.sleep(max(0.0, due - time.time()))
        error = None
        operation = self._store.get("operation", name)
        if operation is None:
            return  # the request that began it was eventually rejected
        try:
            while not operation["done"] and operation["effect"]:
                again = await self._effects[operation["effect"]](operation["target"])
                if again is None:
                    break
                await asyncio.sleep(again)
                operation = self.get(name)
        except ApiError as refusal:
            error = refusal.rpc_status()
        except Exception as mistake:
            self._store.record_error(name, mistake)
            if operation["before"]:
                kind, document = operation["before"]
                self._store.put(kind, operation["target"], document)
                self._on_undone()
            error = internal_error(mistake).rpc_status()
        self._finish(name, error)

    def _finish(self, name: str, error: Document | None) -> None:
        operation = self.get(name)
        if operation["done"]:
            return
        ended = {"done": True, "ended": time.time()} | ({"error": error} if error else {})
        self._store.put("operation", name, {**operation, **ended})


def as_longrunning(operation: Document, *, response: Document | None = None, short_name: bool = False) -> Document:
    """Render as google.longrunning.Operation (tpu, serviceusage), with `response` on success."""
    metadata: Document = {"createTime": timestamp(operation["created"]), "target": operation["target"]}
    metadata |= {"verb": operation["verb"], "apiVersion": "v2"}
    name = operation["name"]
    if short_name:
        name, metadata = "operations/" + name.rpartition("/")[2], {"resourceNames": [operation["target"]]}
    answer: dict[str, Any] = {"name": name, "metadata": metadata}
    if operation["done"]:  # proto3 JSON leaves out what is false
        answer["done"] = True
        metadata |= {} if short_name else {"endTime": timestamp(operation["ended"])}
        if "error" in operation:
            answer["error"] = {key: operation["error"][key] for key in ("code", "message")}
        else:
            answer["response"] = response or {}
    return answer
