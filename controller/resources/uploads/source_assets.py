"""Assets from the Hugging Face Hub or from another bucket, file by file into the bucket."""

import fcntl
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypedDict
from urllib.parse import urlsplit

from conf.schema.assets import SourceAddress, parse_source
from conf.strict_json import dumps
from controller.context import Context, Progress
from controller.core.errors import CloudError
from controller.core.json_documents import Document, load_json, replace_file, type_problem
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ConflictError, ForbiddenError, NotFoundError
from controller.inputs.env_inputs import Vault
from controller.inputs.hub_sources import (
    HubAccess,
    SourceError,
    SourceFile,
    fetch_file,
    hub_endpoint,
    list_source,
    require_space,
)
from controller.inputs.resolved_assets import AssetFile
from controller.reconcile import Diff, ObservedResources, Scope
from controller.resources.uploads.bucket_assets import AssetInBucket, PodFetchedAsset, rewrite_object

THREADS = 4
"""Files at once, and so on disk: each is deleted as soon as it is in the bucket."""
MAX_NAME_BYTES = 900
"""Cloud Storage allows 1024 with the prefix: https://cloud.google.com/storage/docs/objects#naming."""
PINNED, MANIFEST = "source.json", "manifest.json"
HUB_TOKEN = "HF_TOKEN"  # noqa: S105 - a name


class PinnedFile(TypedDict):
    """A file of a source in `source.json`; see `SourceFile`."""

    name: str
    path: str
    size: int
    sha256: str | None
    blob: str


@dataclass(frozen=True)
class PinnedSource(Document):
    """`source.json` beside an asset's files, written before the first: a fetch that goes on takes the same files.

    Attributes:
        source: as in the config.
        revision: commit of the Hub; empty for a bucket.
        files: {name, path, size, sha256, blob} of each; of an object, `blob` is its generation.
    """

    source: str
    revision: str
    files: tuple[dict[str, Any], ...] = ()

    def source_files(self) -> list[SourceFile]:
        """Return the files. Raises SourceError for what Slipway did not write: others can write to a bucket."""
        for file in self.files:
            if problem := type_problem(file, PinnedFile, "a file") or name_problem(file["name"]):
                raise SourceError(f"{PINNED} of {self.source} is damaged: {problem}; delete the asset's folder")
        return [SourceFile(**{key: file[key] for key in SourceFile._fields}) for file in self.files]


@dataclass(frozen=True)
class SourceCopy:
    """Copies a source into the bucket. A process that goes on where another was killed fetches no large file again.

    Attributes:
        prefix: folder of the asset in the bucket.
        folder: folder on this machine for the files under way.
        sleep: waits before another try.
    """

    google: GoogleClient
    bucket: str
    prefix: str
    source: str
    folder: Path
    access: HubAccess
    sleep: Callable[[float], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def address(self) -> SourceAddress:
        return parse_source(self.source)

    def pin(self) -> PinnedSource:
        """Return the files of the source, as they were when the first fetch began.

        Raises SourceError if the source cannot be listed, or has no such file.
        """
        name = f"{self.prefix}/{PINNED}"
        try:
            return PinnedSource.from_json(load_json(self.google.download(self.bucket, name), name), name)
        except NotFoundError:
            pass
        except (KeyError, TypeError):
            raise SourceError(f"{name} is damaged; delete the asset's folder in gs://{self.bucket}") from None
        if self.address.kind == "bucket":
            commit, files = "", list_objects(self.google, self.address)
        else:
            commit, files = list_source(self.address, self.access)
        if problem := next((problem for file in files if (problem := name_problem(file.name))), ""):
            raise SourceError(f"{self.source}: {problem}")
        pinned = PinnedSource(self.source, commit, tuple(file._asdict() for file in files))
        try:
            self.google.upload(self.bucket, name, dumps(pinned.to_json(), indent=1).encode(), generation=0)
        except ConflictError:  # another process was faster, perhaps at another commit
            return self.pin()
        return pinned

    def run(self, pinned: PinnedSource, moved: Callable[[int], None]) -> None:
        """Copy the files that are missing, then write the manifest; `moved` is called with each number of bytes.

        Raises SourceError if a file cannot be fetched, or differs from what was listed.
        """
        with self._only_process():
            listed = self.google.objects(self.bucket, f"{self.prefix}/", "name,size")
            there = {item["name"]: int(item["size"]) for item in listed}
            known: dict[str, str] = json.loads(self._hashes_file.read_text()) if self._hashes_file.is_file() else {}
            hashes, missing = dict[str, str](), list[SourceFile]()
            for file in pinned.source_files():
                sha256 = file.sha256 or known.get(file.name)
                if sha256 is not None and there.get(f"{self.prefix}/{file.name}") == file.size:
                    hashes[file.name] = sha256
                else:
                    missing.append(file)
            largest = sorted((file.size for file in missing), reverse=True)[:THREADS]
            if self.address.kind != "bucket":
                require_space(self.folder, sum(largest), f"{self.source} with {THREADS} files at once")
            pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="fetch")
            try:
                jobs = [pool.submit(self._copy_file, pinned.revision, file, hashes, moved) for file in missing]
                for job in jobs:
                    job.result()
            finally:
                pool.shutdown(cancel_futures=True)
            manifest = dumps(hashes, indent=1, sort_keys=True) + "\n"
            self.google.upload(self.bucket, f"{self.prefix}/{MANIFEST}", manifest.encode())
            self._hashes_file.unlink(missing_ok=True)

    @property
    def _hashes_file(self) -> Path:
        return self.folder / "hashes.json"

    @contextmanager
    def _only_process(self) -> Iterator[None]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _copy_file(self, revision: str, file: SourceFile, hashes: dict[str, str], moved: Callable[[int], None]) -> None:
        target = f"{self.prefix}/{file.name}"
        if self.address.kind == "bucket":
            found = (self.address.repository, file.path)
            rewrite_object(self.google, found, (self.bucket, target), sourceGeneration=file.blob)
            moved(file.size)
            sha256 = file.sha256 or ""
        else:
            local = self.folder / "files" / file.name
            digests = fetch_file(self.address, revision, file, local, self.access, moved, self.sleep)
            session = self.folder / "sessions" / f"{digests.sha256}.url"
            stored = self.google.upload_file(self.bucket, target, local, session, lambda size: None)
            if stored.get("md5Hash") != digests.md5:
                raise CloudError(f"gs://{self.bucket}/{target} and {local} have different MD5 hashes; run `up` again")
            local.unlink()
            sha256 = digests.sha256
        with self._lock:
            hashes[file.name] = sha256
            replace_file(self._hashes_file, dumps(hashes))


