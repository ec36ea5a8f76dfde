"""Cloud Storage over plain urllib: verified downloads and uploads, with retries.

On a machine without a pod, a bucket is a folder, named by its absolute path.
"""

import errno
import hashlib
import json
import math
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

from .fs import CHUNK_BYTES, AgentError, complain, file_size
from .worker_processes import uptime_seconds

CONTENT_TYPE = "text/plain; charset=utf-8"
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)
FRESH_VM_SECONDS = 480.0
"""A VM may be up before IAM shows the roles of its account everywhere, which takes up to seven minutes."""
FRESH_VM_PAUSE_SECONDS = 5.0


class TransferError(AgentError):
    """Failed transfer. `permanent` means that a retry would not help; `denied`, that the VM's account lacks a role."""

    def __init__(self, error: str, permanent: bool = False, denied: bool = False) -> None:
        super().__init__(error)
        self.permanent, self.denied = permanent, denied


def with_retries(
    act: Callable[[], object],
    sleep: Callable[[float], None] = time.sleep,
    uptime: Callable[[], float] = uptime_seconds,
) -> None:
    """Call `act` until it succeeds, fails permanently, or RETRY_SECONDS is exhausted.

    On a fresh VM, a missing role is not permanent.
    """
    pauses = iter(RETRY_SECONDS)
    while True:
        try:
            act()
            return
        except TransferError as error:
            waits_for_role = error.denied and uptime() < FRESH_VM_SECONDS
            pause = None if error.permanent and not waits_for_role else next(pauses, None)
            if waits_for_role and pause is None:
                pause = FRESH_VM_PAUSE_SECONDS
            if pause is None:
                raise
        sleep(pause)


def download_object(bucket: str, name: str, sha256: str, target: Path) -> None:
    """Stream an object into a file. Raises TransferError on failure, or if the content does not match `sha256`."""
    digest, what = hashlib.sha256(), f"the download of gs://{bucket}/{name}"
    with _transfer_errors(what), _open_object(bucket, name) as answer, target.open("wb") as file:
        while chunk := answer.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != sha256:
        raise TransferError(f"gs://{bucket}/{name} has SHA-256 {digest.hexdigest()}, expected {sha256}")


def read_object(bucket: str, name: str, target: Path) -> bool:
    """Download an object, whatever it holds, and return True; False if there is none. Raises TransferError."""
    with _transfer_errors(f"the download of gs://{bucket}/{name}"):
        try:
            with _open_object(bucket, name) as answer, target.open("wb") as file:
                shutil.copyfileobj(answer, file)
        except FileNotFoundError:
            return False
        except HTTPError as error:
            if error.code != 404:
                raise
            return False
    return True


def object_exists(bucket: str, name: str) -> bool:
    """Return whether the object exists; raise TransferError if the request fails."""
    if is_folder(bucket):
        return (Path(bucket) / name).is_file()
    place = f"{_place_of(bucket, name)}?fields=size"
    found = False

    def ask() -> None:
        nonlocal found
        with _transfer_errors(f"the lookup of gs://{bucket}/{name}"):
            try:
                with _storage_request(place, {}) as answer:
                    found = bool(answer.read())
            except HTTPError as error:
                if error.code != 404:
                    raise

    with_retries(ask)
    return found


def upload_file(path: Path, bucket: str, name: str) -> None:
    """Upload a file, which may grow meanwhile."""
    size = file_size(path)
    upload_stream(read_chunks(path, size), size, bucket, name)


def upload_stream(content: Iterable[bytes], size: int, bucket: str, name: str) -> str:
    """Upload an object of `size` bytes, replacing any older one; return its generation. Raises TransferError."""
    if is_folder(bucket):
        _write_object(content, size, Path(bucket) / name)
        return "file"
    headers = {"Content-Length": str(size), "Content-Type": CONTENT_TYPE}
    with _transfer_errors(f"the upload of gs://{bucket}/{name}"):
        place = f"/upload/storage/v1/b/{quote(bucket)}/o?uploadType=media&name={quote(name, safe='')}"
        with _storage_request(place, headers, content) as answer:
            made = json.load(answer)
        stored, generation = int(made["size"]), str(made["generation"])
    if stored != size:
        raise TransferError(f"gs://{bucket}/{name} has {stored} bytes, expected {size}")
    return generation


