"""HTTP server: admission, dispatch to the APIs, batches of calls, and the request log."""

import asyncio
import inspect
import ipaddress
import json
import re
import sqlite3
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.parser import BytesParser
from typing import Any, NoReturn
from urllib.parse import parse_qsl, urlsplit

from aiohttp import web

from controller.localcloud.apis.iap import PREFIX as IAP
from controller.localcloud.apis.iap import IapRelay
from controller.localcloud.apis.metadata import PREFIX as METADATA
from controller.localcloud.apis.metadata import MetadataServer
from controller.localcloud.apis.projects import EnabledApis
from controller.localcloud.faults.faults import BrokenConnection, Faults
from controller.localcloud.http.admin import Admin
from controller.localcloud.http.call import ApiCall, Handlers, select_fields, without_secrets
from controller.localcloud.http.discovery import Method, Validation, load_discovery
from controller.localcloud.http.errors import ApiError, internal_error, unauthenticated
from controller.localcloud.http.media import MediaTransfers
from controller.localcloud.iam import LAPTOP, Judge, Judgement, Tokens, are_equal
from controller.localcloud.store import Store, database_problem
from controller.localcloud.vms.processes import Client

IAP_CLIENT = "bot:iap-tunneler"
"""Origin header of Identity-Aware Proxy clients; no web page can send it."""


@dataclass(frozen=True)
class AdmittedRequest:
    """Admitted request. `path` lacks the prefix that carried the token; `base` is the root URL for this client."""

    client: str  # "laptop", or "UID/INDEX" of the worker that sent it
    path: str  # still percent-encoded, no leading slash
    root_url: str
    quota_project: str | None = None  # the project that the request counts against, if it names one


def admit(request: web.Request, token: str, tokens: Tokens, url: str) -> AdmittedRequest:
    """Check Host, Origin and the token, which is a Bearer token or part of the path.

    Paths: /t/TOKEN/... from the laptop, /w/TOKEN/UID/INDEX/... from a worker. Raises ApiError 401 or 403.
    """
    check_origin(request)
    path = request.raw_path.partition("?")[0].lstrip("/")
    parts = path.split("/")
    quota_project = request.headers.get("X-Goog-User-Project") or request.query.get("userProject")
    if parts[0] == "t" and len(parts) > 2 and are_equal(parts[1], token):
        return AdmittedRequest(LAPTOP, "/".join(parts[2:]), f"{url}t/{token}/", quota_project)
    if parts[0] == "w" and len(parts) > 4 and are_equal(parts[1], token):
        worker = f"{parts[2]}/{parts[3]}"
        return AdmittedRequest(worker, "/".join(parts[4:]), f"{url}w/{token}/{worker}/", quota_project)
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise unauthenticated("CREDENTIALS_MISSING")
    return AdmittedRequest(tokens.identify(bearer.strip()), path, url, quota_project)


def check_origin(request: web.Request) -> None:
    """Keep web pages out (DNS rebinding, cross-site requests). Raises ApiError 403."""
    host = request.headers.get("Host", "")
    if not _is_loopback(host):
        raise ApiError(403, f"Host {host!r} is not a loopback address")
    if request.headers.get("Origin", IAP_CLIENT) != IAP_CLIENT:
        raise ApiError(403, "Requests from web pages are refused")


def _is_loopback(host: str) -> bool:
    """Return whether a host, with or without a port, is loopback. Anyone can own a name such as 127.example.com."""
    name = re.sub(r":\d*$", "", host)
    try:
        return name == "localhost" or ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


_MEDIA_PREFIXES = ("resumable/upload/", "upload/", "download/")  # paths of object contents
_TOKEN_PATH = "/token"  # noqa: S105 - of the OAuth server
# Methods that use POST but change nothing.
_READ_VERBS = ("getIamPolicy", "getEffectiveOrgPolicy", "testIamPermissions", "getGuestAttributes", "wait")


