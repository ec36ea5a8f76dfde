"""A dataset, copied to the bucket before a TPU is billed."""

from __future__ import annotations

import hashlib
import json
import shutil
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from conf.assets import Asset
from controller.errors import CloudError, ConfigError
from controller.google import NotFound
from controller.resource import Absent, Diff, Have, Resource, Scope

if TYPE_CHECKING:
    from controller.world import World

CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    """One file: on this machine, or still to be fetched into `local` from `url`."""

    name: str
    local: Path
    sha256: str
    url: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The files of a dataset; its hash names the folder in the bucket."""

    files: tuple[Source, ...]

    @property
    def text(self) -> str:
        return json.dumps({f.name: f.sha256 for f in self.files}, indent=1, sort_keys=True) + "\n"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class DatasetCopy(Resource):
    """The files, then `manifest.json`: where the manifest is, everything before it arrived."""

    kind: ClassVar[str] = "dataset"
    scope: ClassVar[Scope] = "shared"
    bucket: str = field(compare=False)
    manifest: Manifest = field(compare=False)

    @property
    def title(self) -> str:
        return f"dataset {self.name} in the bucket ({len(self.manifest.files)} files)"

    @property
    def prefix(self) -> str:
        return prefix(self.name, self.manifest)

    def observe(self, world: World, have: Have) -> Absent | Self:
        try:
            world.google.call("storage", "objects.get", bucket=self.bucket, object=f"{self.prefix}/manifest.json")
        except NotFound:
            return Absent()
        return self

    def apply(self, world: World, have: Have, diff: Diff) -> None:
        for source in self.manifest.files:
            fetch(source)
            world.google.upload(self.bucket, f"{self.prefix}/{source.name}", str(source.local))
        world.google.upload(self.bucket, f"{self.prefix}/manifest.json", self.manifest.text.encode())

    def destroy(self, world: World) -> None:
        """Kept: other runs may read it; it goes with the bucket."""


def prefix(name: str, manifest: Manifest) -> str:
    """The dataset's folder in the bucket."""
    return f"assets/{name}-{manifest.sha256[:12]}"


def manifest(name: str, dataset: Asset, cache: Path) -> Manifest:
    """List and hash what `dataset` names; downloads are known by the hash in the config and fetched later.

    Raises:
        ConfigError: the path is missing or empty.
    """
    if dataset.path is None:
        return Manifest(
            tuple(Source(k, cache / f.sha256, f.sha256, f.url) for k, f in sorted((dataset.files or {}).items()))
        )
    path = Path(dataset.path).expanduser()
    root = path.parent if path.is_file() else path
    found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if not found:
        raise ConfigError(f"assets.datasets.{name}.path: no file at {path}; set it to the file or folder with the data")
    return Manifest(tuple(Source(p.relative_to(root).as_posix(), p, sha256_of(p)) for p in found))


def fetch(source: Source) -> None:
    """Download a file that is not here yet; one with another content than promised is refused."""
    if source.url is None or source.local.is_file():
        return
    source.local.parent.mkdir(parents=True, exist_ok=True)
    part = source.local.with_suffix(".part")
    try:
        with urllib.request.urlopen(source.url, timeout=60) as answer, part.open("wb") as out:  # noqa: S310 - http(s) by schema
            shutil.copyfileobj(answer, out, CHUNK)
    except OSError as error:
        raise CloudError(f"{source.name}: {source.url} cannot be fetched: {error}") from None
    if (found := sha256_of(part)) != source.sha256:
        part.unlink()
        raise CloudError(
            f"{source.name}: {source.url} has SHA-256 {found[:12]}…, the config says {source.sha256[:12]}…"
        )
    part.replace(source.local)


def sha256_of(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
