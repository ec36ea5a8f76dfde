"""What is done near the bucket for an asset: a VM fetches files of the Hub or web; it or worker 0 runs a command."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

from conf.schema.config import Config
from controller.agent.protocol import BUILD_ASSET, BuildAssetRequest, FetchAssetRequest, InstallVenvRequest
from controller.context import Context, Progress
from controller.core.errors import CloudError
from controller.inputs.download import (
    DownloadError,
    FoundFile,
    TokenNeededError,
    find_open_file,
    token_for,
    with_patience,
)
from controller.inputs.hub_sources import (
    HubAccess,
    SourceError,
    SourceFile,
    hub_endpoint,
    list_source,
    require_readable,
)
from controller.inputs.resolved_assets import AssetFile, BuildRecipe, manifest_text
from controller.reconcile import Diff, ObservedResources
from controller.resources.software import fingerprint
from controller.resources.uploads.archives import CodeArchive
from controller.resources.uploads.bucket_assets import PodFetchedAsset, UploadedAsset
from controller.resources.uploads.nearby import Errand, NearbyAsset
from controller.resources.uploads.source_assets import (
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


OWN = "slipway"
ENDPOINT = "HF_ENDPOINT"
"""Variable that a build gets from this machine: where the Hub is."""
WORK_BYTES = 40 * 10**9
"""Room on the VM's disk for packages, what the command reads, and what it makes."""


def remote_argv(recipe: BuildRecipe) -> list[str]:
    """Return the command as it runs in the shipped code: `slipway trainer.X` is a module there."""
    return ["python", "-m", *recipe.argv[1:]] if recipe.argv[0] == OWN else list(recipe.argv)


def build_variables() -> dict[str, str]:
    """Return the variables of this machine that a build elsewhere gets."""
    return {name: os.environ[name] for name in (ENDPOINT,) if name in os.environ}


def source_bytes(recipe: BuildRecipe) -> int:
    """Return the size of what a build reads of the Hub, as far as its words tell.

    Raises:
        TokenNeededError: it cannot be read without a token.
        SourceError: the Hub cannot be asked.
    """
    access = HubAccess(hub_endpoint(), None)
    size = 0
    for address in recipe.sources:
        try:
            commit, files = list_source(address, access)
            require_readable(address, commit, files, access)
        except SourceError as error:
            if error.status in (401, 403):
                raise TokenNeededError(f"a VM has no token, and {error}") from None
            raise
        size += sum(file.size for file in files)
    return size


@dataclass(frozen=True)
class VmVenv:
    """The packages of a build on a VM: those of the program, without what `program.setup` adds on the pod."""

    packages: str
    python: str
    requirements: str
    name: str

    @classmethod
    def of(cls, config: Config, requirements: str) -> Self:
        env = config.env
        program = config.program.model_copy(update={"setup": ()})
        return cls(
            env.packages, env.python, requirements, fingerprint(env.packages, env.python, requirements, program, None)
        )

    @property
    def request(self) -> InstallVenvRequest | None:
        """Return the request that installs it; None where there is nothing to install."""
        if self.packages == "none":
            return None
        return {
            "packages": self.packages,
            "fingerprint": self.name,
            "python": self.python,
            "requirements": self.requirements,
        }


@dataclass(frozen=True, kw_only=True)
class NearbyBuild(NearbyAsset, UploadedAsset):
    """An asset whose command runs on a VM, with the shipped code and the packages of the program."""

    code: CodeArchive = field(compare=False)
    venv: VmVenv = field(compare=False)

    def is_here(self) -> bool:
        return self.content.recipe is not None and self.content.recipe.output.is_dir()

    def errand(self, context: Context, observed: ObservedResources, progress: Progress) -> Errand:
        recipe = self.content.recipe
        assert recipe, "the plan gives builds only"
        try:
            size = source_bytes(recipe)
        except TokenNeededError:
            raise
        except SourceError:
            if self.always:
                raise
            size = 0  # the command may have a copy here
        return _BuildErrand(self, recipe, size)

    def fetch_here(self, context: Context) -> None:
        self.send_files(context)

    @property
    def remedy(self) -> str:
        return f"assets.{self.content.path}.fetch_on=laptop builds it on this machine"


@dataclass
class _BuildErrand:
    """A command for a VM."""

    asset: NearbyBuild
    recipe: BuildRecipe
    size: int

    def prepare(self) -> list[int] | None:
        return [WORK_BYTES + 2 * self.size]

    def orders(self) -> BuildAssetRequest:
        code = self.asset.code
        return {
            "bucket": self.asset.bucket,
            "prefix": self.asset.content.prefix,
            "argv": remote_argv(self.recipe),
            "code": code.name,
            "venv": self.asset.venv.name,
            "env": build_variables(),
            "get_code": {
                "bucket": code.bucket,
                "object": code.object,
                "sha256": code.snapshot.archive_sha256,
                "tree": code.name,
            },
            "get_venv": self.asset.venv.request,
        }

    def finish(self) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class PodBuiltAsset(PodFetchedAsset):
    """An asset whose command runs on worker 0, in its venv and a copy of the code, with the secrets of the program."""

    code: str = field(compare=False)
    venv: str = field(compare=False)

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        recipe = self.content.recipe
        assert recipe, "the plan gives builds only"
        payload: BuildAssetRequest = {
            "bucket": self.bucket,
            "prefix": self.content.prefix,
            "argv": remote_argv(recipe),
            "code": self.code,
            "venv": self.venv,
            "env": build_variables(),
            "secrets": self.vault.values(),
        }
        self.follow(context, observed, BUILD_ASSET, payload)
