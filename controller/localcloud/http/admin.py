"""The emulator's own API, under /emulator/: its state, request log, faults and settings."""

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from controller.localcloud.apis.objects import Objects
from controller.localcloud.apis.service import Service
from controller.localcloud.clock import HeldLoop
from controller.localcloud.delays import DELAYS
from controller.localcloud.faults.spec import parse_fault
from controller.localcloud.http.errors import ApiError
from controller.localcloud.settings import check_seconds

_VISIBLE_KINDS = (
    *("node", "queued", "worker", "compute", "service", "serviceAccount", "policy", "bucket", "operation"),
    *("fault", "mistake"),
)
_HIDDEN_KINDS = frozenset(
    {"boot", "counter", "faults", "hostkey", "inUse", "queuedHold", "queuedRefusal", "secretPayload"}
    | {"setting", "upload"}
)
"""Internals of the emulator."""


@dataclass(eq=False)
class Admin(Service):
    """Handlers of what the emulator's own API has: see `handle`."""

    objects: Objects
    stopped: asyncio.Event

    async def handle(self, request: web.Request, path: str) -> web.Response:
        """Answer a request; raise ApiError 404 for an unknown path, 400 for an invalid body."""
        match (request.method, path):
            case ("GET", "state"):
                return web.json_response(self._state())
            case ("GET", "requests"):
                return self._requests(request.query.get("after", "0"))
            case ("GET", "settings"):
                return self._update_settings({})
            case ("POST", "faults"):
                return self._register_faults(await _json_body(request, "key", "faults", "check"))
            case ("DELETE", "faults"):
                self.faults.clear()
                return web.json_response({})
            case ("POST", "settings"):
                return self._update_settings(await _json_body(request, *self.settings.as_json()))
            case ("GET", "delays"):
                return web.json_response({kind: [row.least, row.worst] for kind, row in DELAYS.items()})
            case ("POST", "clock"):
                return await self._move_clock(await _json_body(request, "seconds"))
            case ("POST", "stop"):
                self.stopped.set()
                return web.json_response({})
        known = "GET state, requests, settings, delays; POST settings, faults, clock, stop; DELETE faults"
        raise ApiError(404, f"No such method: {request.method} /emulator/{path}; known: {known}")

    def _state(self) -> dict[str, Any]:
        kinds = [*_VISIBLE_KINDS, *sorted(set(self.store.list_kinds()) - _HIDDEN_KINDS - set(_VISIBLE_KINDS))]
        state: dict[str, Any] = {kind: dict(self.store.items(kind)) for kind in kinds}
        state["objects"] = {name: self.objects.list_names(name) for name in state["bucket"]}
        state["settings"] = self.settings.as_json()
        return state

    def _requests(self, after: str) -> web.Response:
        if not after.isdigit():
            raise ApiError(400, f"after must be a sequence number, not {after!r}")
        lines = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in self.store.log_entries(int(after)))
        return web.Response(text=lines, content_type="application/jsonl")

    def _register_faults(self, body: dict[str, Any]) -> web.Response:
        key, faults = body.get("key"), body.get("faults")
        if not isinstance(key, str) or not key or not isinstance(faults, list):
            raise ApiError(400, 'cloud.faults: expected {"key": NAME, "faults": [...]}')
        if body.get("check"):  # validate only
            return web.json_response({"checked": len([parse_fault(spec) for spec in faults])})
        ready_since = min((boot["time"] for _, boot in self.store.items("boot")), default=None)  # the first of them
        return web.json_response({"registered": self.faults.register(key, faults, ready_since)})

    async def _move_clock(self, body: dict[str, Any]) -> web.Response:
        """Answer once so many seconds have passed; only where time is held they pass at once."""
        loop = asyncio.get_running_loop()
        if not isinstance(loop, HeldLoop):
            raise ApiError(400, "The time of this emulated cloud passes by itself; --held holds it")
        check_seconds("seconds", body.get("seconds"))
        await loop.move_on(body["seconds"])
        return web.json_response({})

    def _update_settings(self, body: dict[str, Any]) -> web.Response:
        self.settings.update(body)
        return web.json_response({**self.settings.as_json(), "pid": os.getpid()})


async def _json_body(request: web.Request, *known: str) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        raise ApiError(400, f"Invalid JSON: {error}") from error
    if not isinstance(body, dict) or not set(body) <= set(known):
        raise ApiError(400, f"Expected an object with {', '.join(known)}")
    return body