@dataclass(eq=False)
class Server:
    """Answers every request. `last_request` is the time of the latest API request."""

    store: Store
    handlers: Handlers
    media: MediaTransfers
    metadata: MetadataServer
    iap: IapRelay
    admin: Admin
    faults: Faults
    judge: Judge
    tokens: Tokens
    enabled_apis: EnabledApis
    url: str
    token: str
    last_request: float = field(default_factory=time.monotonic)
    peers: deque[Client] = field(default_factory=lambda: deque(maxlen=16))
    """Where the laptop's latest requests came from, newest last."""
    _validation: Validation = field(default_factory=lambda: Validation(load_discovery()))

    def application(self) -> web.Application:
        """Return an application with a single route: the discovery documents do the routing."""
        application = web.Application(client_max_size=1 << 40)
        application.router.add_route("*", "/{path:.*}", self._handle)
        return application

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.last_request = time.monotonic()
        path = "?"
        try:
            if request.path == _TOKEN_PATH:
                return await self._issue_token(request)
            admitted = admit(request, self.token, self.tokens, self.url)
            path = admitted.path
            if path.startswith("emulator/"):
                return await self.admin.handle(request, path.removeprefix("emulator/"))
            if admitted.client == LAPTOP and request.transport is not None:
                client, own = (request.transport.get_extra_info(name)[1] for name in ("peername", "sockname"))
                self.peers.append(Client(client, own, time.time()))
            if path.startswith(METADATA):
                uid, _, index = admitted.client.partition("/")
                return await self.metadata.handle(request, path, uid, int(index or -1))
            if path == IAP:
                return await self.iap.handle(request, self._judgement(admitted.client, "iap"))
            if path.startswith("batch"):
                return await self._batch(request, admitted)
            return await self._handle_api(request, admitted)
        except ApiError as refusal:
            return _error_response(refusal)
        except ConnectionResetError:
            raise  # the client has disconnected
        except sqlite3.DatabaseError as error:
            return _error_response(ApiError(500, database_problem(self.store.folder, error)))
        except Exception as mistake:
            # The path lacks the prefix that holds the token.
            self.store.record_error(f"{request.method} /{path}", mistake)
            return _error_response(internal_error(mistake))

    async def _handle_api(self, request: web.Request, admitted: AdmittedRequest) -> web.StreamResponse:
        """Handle one API call, from its log entry to its answer."""
        surface = next((name for name in _MEDIA_PREFIXES if admitted.path.startswith(name)), "")
        path = admitted.path.removeprefix(surface)
        # Upload chunks also use PUT and DELETE, which the documents do not declare.
        http = "POST" if "upload" in surface else request.method
        body = None if surface else await _json_body(request)
        query = {name: ",".join(request.query.getall(name)) for name in request.query}  # so REST encodes lists
        return await self._dispatch(http, path, query, body, admitted, request, surface)

    async def _dispatch(
        self,
        http: str,
        path: str,
        query: Mapping[str, str],
        body: Any,
        admitted: AdmittedRequest,
        request: web.Request | None = None,
        surface: str = "",
    ) -> web.StreamResponse:
        entry = {"time": time.time(), "method": request.method if request else http, "path": f"/{surface}{path}"}
        entry |= {"client": admitted.client, "query": without_secrets(query), "api": None, "call": None}
        entry |= {"mutating": http not in ("GET", "HEAD"), "body": _redact(body)}
        started = time.perf_counter()
        status, met = 500, None
        try:
            self.faults.on_request()
            named = f"?name={query['name']}" if "upload" in surface and "name" in query else ""
            met = self.faults.intercept(admitted.client == LAPTOP, http, f"/{surface}{path}{named}")
            if request is not None and met and met.phase != "answer":
                await self._break_connection(request, met)
            found = load_discovery().match(http, path)
            if found is None:
                raise ApiError(404, f"No such method: {http} /{path}")
            method, parameters = found
            entry |= {"api": method.api, "call": method.name}
            entry["mutating"] = entry["mutating"] and not method.name.endswith(_READ_VERBS)
            self.enabled_apis.check(method.api)
            judgement = self._judgement(admitted.client, method.api)
            entry["permissions"] = judgement.used
            judgement.admit(method, parameters, admitted.quota_project)
            self._validation.check_query(method, query)
            call = ApiCall(method, parameters, query, body or {}, admitted.root_url, judgement)
            self.faults.check_policies(call)
            try:
                response = await self._answer(request, call, body, surface)
            except ApiError as refusal:
                if refusal.code == 404 and method.api == "storage":
                    judgement.hide_absent(method, parameters)
                raise
            if "upload" in surface:
                entry["body"] = _response_summary(response)
            status = response.status
            if request is not None and met:
                await self._break_connection(request, met)
            return response
        except ApiError as refusal:
            status = refusal.code
            if request is not None and met:  # a refusal is lost as well
                await self._break_connection(request, met)
            return _error_response(refusal)
        finally:
            seconds = round(time.perf_counter() - started, 6)
            self.store.append_log({**entry, "status": status, "seconds": seconds})

    async def _answer(self, request: web.Request | None, call: ApiCall, body: Any, surface: str) -> web.StreamResponse:
        if request is None or not (surface or call.query.get("alt") == "media"):
            return await self._json_call(call.method, call, body)
        if call.method.key == "storage.v1:objects.insert" and "upload" in surface:
            return await self.media.upload(request, call)
        if call.method.key == "storage.v1:objects.get" and "upload" not in surface:
            return await self.media.download(request, call)
        raise ApiError(400, f"{call.method.name} has no media")

    def _judgement(self, client: str, api: str) -> Judgement:
        return Judgement(self.judge, self.judge.caller(client), api)

    async def _issue_token(self, request: web.Request) -> web.Response:
        """Answer https://oauth2.googleapis.com/token, where a user's refresh token gets access tokens."""
        check_origin(request)
        if met := self.faults.intercept(True, request.method, _TOKEN_PATH):
            await self._break_connection(request, met)
        form = {name: str(value) for name, value in (await request.post()).items()}
        return web.json_response(self.tokens.refresh(form))

    async def _break_connection(self, request: web.Request, how: BrokenConnection) -> NoReturn:
        """Break the connection; the client cannot know whether the request took effect."""
        await asyncio.sleep(how.stall_seconds)
        if how.phase == "upload":
            await self.media.read_half(request)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("a scripted fault")

    async def _json_call(self, method: Method, call: ApiCall, body: Any) -> web.Response:
        handler = self.handlers.get(method.key)
        if handler is None:
            raise ApiError(501, f"The emulated cloud does not implement {method.document} {method.name}")
        call = replace(call, body=self._validation.check_body(method, body) or {})
        with self.store.transaction():
            result = handler(call)
        if inspect.isawaitable(result):
            result = await result
        if method.answer is None:
            return web.Response(status=204)
        result = {**method.kind, **result}
        return web.json_response(select_fields(result, call.query["fields"]) if "fields" in call.query else result)

    async def _batch(self, request: web.Request, admitted: AdmittedRequest) -> web.Response:
        """Handle several calls in one multipart request (https://cloud.google.com/storage/docs/batch)."""
        prefix = admitted.root_url.removeprefix(self.url)  # clients repeat it in every part
        answers = []
        for name, http, path, query, body in parse_batch(request.headers.get("Content-Type", ""), await request.read()):
            answers.append((name, await self._dispatch(http, path.removeprefix(prefix), query, body, admitted)))
        return render_batch(answers)


