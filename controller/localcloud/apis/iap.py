"""Identity-Aware Proxy: SSH to a worker inside a WebSocket, as opened by gcloud and the controller.

Each message is a 2-byte tag and its payload: https://cloud.google.com/iap/docs/tcp-forwarding-overview
"""

import asyncio
import contextlib
import re
import secrets
import socket
import struct
import time

from aiohttp import WSMsgType, web

from conf.schema.cloud import permissions_of_method
from controller.localcloud.apis.networks import IAP_RANGE
from controller.localcloud.apis.service import Service
from controller.localcloud.http.call import PROJECT, without_secrets
from controller.localcloud.http.errors import ApiError
from controller.localcloud.iam import PROJECT_RESOURCE, Judgement
from controller.localcloud.vms.image import EmulatedWorker

PREFIX = "iap/v4/connect"
_SUBPROTOCOL = "relay.tunnel.cloudproxy.app"
_CONNECTED, _DATA, _ACK = 1, 4, 7
_MAX_FRAME_BYTES = 16384
_NO_BACKEND, _NOT_AUTHORIZED, _NOT_FOUND = 4003, 4033, 4047
_VM_NAME = re.compile(r"t1v-n-(\d+)-w-(\d+)")


class _TunnelError(Exception):
    """Close code and message."""


class IapRelay(Service):
    """Relays to port 22 of workers whose firewall rules admit IAP, with or without an external address."""

    async def handle(self, request: web.Request, judgement: Judgement) -> web.StreamResponse:
        """Serve a tunnel until either side closes it. Refusals are WebSocket close codes, as in IAP."""
        entry = {"time": time.time(), "method": "GET", "path": f"/{PREFIX}", "api": "iap"}
        entry |= {"client": judgement.caller.client, "permissions": judgement.used}
        entry |= {"call": "connect", "query": without_secrets(request.query), "mutating": False, "body": None}
        tunnel = web.WebSocketResponse(protocols=(_SUBPROTOCOL,), autoping=True, compress=False)
        await tunnel.prepare(request)
        try:
            worker = self._find(request, judgement)
        except _TunnelError as refusal:
            code, message = refusal.args
            await tunnel.close(code=code, message=message.encode())
            return tunnel
        finally:
            self.store.append_log({**entry, "status": 101, "seconds": 0.0})
        sid = secrets.token_hex(8).encode()
        await tunnel.send_bytes(struct.pack(">HI", _CONNECTED, len(sid)) + sid)
        ours, theirs = socket.socketpair()
        self.workers.serve(worker, theirs)
        await _relay(tunnel, ours)
        return tunnel

    def _find(self, request: web.Request, judgement: Judgement) -> EmulatedWorker:
        try:
            for permission in permissions_of_method("iap", "connect"):
                judgement.require(permission, PROJECT_RESOURCE)
        except ApiError:
            raise _TunnelError(_NOT_AUTHORIZED, "Not authorized") from None
        query = request.query
        zone, name = query.get("zone", ""), query.get("instance", "")
        worker = self._worker_called(zone, name) if query.get("project") == PROJECT else None
        vm = self.workers.vms.of(worker) if worker else None
        if worker is None or vm is None or not vm.running or vm.zone != zone:
            raise _TunnelError(_NOT_FOUND, "Failed to lookup instance")
        admits = vm.opens <= time.time() and self.workers.admits(vm, IAP_RANGE)
        refuses = not admits or self.faults.affects(worker.index, "ssh_refused")
        if query.get("port") != "22" or query.get("interface") != "nic0" or refuses:
            raise _TunnelError(_NO_BACKEND, "failed to connect to backend")
        return worker

    def _worker_called(self, zone: str, name: str) -> EmulatedWorker | None:
        """Return the worker with this VM name: that of a node's VM, or of an instance."""
        if found := _VM_NAME.fullmatch(name):
            workers = self.workers.vms.workers_of(found[1])
            return next((worker for worker in workers if worker.index == int(found[2])), None)
        return self.workers.vms.of_instance(f"projects/{PROJECT}/zones/{zone}/instances/{name}")


async def _relay(tunnel: web.WebSocketResponse, ours: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=ours)
    back = asyncio.create_task(_forward_output(tunnel, reader))
    received = acknowledged = 0
    try:
        async for message in tunnel:
            if message.type is not WSMsgType.BINARY or struct.unpack_from(">H", message.data)[0] != _DATA:
                continue
            (length,) = struct.unpack_from(">I", message.data, 2)
            writer.write(message.data[6 : 6 + length])
            await writer.drain()
            received += length
            if received - acknowledged > 2 * _MAX_FRAME_BYTES:
                await tunnel.send_bytes(struct.pack(">HQ", _ACK, received))
                acknowledged = received
    except (OSError, RuntimeError):
        pass  # one side has disconnected
    finally:
        back.cancel()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _forward_output(tunnel: web.WebSocketResponse, reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # one side has disconnected
        while data := await reader.read(_MAX_FRAME_BYTES):
            await tunnel.send_bytes(struct.pack(">HI", _DATA, len(data)) + data)
        await tunnel.close()