def name_problem(name: str) -> str:
    """Return why a file of a source may not be written under its name; "" if it may."""
    parts = name.split("/")
    if not all(parts) or {".", ".."} & set(parts) or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        return f"{ascii(name)[:200]} is not the name of a file in a folder"
    return ""


@dataclass(frozen=True, kw_only=True)
class SourcedAsset(AssetInBucket):
    """An asset of the Hub or of another bucket, copied by this machine; objects are copied inside Cloud Storage."""

    kind: ClassVar[str] = "asset"
    scope: ClassVar[Scope] = "shared"

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        self.delete_replaced(context)
        copy = source_copy(self, context)
        pinned = copy.pin()
        progress = Progress(context, self.id, sum(file.size for file in pinned.source_files()))
        copy.run(pinned, progress.advance)


@dataclass(frozen=True, kw_only=True)
class PodFetchedSource(PodFetchedAsset):
    """An asset of the Hub, fetched by worker 0; this machine pins the commit and hashes the small files."""

    def downloads(self, context: Context) -> tuple[tuple[AssetFile, ...], dict[str, str]]:
        from huggingface_hub import hf_hub_url

        copy = source_copy(self, context)
        pinned, address, access = copy.pin(), copy.address, copy.access
        where = {"repo_type": address.kind, "revision": pinned.revision, "endpoint": access.endpoint}
        files = list[AssetFile]()
        for file in pinned.source_files():
            local, sha256 = copy.folder / "files" / file.name, file.sha256
            if sha256 is None:
                args = (access, lambda size: None, copy.sleep)
                sha256 = fetch_file(address, pinned.revision, file, local, *args).sha256
            files.append(AssetFile(file.name, local, sha256, hf_hub_url(address.repository, file.path, **where)))
        return tuple(files), {file.name: access.token for file in files if access.token}


def source_copy(asset: AssetInBucket, context: Context) -> SourceCopy:
    """Return the copy of an asset's source by this machine."""
    assert asset.content.source, "the plan gives assets with a source only"
    folder = context.state_dir / "fetches" / asset.content.prefix.rpartition("/")[2]
    access = hub_access(asset.vault)
    place = (asset.bucket, asset.content.prefix, asset.content.source, folder)
    return SourceCopy(context.google, *place, access, context.clock.sleep)


def hub_access(vault: Vault) -> HubAccess:
    """Return the Hub with the token of `env.secrets`, else with the one that `hf auth login` stored here."""
    from huggingface_hub import get_token

    return hub_with(vault.values().get(HUB_TOKEN) or get_token())


def hub_with(token: str | None) -> HubAccess:
    """Return the Hub with a token. Raises SourceError if that would be sent unencrypted."""
    endpoint = hub_endpoint()
    place = urlsplit(endpoint)
    if token and place.scheme != "https" and place.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise SourceError(f"HF_ENDPOINT: {endpoint} would get the token unencrypted; use https")
    return HubAccess(endpoint, token)


def list_objects(google: GoogleClient, address: SourceAddress) -> tuple[SourceFile, ...]:
    """Return the objects that match. Raises SourceError if there are none, or the caller may not list them."""
    from fsspec.utils import glob_translate

    matches = re.compile(glob_translate(address.pattern)).match
    where = f"gs://{address.repository}"
    literal = re.split(r"[*?\[]", address.pattern, maxsplit=1)[0]
    try:
        items = list(google.list_all("storage", "objects.list", "items", bucket=address.repository, prefix=literal))
    except NotFoundError:
        raise SourceError(f"{where}: there is no such bucket") from None
    except ForbiddenError as error:
        raise SourceError(f"{where}: you may not list it ({error.message})") from None
    found = [item for item in items if matches(item["name"]) and not item["name"].endswith("/")]
    if not found:
        raise SourceError(f"{where}: no object matches {address.pattern!r}")
    return tuple(
        SourceFile(
            item["name"].removeprefix(address.folder), item["name"], int(item["size"]),
            f"md5:{item['md5Hash']}" if "md5Hash" in item else f"crc32c:{item['crc32c']}", item["generation"],
        )
        for item in found
    )  # fmt: skip
