"""Google's REST APIs, through google-api-python-client; the only file that imports it.

Documents come from the client's own cache (no network); `rootUrl` is swapped for the emulated cloud, so production
and emulation share every line. Requests that may be sent again are, with back-off; the rest become `GoogleError`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.core.clock import Clock
from controller.core.errors import CloudError, ConfigError

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

VERSIONS = {
    "billingbudgets": "v1",
    "cloudbilling": "v1",
    "cloudresourcemanager": "v1",
    "compute": "v1",
    "iam": "v1",
    "secretmanager": "v1",
    "oauth2": "v2",
    "oslogin": "v1",
    "serviceusage": "v1",
    "storage": "v1",
    "tpu": "v2",
}
RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
ATTEMPTS = 6
PERMANENT_ERROR = re.compile(r"quota limit|quota '[^']*' exhausted|no more capacity", re.IGNORECASE)
"""Words of a 429 that sending the same request again in a moment does not change: its caller decides."""
RECORDED_PARAMETERS = frozenset(
    {"bucket", "name", "network", "object", "parent", "prefix", "project", "projectId", "region", "zone"}
)
"""Parameters of requests that say what they are about; no other goes on record."""
UNGUARDED_METHODS = frozenset({"getGuestAttributes", "patch"})
"""Methods of the TPU API that change nothing, or nothing that matters to others: who adds a key lets himself in."""
CHUNK = 16 << 20
"""Bytes of a chunk of an upload; what is lost when one is cut off."""
NO_CREDENTIALS = "no Google credentials: run `gcloud auth application-default login`, or use cloud=local"


class GoogleError(CloudError):
    """An answer of 400 or more. `reason` is Google's machine-readable word, e.g. RESOURCE_EXHAUSTED."""

    def __init__(self, what: str, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after
        super().__init__(f"{what}: {status} {reason}: {message}")

    @property
    def passes(self) -> bool:
        """May the same request succeed in a moment?"""
        return self.status in RETRIED_STATUSES and not (self.status == 429 and PERMANENT_ERROR.search(self.message))


class NotFoundError(GoogleError):
    """404: it does not exist."""


class ConflictError(GoogleError):
    """409 or 412: it exists already, or someone else changed it meanwhile."""


class ForbiddenError(GoogleError):
    """403: the caller may not."""


class ServiceDisabledError(GoogleError):
    """403: the API is not enabled in the project, or not everywhere yet; `service` is its name."""

    @property
    def service(self) -> str:
        found = re.search(r"[\w.-]+\.googleapis\.com", self.message)
        return found[0] if found else "the API"


class NoCredentialsError(ConfigError):
    """There is nothing to sign requests with."""


class GoogleClient:
    """Calls by the names of the discovery documents: `call("tpu", "projects.locations.nodes.get", name=...)`.

    Another version than that of `VERSIONS` follows a colon: `call("serviceusage:v1beta1", ...)`.
    """

    def __init__(self, credentials: Credentials | None, clock: Clock, roots: Mapping[str, str] | None = None) -> None:
        self._credentials, self._clock, self._roots = credentials, clock, dict(roots or {})
        self._services: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        self.before_pod_write: Callable[[], object] = lambda: None
        """Asked right before each request that changes a TPU; raises where another controller acts on the pod."""

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Tell of every request from now on, those that are sent again included: never of a body or an answer.

        The listener is called from whichever thread asks, with {time, api, method, of: the names in its URL, status,
        seconds}.
        """
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Tell that listener no more."""
        self._listeners.remove(listener)

    @property
    def signed_in(self) -> bool:
        """Is there somebody to act as?"""
        return self._credentials is not None

    def root(self, api: str) -> str:
        """Where an API is: `https://tpu.googleapis.com/`, or its place in the emulated cloud."""
        return self._roots.get(api, f"https://{api}.googleapis.com/")

    def call(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        """One request and its JSON answer.

        Raises:
            NotFoundError, Conflict, GoogleError: what Google answered, after the retries that make sense.
            NoCredentialsError: nobody to act as.
        """
        answer = self._send(api, method, parameters)
        return answer if isinstance(answer, dict) else {}

    def pages(self, api: str, method: str, items: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Every item of a list method, over all pages."""
        while True:
            answer = self.call(api, method, **parameters)
            yield from answer.get(items, [])
            if not answer.get("nextPageToken"):
                return
            parameters["pageToken"] = answer["nextPageToken"]

    def download(self, bucket: str, name: str) -> bytes:
        """The content of an object; NotFoundError if there is none."""
        content = self._send("storage", "objects.get_media", {"bucket": bucket, "object": name})
        return content if isinstance(content, bytes) else str(content).encode()

    def metadata(self, bucket: str, name: str) -> tuple[dict[str, Any], float]:
        """An object's metadata, and what time the server has: seconds since the epoch, the fraction cut off.

        Raises:
            NotFoundError: there is no such object.
        """
        dates: list[str] = []
        answer = self._with_retries(self._once, "storage", "objects.get", {"bucket": bucket, "object": name}, dates)
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
        """Write an object; returns its metadata.

        Args:
            generation: write only if the object has this generation now; 0: only if it does not exist.
            metadata: words of ours about it, 8 KiB at most, which a listing of objects shows.

        Raises:
            Conflict: another generation is there.
        """
        from googleapiclient.http import MediaInMemoryUpload

        media = MediaInMemoryUpload(content, mimetype="application/octet-stream")
        parameters: dict[str, Any] = {"bucket": bucket, "name": name, "media_body": media}
        if generation is not None:
            parameters["ifGenerationMatch"] = str(generation)
        if metadata is not None:
            parameters["body"] = {"metadata": dict(metadata)}
        return self._send("storage", "objects.insert", parameters)

    def upload_file(
        self, bucket: str, name: str, path: Path, session: Path, moved: Callable[[int], None]
    ) -> dict[str, Any]:
        """Write an object from a file, in chunks; a transfer that was cut off, even with its process, is gone on with.

        https://cloud.google.com/storage/docs/performing-resumable-uploads

        Args:
            session: file that keeps the address of the upload until it is done.
            moved: told of the bytes that have gone (negative: they have to be sent again).

        Returns:
            The object's metadata.
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
        told = self._told("storage", "objects.insert", {"bucket": bucket, "name": name})
        with told, _translate_errors(f"upload of gs://{bucket}/{name}"), self._connection() as http:
            request = self._service("storage").objects().insert(bucket=bucket, name=name, media_body=media)
            if session.is_file():
                request.resumable_uri = session.read_text()
                request._in_error_state = True  # so that it first asks how far the transfer has come
            try:
                while answer is None:
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
                session.unlink()  # it has expired, after a week
                raise GoogleError("upload", 503, "SESSION_EXPIRED", "the upload starts anew") from None
            except BaseException:
                moved(-sent)
                raise
        session.unlink(missing_ok=True)
        return answer

    def _send(self, api: str, method: str, parameters: dict[str, Any]) -> Any:
        return self._with_retries(self._once, api, method, parameters)

    def _with_retries(self, act: Callable[..., Any], *arguments: Any) -> Any:
        from tenacity import Retrying, retry_if_exception, stop_after_attempt

        if self._credentials is None:
            raise NoCredentialsError(NO_CREDENTIALS)
        retrying = Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=_backoff_seconds,
            retry=retry_if_exception(lambda e: isinstance(e, GoogleError) and e.passes),
            sleep=self._clock.sleep,
            reraise=True,
        )
        return retrying(act, *arguments)

    def _once(self, api: str, method: str, parameters: dict[str, Any], dates: list[str] | None = None) -> Any:
        with self._told(api, method, parameters), _translate_errors(f"{api} {method}"):
            node = self._service(api)
            *parents, leaf = method.split(".")
            for parent in parents:
                node = getattr(node, parent)()
            request = getattr(node, leaf)(**parameters)
            if dates is not None:
                request.add_response_callback(lambda answer: dates.append(answer["date"]))
            if api == "tpu" and request.method != "GET" and leaf not in UNGUARDED_METHODS:
                self.before_pod_write()
            with self._connection() as http:
                return request.execute(http=http)

    @contextmanager
    def _told(self, api: str, method: str, parameters: Mapping[str, Any]) -> Iterator[None]:
        """Tell the listeners of one request."""
        if not self._listeners:
            yield
            return
        began, status = self._clock.now(), 200
        try:
            yield
        except GoogleError as error:
            status = error.status
            raise
        finally:
            names = {key: parameters[key] for key in sorted(parameters) if key in RECORDED_PARAMETERS}
            seconds = round(self._clock.now() - began, 3)
            call = {"time": round(began, 3), "api": api, "method": method, "of": names, "status": status}
            for listener in self._listeners:
                listener({**call, "seconds": seconds})

    def _service(self, api: str) -> Any:
        from googleapiclient.discovery import build_from_document
        from googleapiclient.discovery_cache import get_static_doc

        with self._lock:
            if api not in self._services:
                name, _, version = api.partition(":")
                document = json.loads(str(get_static_doc(name, version or VERSIONS[name])))
                if name in self._roots:
                    document["rootUrl"] = document["mtlsRootUrl"] = self._roots[name]
                self._services[api] = build_from_document(document, credentials=self._credentials)
            return self._services[api]

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """A connection for one request, since httplib2 is not thread-safe; one that failed is not used again."""
        import google_auth_httplib2
        from googleapiclient.http import build_http  # a plain Http takes the 308 of a resumable upload for a redirect

        with self._lock:
            http = self._idle.pop() if self._idle else None
        http = http or google_auth_httplib2.AuthorizedHttp(self._credentials, build_http())
        try:
            yield http
        except BaseException:
            http.close()
            raise
        with self._lock:
            self._idle.append(http)

    def token(self) -> str:
        """An access token that is good for some minutes, for what is not called over REST.

        Raises:
            NoCredentialsError: nobody to act as.
        """
        import google_auth_httplib2
        from google.auth.exceptions import GoogleAuthError
        from googleapiclient.http import build_http

        credentials: Any = self._credentials
        if credentials is None:
            raise NoCredentialsError(NO_CREDENTIALS)
        with self._lock:
            try:
                if not credentials.valid:
                    credentials.refresh(google_auth_httplib2.Request(build_http()))
            except GoogleAuthError as error:
                raise NoCredentialsError(f"Google refused the credentials ({error}); log in again") from None
            return credentials.token

    @property
    def service_account(self) -> str | None:
        """The address of the service account that we act as, if we do."""
        known = getattr(self._credentials, "service_account_email", None)
        return known if known and "@" in known else None

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()


@contextmanager
def _translate_errors(what: str) -> Iterator[None]:
    """Everything that can go wrong in a request becomes an error of ours."""
    import httplib2
    from google.auth.exceptions import GoogleAuthError
    from googleapiclient.errors import HttpError

    try:
        yield
    except HttpError as error:
        raise _http_error(what, error) from None
    except GoogleAuthError as error:
        raise NoCredentialsError(f"Google refused the credentials ({error}); log in again") from None
    except (OSError, httplib2.HttpLib2Error) as error:
        raise GoogleError(what, 503, "UNREACHABLE", str(error)) from None


def _backoff_seconds(state: Any) -> float:
    """What the server asked for, else 1, 2, 4 ... seconds (https://cloud.google.com/storage/docs/retry-strategy)."""
    error = state.outcome.exception()
    return error.retry_after or min(2.0 ** (state.attempt_number - 1), 30.0)


def _http_error(what: str, error: Any) -> GoogleError:
    status = int(error.resp.status)
    try:
        body = json.loads(error.content)["error"]
    except (ValueError, KeyError, TypeError):
        body = {}
    details = body.get("errors") or [{}]
    reason = body.get("status") or details[0].get("reason") or "ERROR"
    kind = {403: ForbiddenError, 404: NotFoundError, 409: ConflictError, 412: ConflictError}.get(status, GoogleError)
    words = {detail.get("reason") for detail in [*details, *body.get("details", [])]}
    if status == 403 and words & {"SERVICE_DISABLED", "accessNotConfigured"}:
        kind = ServiceDisabledError
    return kind(what, status, reason, body.get("message", str(error)), _seconds(error.resp.get("retry-after", "")))


def _seconds(retry_after: str) -> float | None:
    """https://www.rfc-editor.org/rfc/rfc9110#field.retry-after in its form of seconds, the one that Google sends."""
    return float(retry_after) if retry_after.isdigit() else None