async def _json_body(request: web.Request) -> Any:
    text = await request.read()
    return None if request.method in ("GET", "DELETE") else _parsed(text)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except ValueError as error:
        raise ApiError(400, f"Invalid JSON payload received. {error}") from error


def _error_response(refusal: ApiError) -> web.Response:
    if refusal.code == 304:
        return web.Response(status=304)
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    if refusal.raw is not None:
        return web.Response(text=refusal.raw, status=refusal.code, headers=headers)
    return web.json_response(refusal.body(), status=refusal.code, headers=headers)


def _redact(body: Any) -> Any:
    """Return the body for the log: metadata (such as startup scripts) may hold secrets; SSH keys are public."""
    if isinstance(body, list):
        return [_redact(item) for item in body]
    if not isinstance(body, dict):
        return body
    shown = {key: "..." if key == "payload" else _redact(value) for key, value in body.items()}  # value of a secret
    if isinstance(metadata := body.get("metadata"), dict):
        shown["metadata"] = {name: text if name == "ssh-keys" else "..." for name, text in metadata.items()}
    return shown


def _response_summary(response: web.StreamResponse) -> dict[str, str]:
    """Return the log summary of an uploaded object, once it is complete."""
    content = response.body if isinstance(response, web.Response) and response.status == 200 else None
    made = json.loads(content) if isinstance(content, bytes) else {}
    return {key: made[key] for key in ("name", "size", "md5Hash") if key in made}


def parse_batch(content_type: str, body: bytes) -> list[tuple[str, str, str, dict[str, str], Any]]:
    """Return Content-ID, HTTP method, percent-encoded path, query and JSON of each call, in order.

    Raises ApiError 400 if the body is not a batch.
    """
    message = BytesParser().parsebytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body)
    if not message.is_multipart():
        raise ApiError(400, "A batch is a multipart/mixed body")
    parts = []
    for item in message.walk():
        if item.is_multipart():
            continue
        payload = item.get_payload(decode=True)
        assert isinstance(payload, bytes)
        head, _, content = payload.replace(b"\r\n", b"\n").partition(b"\n\n")
        text = head.decode().partition("\n")[0].split()
        if len(text) < 2:
            raise ApiError(400, "A part of a batch starts with METHOD PATH")
        url = urlsplit(text[1])  # Google's clients send a path; some send the whole URL
        called = (text[0], url.path.lstrip("/"), dict(parse_qsl(url.query)), _parsed(content))
        parts.append((item.get("Content-ID", ""), *called))
    return parts


def render_batch(answers: Sequence[tuple[str, web.StreamResponse]]) -> web.Response:
    """Render the multipart/mixed answer: an HTTP response per call, its Content-ID prefixed with "response-"."""
    boundary = f"batch_{uuid.uuid4().hex}"
    chunks = []
    for content_id, answer in answers:
        body = answer.body if isinstance(answer, web.Response) and isinstance(answer.body, bytes) else b""
        head = [f"--{boundary}", "Content-Type: application/http"]
        if content_id:
            head.append(f"Content-ID: <response-{content_id.strip('<>')}>")
        head += ["", f"HTTP/1.1 {answer.status} {answer.reason}"]
        head += ["Content-Type: application/json; charset=UTF-8", f"Content-Length: {len(body)}", "", ""]
        chunks += ["\r\n".join(head).encode(), body, b"\r\n"]
    chunks.append(f"--{boundary}--\r\n".encode())
    headers = {"Content-Type": f"multipart/mixed; boundary={boundary}"}
    return web.Response(body=b"".join(chunks), headers=headers)
