"""Client for Google's REST APIs.

Requests that are safe to repeat are retried with back-off; all other failures become `GoogleError`.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.proxies import settle_proxies, unusable_proxy
from controller.core.errors import ConfigError
from controller.core.this_process import TOLERANCE_SECONDS, Clock
from controller.gcp.credentials import NO_CREDENTIALS, absent_file
from controller.gcp.google_errors import (
    CHECK_NETWORK,
    UNREACHABLE,
    ConflictError,
    ForbiddenError,
    GoogleError,
    NoCredentialsError,
    NotFoundError,
    translate_errors,
    unlisted,
)
from controller.gcp.methods import is_of_pods, make_connection, method_of
from controller.gcp.outages import Retries

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

WAIT_TIMEOUT_SECONDS = 150.0
"""Timeout of `operations.wait`, which Compute Engine answers within two minutes; other requests have 60 s."""
RECORDED_PARAMETERS = frozenset(
    {"bucket", "name", "network", "object", "parent", "prefix", "project", "projectId", "region", "zone"}
)
"""Request parameters that name the resource. No other parameter is logged."""
PROPAGATION_SECONDS = 480.0
"""How long IAM may take to show a change everywhere, and an API that it is on.

Seven minutes "or longer": https://cloud.google.com/iam/docs/access-change-propagation.
"""
PRECONDITION = re.compile(r"if\w*match|etag|\w*fingerprint", re.IGNORECASE)
"""Parameters, and fields of a body or of its policy, with which a request states what it expects to be there."""
WRITER = "slipway-write"
"""Key of the custom metadata by which a conditional write of an object knows itself again."""
CHUNK = 16 << 20
"""Chunk size of an upload in bytes: the most that an interruption can lose."""


class GoogleClient:
    """Client with the method names of the discovery documents: `call("tpu", "projects.locations.nodes.get", name=...)`.

    An API version other than the one in `methods.VERSIONS` follows a colon: `call("serviceusage:v1beta1", ...)`. Raises
    ConfigError if Google cannot be reached through the proxies of the environment.
    """

    def __init__(self, credentials: Credentials | None, clock: Clock, roots: Mapping[str, str] | None = None) -> None:
        settle_proxies()
        if roots is None and (problem := unusable_proxy()):
            raise ConfigError(problem)
        self._credentials, self._clock, self._roots = credentials, clock, dict(roots or {})
        self._lock = threading.Lock()
        self._retries = Retries(clock)
        self._idle_connections: list[Any] = []
        self._unanswered: dict[tuple[str, str, int, bytes], str] = {}
        """Marks of conditional writes that may have arrived although no try was answered."""
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        self.unlisted: set[str] = set()  # what no list has shown although it may exist
        self.before_pod_write: Callable[[], object] = lambda: None
        """Called right before each request that changes a TPU; raises if another controller owns the pod."""
        self.wrap_connection: Callable[[Any, str], Any] = lambda http, method_id: http
        """Called with the connection of each request and its method id; returns the object to send the request with."""

    def add_listener(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Call a listener after each request, retries included. It never receives the body of a request or response.

        The listener runs in the thread that made the request and gets {time, api, method, of, status, seconds}; `of`
        holds the names in the URL.
        """
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[dict[str, Any]], None]) -> None:
        self._listeners.remove(listener)

    @property
    def has_credentials(self) -> bool:
        return self._credentials is not None

    def root(self, api: str) -> str:
        """Return the base URL of an API: `https://tpu.googleapis.com/`, or its address in the emulated cloud."""
        return self._roots.get(api, f"https://{api}.googleapis.com/")

    def call(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one request and return its JSON response.

        Raises:
            GoogleError: Google's error, after all useful retries; often a subclass such as NotFoundError.
            NoCredentialsError: there are no credentials.
        """
        answer = self._with_retries(self._execute_once, api, method, parameters)
        answer = answer if isinstance(answer, dict) else {}
        self.unlisted.update(unlisted(method, answer))
        return answer

    def change_pod(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one request as `call` does, with the lease confirmed right before every try.

        For methods that others use too; those of pods alone are always guarded.
        """
        answer = self._with_retries(self._execute_once, api, method, parameters, None, None, True)
        return answer if isinstance(answer, dict) else {}

    def tell_waits(self, tell: Callable[[str], object]) -> None:
        """Call a function with a message before each pause between two attempts that a user notices."""
        self._retries.tell = tell

    def hurry(self) -> None:
        """Send requests once to an API that has just failed all attempts: something billed is being ended."""
        self._retries.is_hurried = True

    def list_all(self, api: str, method: str, items: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        while True:
            answer = self.call(api, method, **parameters)
            yield from answer.get(items, [])
            if not answer.get("nextPageToken"):
                return
            parameters["pageToken"] = answer["nextPageToken"]

    def find(self, api: str, method: str, **parameters: Any) -> dict[str, Any] | None:
        """Send one request as `call` does; return None if what it names does not exist."""
        try:
            return self.call(api, method, **parameters)
        except NotFoundError:
            return None

    def objects(self, bucket: str, prefix: str, fields: str = "") -> list[dict[str, Any]]:
        """Return the objects of a bucket below a prefix, with some of their fields or all; none without a bucket."""
        only = {"fields": f"items({fields}),nextPageToken"} if fields else {}
        try:
            return list(self.list_all("storage", "objects.list", "items", bucket=bucket, prefix=prefix, **only))
        except NotFoundError:
            return []

    def read(self, bucket: str, name: str) -> bytes | None:
        """Return the content of an object; None if there is none."""
        try:
            return self.download(bucket, name)
        except NotFoundError:
            return None

    def download(self, bucket: str, name: str) -> bytes:
        """Return the content of an object; NotFoundError if there is none."""
        raw = self._with_retries(self._execute_once, "storage", "objects.get_media", {"bucket": bucket, "object": name})
        return raw if isinstance(raw, bytes) else str(raw).encode()

    def download_range(self, bucket: str, name: str, generation: str, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end` (exclusive) of one generation of an object; NotFoundError if it has gone."""
        parameters = {"bucket": bucket, "object": name, "generation": generation}
        headers = {"range": f"bytes={begin}-{end - 1}"}
        content = self._with_retries(self._execute_once, "storage", "objects.get_media", parameters, None, headers)
        return content if isinstance(content, bytes) else str(content).encode()

    def object_metadata(self, bucket: str, name: str) -> tuple[dict[str, Any], float]:
        """Return an object's metadata and the server's time, seconds since the epoch. Raises NotFoundError."""
        return self._call_dated("storage", "objects.get", bucket=bucket, object=name)

    def seconds_ahead(self, project: str) -> float:
        """Return by how many seconds this machine's clock is ahead of Google's, as the date of an answer tells."""
        asked = {"resource": project, "body": {"permissions": ["resourcemanager.projects.get"]}}
        date = self._call_dated("cloudresourcemanager", "projects.testIamPermissions", **asked)[1]
        return self._clock.was_ahead + self._clock.now() - date

    def _call_dated(self, api: str, method: str, **parameters: Any) -> tuple[dict[str, Any], float]:
        dates: list[str] = []
        answer = self._with_retries(self._execute_once, api, method, parameters, dates)
        return answer, parsedate_to_datetime(dates[-1]).timestamp()

    def upload(
        self,
        bucket: str,
        name: str,
        content: bytes,
        *,
        generation: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Write an object and return its metadata.

        With `generation`, write only if the object has it; 0: only if the object does not exist. Such a write that
        arrived although its answer was lost, and is repeated, is no conflict. `metadata` is custom metadata, at most 8
        KiB, which a listing of objects includes. Raises ConflictError if the object has another generation.
        """
        from googleapiclient.http import MediaInMemoryUpload

        media = MediaInMemoryUpload(content, mimetype="application/octet-stream")
        parameters: dict[str, Any] = {"bucket": bucket, "name": name, "media_body": media}
        if metadata is not None:
            parameters["body"] = {"metadata": dict(metadata)}
        if generation is None:
            return self._with_retries(self._execute_once, "storage", "objects.insert", parameters)
        write = (bucket, name, generation, content)
        writer = self._unanswered.pop(write, "") or uuid.uuid4().hex
        parameters["ifGenerationMatch"] = str(generation)
        parameters["body"] = {"metadata": {**(metadata or {}), WRITER: writer}}
        try:
            return self._with_retries(self._execute_once, "storage", "objects.insert", parameters)
        except ConflictError:
            with suppress(ForbiddenError, NotFoundError):
                there = self.call("storage", "objects.get", bucket=bucket, object=name)
                if there.get("metadata", {}).get(WRITER) == writer:
                    return there
            raise
        except BaseException:
            self._unanswered[write] = writer  # the caller may repeat it after a longer pause
            raise

    def upload_file(
        self, bucket: str, name: str, path: Path, session: Path, moved: Callable[[int], None]
    ) -> dict[str, Any]:
        """Write an object from a file in chunks. An interrupted upload resumes, even in a new process.

        https://cloud.google.com/storage/docs/performing-resumable-uploads

        The file `session` holds the upload's URL until it is done; `moved` is called with the number of bytes sent
        (negative: they must be sent again). Returns the object's metadata.
        """
        if path.stat().st_size <= CHUNK:
            content = path.read_bytes()
            answer = self.upload(bucket, name, content)
            moved(len(content))
            return answer
        session.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._with_retries(self._resume_upload, bucket, name, path, session, moved)

    def _resume_upload(self, bucket: str, name: str, path: Path, session: Path, moved: Callable[[int], None]) -> Any:
        from googleapiclient.errors import HttpError
        from googleapiclient.http import MediaFileUpload

        media = MediaFileUpload(str(path), mimetype="application/octet-stream", resumable=True, chunksize=CHUNK)
        sent, answer = 0, None
        told = self._recorded("storage", "objects.insert", {"bucket": bucket, "name": name})
        with (
            told,
            translate_errors(f"upload of gs://{bucket}/{name}"),
            self._connection("storage.objects.insert") as http,
        ):
            request = self._method("storage", "objects.insert")(bucket=bucket, name=name, media_body=media)
            if session.is_file():
                request.resumable_uri = session.read_text()
                request._in_error_state = True  # makes it ask first how far the transfer has come
            try:
                while answer is None:
                    self._clock.raise_if_interrupted()
                    _, answer = request.next_chunk(http=http)
                    if not session.is_file():
                        session.touch(mode=0o600)
                        session.write_text(request.resumable_uri)
                    now = path.stat().st_size if answer else request.resumable_progress
                    moved(now - sent)
                    sent = now
            except HttpError as error:
                moved(-sent)
                if error.resp.status not in (404, 410) or not session.is_file():
                    raise
                session.unlink()  # the session expires after a week
                raise GoogleError("upload", 503, "SESSION_EXPIRED", "the upload restarts") from None
            except BaseException:
                moved(-sent)
                raise
        session.unlink(missing_ok=True)
        return answer

    def _with_retries(self, act: Callable[..., Any], *arguments: Any) -> Any:
        if self._credentials is None:
            raise NoCredentialsError(absent_file() or NO_CREDENTIALS)
        return self._retries.call(act, *arguments, api=arguments[0] if act == self._execute_once else "")

    def _execute_once(
        self,
        api: str,
        method: str,
        parameters: dict[str, Any],
        dates: list[str] | None = None,
        headers: Mapping[str, str] | None = None,
        changes_pod: bool = False,
    ) -> Any:
        translated = translate_errors(f"{api} {method}", is_conditional=_has_precondition(parameters))
        with self._recorded(api, method, parameters), translated:
            request = self._method(api, method)(**parameters)
            request.headers.update(headers or {})
            request.add_response_callback(partial(self._hear_date, self._clock.boot_time(), dates))
            if changes_pod or (request.method != "GET" and is_of_pods(api, method)):
                self.before_pod_write()
            with self._connection(request.methodId) as http:
                answer = request.execute(http=http)
            if isinstance(answer, str) and answer.strip() and not method.endswith("_media"):
                # a login page or a proxy: the library takes any text for the answer, which would read as nothing there
                raise GoogleError(f"{api} {method}", 502, UNREACHABLE, f"the answer is not Google's; {CHECK_NETWORK}")
            return answer

    def _hear_date(self, asked: float, dates: list[str] | None, answer: Mapping[str, str]) -> None:
        """Set the clock by an answer, unless it came late: this machine may have slept meanwhile."""
        if "date" not in answer:
            return
        if dates is not None:
            dates.append(answer["date"])
        if self._clock.boot_time() - asked <= TOLERANCE_SECONDS:
            self._clock.correct(parsedate_to_datetime(answer["date"]).timestamp())

    @contextmanager
    def _recorded(self, api: str, method: str, parameters: Mapping[str, Any]) -> Iterator[None]:
        began, began_after, status = self._clock.now(), self._clock.boot_time(), 200
        try:
            yield
        except GoogleError as error:
            status = error.status
            raise
        finally:
            names = {key: parameters[key] for key in sorted(parameters) if key in RECORDED_PARAMETERS}
            seconds = round(self._clock.boot_time() - began_after, 3)
            call = {"time": round(began, 3), "api": api, "method": method, "of": names, "status": status}
            for listener in self._listeners:
                listener({**call, "seconds": seconds})

    def _method(self, api: str, method: str) -> Callable[..., Any]:
        """Return the function that makes requests of a method."""
        with self._lock:
            return method_of(api, method, self._roots.get(api.partition(":")[0]))

    @contextmanager
    def _connection(self, method_id: str) -> Iterator[Any]:
        """Yield a connection for one request, since httplib2 is not thread-safe. A failed connection is not reused."""
        import google_auth_httplib2

        if method_id.endswith("Operations.wait"):  # the only request that Google answers minutes later
            http = google_auth_httplib2.AuthorizedHttp(self._credentials, make_connection(WAIT_TIMEOUT_SECONDS))
            try:
                yield self.wrap_connection(http, method_id)
            finally:
                http.close()
            return
        with self._lock:
            http = self._idle_connections.pop() if self._idle_connections else None
        http = http or google_auth_httplib2.AuthorizedHttp(self._credentials, make_connection())
        try:
            yield self.wrap_connection(http, method_id)
        except BaseException:
            http.close()
            raise
        with self._lock:
            self._idle_connections.append(http)

    def token(self) -> str:
        """Return an access token valid for some minutes, for calls that do not go through this client.

        Raises:
            NoCredentialsError: there are no credentials, or Google rejects them.
            GoogleError: no token could be fetched, after all useful retries.
        """
        return self._with_retries(self._valid_token)

    def _valid_token(self) -> str:
        import google_auth_httplib2

        credentials: Any = self._credentials
        with self._lock, translate_errors("access token"):
            if not credentials.valid:
                with closing(make_connection()) as http:
                    credentials.refresh(google_auth_httplib2.Request(http))
            return credentials.token

    @property
    def service_account(self) -> str | None:
        """Return the address of the service account in use, or None for a user."""
        known = getattr(self._credentials, "service_account_email", None)
        return known if known and "@" in known else None

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        with self._lock:
            while self._idle_connections:
                self._idle_connections.pop().close()


def _has_precondition(parameters: Mapping[str, Any]) -> bool:
    body = parameters.get("body") or {}
    return any(PRECONDITION.fullmatch(name) for name in (*parameters, *body, *body.get("policy", ())))
