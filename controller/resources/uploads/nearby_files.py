"""What a VM near the bucket is told to fetch: files of the Hugging Face Hub, and files of the web."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from controller.agent.protocol import FetchAssetRequest
from controller.context import Context
from controller.core.errors import CloudError
from controller.inputs.assets import AssetFile, manifest_text
from controller.inputs.hub import SourceFile
from controller.inputs.web import DownloadError, FoundFile, find_open_file, token_for, with_patience
from controller.progress import Progress
from controller.reconcile.resource import ObservedResources
from controller.resources.uploads.assets import UploadedAsset
from controller.resources.uploads.nearby import Errand, NearbyAsset
from controller.resources.uploads.sources import (
    THREADS,
    PinnedSource,
    SourceCopy,
    SourcedAsset,
    manifest_of,
    source_copy,
)

UNKNOWN_BYTES = 50 * 10**9
"""Room on the VM's disk for a file whose server does not tell its size."""


@dataclass(frozen=True, kw_only=True)
class NearbySource(NearbyAsset, SourcedAsset):
    """An asset of the Hub."""

    def errand(self, context: Context, observed: ObservedResources, progress: Progress) -> Errand:
        copy = source_copy(self, context)
        return _SourceErrand(copy, copy.pin(), progress)

    def fetch_here(self, context: Context) -> None:
        self.copy_source(context)


@dataclass
class _SourceErrand:
    """Files of the Hub. This machine has the token, and the Hub sends small files itself: the VM gets the rest."""

    copy: SourceCopy
    pinned: PinnedSource
    progress: Progress
    hashes: dict[str, str] = field(default_factory=dict)
    left: list[SourceFile] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.pinned.source_files())

    def prepare(self) -> list[int] | None:
        self.hashes, self.left = self.copy.run_small(self.pinned, self.progress.advance)
        if not self.left:  # a process was killed right before the end
            self.copy.run(self.pinned, self.progress.advance)
            return None
        return [file.size for file in self.left]

    def orders(self) -> FetchAssetRequest:
        with ThreadPoolExecutor(max_workers=THREADS) as pool:
            addresses = list(pool.map(lambda file: self.copy.signed_address(self.pinned.revision, file), self.left))
        files = {f.name: {"url": url, "sha256": f.sha256 or ""} for f, url in zip(self.left, addresses, strict=True)}
        everything = {**self.hashes, **{name: file["sha256"] for name, file in files.items()}}
        return {
            "bucket": self.copy.bucket,
            "prefix": self.copy.prefix,
            "files": files,
            "manifest": manifest_of(everything),
        }

    def finish(self) -> None:
        self.copy.forget_hashes()


@dataclass(frozen=True, kw_only=True)
class NearbyFiles(NearbyAsset, UploadedAsset):
    """An asset of files of the web. Their tokens stay on this machine."""

    def is_here(self) -> bool:
        return all(file.local.is_file() for file in self.content.files)

    def errand(self, context: Context, observed: ObservedResources, progress: Progress) -> Errand:
        errand = _FilesErrand(self, context)
        errand.find()
        return errand

    def fetch_here(self, context: Context) -> None:
        self.send_files(context)


@dataclass
class _FilesErrand:
    """Files of the web, by addresses that need no token."""

    asset: NearbyFiles
    context: Context
    found: dict[str, FoundFile] = field(default_factory=dict)

    def find(self) -> None:
        """Ask for the size and the open address of each file."""
        secrets, sleep = self.asset.vault.values(), self.context.clock.sleep

        def ask(file: AssetFile) -> FoundFile:
            try:
                return with_patience(lambda: find_open_file(file.url or "", token_for(file, secrets)), sleep)
            except DownloadError as error:
                raise CloudError(f"{file.name}: {error}") from None

        files = self.asset.content.files
        with ThreadPoolExecutor(max_workers=THREADS) as pool:
            self.found = dict(zip((file.name for file in files), pool.map(ask, files), strict=True))

    @property
    def size(self) -> int:
        return sum(file.size or 0 for file in self.found.values())

    def prepare(self) -> list[int] | None:
        return [UNKNOWN_BYTES if file.size is None else file.size for file in self.found.values()]

    def orders(self) -> FetchAssetRequest:
        sources = self.asset.content.files
        if any(self.found[file.name].address != file.url for file in sources):
            self.find()  # signed addresses expire
        return {
            "bucket": self.asset.bucket,
            "prefix": self.asset.content.prefix,
            "files": {file.name: {"url": self.found[file.name].address, "sha256": file.sha256} for file in sources},
            "manifest": manifest_text(sources),
        }

    def finish(self) -> None:
        return