class GrowingObject:
    """A file that only grows, as an object: what is new goes there as an object of its own, which the bucket joins.

    The program does the same with its packages (trainer/telemetry/uploads.py), which the agent has not.

    Args:
        arrived: how much of the file is known to be there; -1: nothing is known.
    """

    def __init__(self, path: Path, bucket: str, name: str, arrived: int = -1) -> None:
        self._path, self._bucket, self._name = path, bucket, name
        self._size, self._generation = arrived, ""
        self._looked: tuple[float, int] = (0, 0)
        self._sender = uuid.uuid4().hex
        """What marks each object that this one has joined: after an answer that was lost, it is known again."""

    def has_only_grown(self, size: int) -> bool:
        """Return whether a file of now `size` bytes begins with what was sent, and with what was there when asked."""
        seen, crc = self._looked
        has_grown = size >= seen and self._crc(0, int(seen), 0) == crc
        self._looked = (size, self._crc(int(seen), size, crc)) if has_grown else (math.inf, 0)
        return has_grown

    def _crc(self, begin: int, end: int, crc: int) -> int:
        return reduce(lambda crc, chunk: zlib.crc32(chunk, crc), read_chunks(self._path, end - begin, begin), crc)

    def send(self, size: int) -> None:
        """Send the first `size` bytes: only what is new, if the file has only grown, and others left the object alone.

        Raises TransferError.
        """
        seen, crc = self._looked
        while seen <= size and self._generation and self._size < size and self._append(size):
            pass
        if seen > size or size != self._size:
            seen, crc = 0, 0
            self._generation = upload_stream(read_chunks(self._path, size), size, self._bucket, self._name)
            self._size = size
        self._looked = size, self._crc(int(seen), size, crc)

    def _append(self, size: int) -> bool:
        """Add the bytes up to `size` to what is there; False if that is not what was sent."""
        new, count = read_chunks(self._path, size, self._size), size - self._size
        if is_folder(self._bucket):
            path = Path(self._bucket) / self._name
            with _transfer_errors(f"the copy to {path}"):
                if file_size(path) != self._size:
                    return False
                with path.open("r+b") as file:
                    file.seek(self._size)
                    file.writelines(new)
            self._size = size
            return True
        # neither beside the file nor called like it, so that nobody takes it for one
        part = "/".join([*self._name.split("/")[:2], "parts", hashlib.sha256(self._name.encode()).hexdigest()[:16]])
        upload_stream(new, count, self._bucket, part)
        made = self._join(part)
        try:
            with _transfer_errors(f"the deletion of gs://{self._bucket}/{part}"):
                _storage_request(_place_of(self._bucket, part), {}, method="DELETE").close()
        except TransferError as error:  # the next part replaces it
            complain(str(error))
        if not made or not self._size < int(made["size"]) <= size:
            return False
        self._size, self._generation = int(made["size"]), str(made["generation"])
        return True

    def _join(self, part: str) -> dict[str, Any]:
        """Return the facts of the object that has the part, or what an earlier try had; empty if others wrote it."""
        sources = [{"name": self._name, "generation": self._generation}, {"name": part}]
        facts = {"contentType": CONTENT_TYPE, "metadata": {"sender": self._sender}}
        body = json.dumps({"sourceObjects": sources, "destination": facts}).encode()
        object_, what = _place_of(self._bucket, self._name), f"the upload of gs://{self._bucket}/{self._name}"
        headers = {"Content-Length": str(len(body)), "Content-Type": "application/json"}
        try:
            with (
                _transfer_errors(what),
                _storage_request(f"{object_}/compose?ifGenerationMatch={self._generation}", headers, [body]) as answer,
            ):
                return json.load(answer)
        except TransferError as error:
            if not error.permanent:
                raise
            problem = error
        with suppress(TransferError), _transfer_errors(what), _storage_request(object_, {}) as answer:
            found = json.load(answer)
            if found.get("metadata", {}).get("sender") == self._sender:
                return found
        complain(f"sent whole: {problem}")
        return {}


def is_folder(bucket: str) -> bool:
    return bucket.startswith("/")


def _place_of(bucket: str, name: str) -> str:
    return f"/storage/v1/b/{quote(bucket)}/o/{quote(name, safe='')}"


def _open_object(bucket: str, name: str) -> IO[bytes]:
    if is_folder(bucket):
        return (Path(bucket) / name).open("rb")
    return _storage_request(f"{_place_of(bucket, name)}?alt=media", {})


def _write_object(content: Iterable[bytes], size: int, path: Path) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with _transfer_errors(f"the copy to {path}"):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.writelines(content)
        if (stored := file_size(draft)) != size:
            raise TransferError(f"{path} has {stored} bytes, expected {size}")
        draft.replace(path)


def read_chunks(path: Path, size: int, begin: int = 0) -> Iterator[bytes]:
    """Yield `size` bytes of a file from `begin` on, or those that there are."""
    if size:
        with path.open("rb") as file:
            file.seek(begin)
            while size and (chunk := file.read(min(size, CHUNK_BYTES))):
                size -= len(chunk)
                yield chunk


@contextmanager
def _transfer_errors(what: str) -> Iterator[None]:
    """Convert every failure to a TransferError. Messages omit URLs, which may contain a token."""
    try:
        yield
    except HTTPError as error:
        permanent = error.code < 500 and error.code not in (408, 429)
        message = error.read(2000).decode(errors="replace").strip() or error.reason
        raise TransferError(f"{what} failed with HTTP {error.code}: {message}", permanent, error.code == 403) from error
    except (HTTPException, OSError, ValueError, KeyError) as error:
        is_of_name = isinstance(error, UnicodeEncodeError) or getattr(error, "errno", 0) == errno.ENAMETOOLONG
        shown = what.encode(errors="backslashreplace").decode()
        raise TransferError(f"{shown} was interrupted: {error!r}", is_of_name) from error


def _storage_request(
    place: str, headers: dict[str, str], data: Iterable[bytes] | None = None, method: str | None = None
) -> IO[bytes]:
    """Send a request to the JSON API with the VM's credentials; the root of an emulated worker needs none."""
    if base := os.environ.get("SLIPWAY_STORAGE_ROOT"):
        return open_url(base.rstrip("/") + place, headers, data, method)
    authorized = {**headers, "Authorization": f"Bearer {access_token()}"}
    return open_url(f"https://storage.googleapis.com{place}", authorized, data, method)


def access_token() -> str:
    """Return a token of the VM's account (https://cloud.google.com/compute/docs/access/authenticate-workloads)."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    account = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    with open_url(account, {"Metadata-Flavor": "Google"}) as answer:
        return json.load(answer)["access_token"]


def open_url(
    url: str, headers: dict[str, str], data: Iterable[bytes] | None = None, method: str | None = None
) -> IO[bytes]:
    """Open a URL directly, never through a proxy."""
    request = Request(url, data=data, headers=headers, method=method)  # noqa: S310 (the scheme is fixed)
    return build_opener(ProxyHandler({})).open(request, timeout=60)
