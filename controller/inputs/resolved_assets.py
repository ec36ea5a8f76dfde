"""Resolve assets before they are copied: their files, content hash and destination. Nothing is downloaded here.

Hashes of local files are kept by path, size and modification time, so that 30 GB of weights are read once.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import TracebackType
from typing import Any, Self, TypedDict

from conf.schema.assets import HUB, Asset, Kind, SourceAddress, parse_source
from conf.schema.config import Config, digest
from conf.schema.forms import escape_line
from conf.strict_json import dumps
from controller.core.errors import ConfigError
from controller.core.json_documents import type_problem

CHUNK = 1 << 22
THREADS = 4


@dataclass(frozen=True)
class Digests:
    """SHA-256 in hex; MD5 in base64, as in Cloud Storage's object metadata."""

    sha256: str
    md5: str


class _Entry(TypedDict):
    at: list[int]
    sha256: str
    md5: str


class HashCache:
    """Hash cache of a state folder; a context manager that saves new hashes on exit."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._changed = False
        try:
            self._known: dict[str, Any] = json.loads(file.read_bytes())
            if any(map(type_problem, self._known.values(), repeat(_Entry))):
                self._known = {}
        except (OSError, ValueError, AttributeError, RecursionError):  # a lost cache only costs time
            self._known = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._changed:
            with suppress(OSError):  # a lost cache only costs time
                self._save()

    def _save(self) -> None:
        """Assets are resolved in parallel and each exit saves: each writes a file of its own, and the last one wins."""
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=self._file.parent, prefix=f".{self._file.name}.", delete=False) as draft:
            draft.write(dumps(self._known))
        Path(draft.name).replace(self._file)

    def digests(self, paths: Iterable[Path]) -> dict[Path, Digests]:
        """Return the hashes of some files; changed files are read, several at once."""
        wanted = {path: _stamp(path) for path in paths}
        new = [path for path, stamp in wanted.items() if self._known.get(str(path.resolve()), {}).get("at") != stamp]
        if new:
            with ThreadPoolExecutor(max_workers=THREADS) as pool:
                for path, digests in zip(new, pool.map(hash_file, new), strict=True):
                    entry = {"at": wanted[path], "sha256": digests.sha256, "md5": digests.md5}
                    self._known[str(path.resolve())] = entry
                    self._changed = True
        entries = {path: self._known[str(path.resolve())] for path in wanted}
        return {path: Digests(entry["sha256"], entry["md5"]) for path, entry in entries.items()}


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def hash_file(path: Path) -> Digests:
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            sha256.update(chunk)
            md5.update(chunk)
    return Digests(sha256.hexdigest(), base64.b64encode(md5.digest()).decode())


PUZZLES = "trainer.puzzles"
ALWAYS_SKIPPED = frozenset({".DS_Store", ".git", "__pycache__"})


@dataclass(frozen=True)
class AssetFile:
    """A file on this machine, or one to download from `url` into `local`; `token` names a secret."""

    name: str
    local: Path
    sha256: str
    url: str | None = None
    token: str | None = None


@dataclass(frozen=True)
class BuildRecipe:
    """A command that makes an asset's files; it runs in `root` and fills the folder `output`.

    `bound` says why it can run on this machine only; empty: it can run on the pod.
    """

    argv: tuple[str, ...]
    root: Path
    output: Path
    inputs: tuple[str, ...] = ()
    bound: str = ""

    @property
    def sources(self) -> tuple[SourceAddress, ...]:
        """What its words name on the Hub, as far as they can be read."""
        found = list[SourceAddress]()
        for word in self.argv:
            try:
                address = parse_source(word) if word.startswith(HUB) else None
            except ValueError:
                continue  # the command will say so
            if address is not None:  # puzzles are data sets, which their command need not say
                found.append(address._replace(kind="dataset") if PUZZLES in self.argv else address)
        return tuple(found)


@dataclass(frozen=True)
class ResolvedAsset:
    """Contents of an asset as far as known: `files`, the recipe that will make them, or the source that has them."""

    kind: Kind
    name: str
    identity: str
    files: tuple[AssetFile, ...] = ()
    recipe: BuildRecipe | None = None
    source: str | None = None

    @property
    def path(self) -> str:
        """Name in config and programs: `models.gemma`."""
        return f"{self.kind}s.{self.name}"

    @property
    def prefix(self) -> str:
        """Folder in the bucket, named after the content: a copy never changes."""
        return f"assets/{self.name}-{self.identity[:12]}"


def manifest_text(files: tuple[AssetFile, ...]) -> str:
    """Return the text of `manifest.json`, which maps names to SHA-256."""
    return dumps({f.name: f.sha256 for f in files}, indent=1, sort_keys=True) + "\n"


def resolve_assets(config: Config, root: Path) -> dict[str, ResolvedAsset]:
    """Return the assets that the run needs by `datasets.NAME` and so on; local files are hashed only after a change.

    The bundled trainer needs an asset only if a config key names it. Others are ignored, such as the weights of an
    experiment whose `model.weights` is now gs://…. Builds run in `root`, the root of the code.

    Raises:
        ConfigError: a local file is missing.
    """
    state = Path(config.run.state_dir).expanduser()
    with HashCache(state / "hashes.json") as hashes:
        found = [
            resolve_asset(kind, name, asset, root, state, hashes)
            for kind, name, asset in config.assets.iter_assets()
            if config.program.kind != "trainer" or is_referenced(config, kind, name)
        ]
    return {c.path: c for c in found}


def is_referenced(config: Config, kind: Kind, name: str) -> bool:
    """Return whether any key names this asset, as assets://NAME or {assets.models.NAME}."""
    text = config.model_dump_json(exclude={"assets"})
    return bool(re.search(rf"assets://{name}(?![-a-z0-9])", text)) or f"{{assets.{kind}s.{name}}}" in text


def resolve_asset(kind: Kind, name: str, asset: Asset, root: Path, state: Path, hashes: HashCache) -> ResolvedAsset:
    """Resolve one asset. Raises ConfigError if a local path, or an input of a build, is missing or empty."""
    key = f"assets.{kind}s.{name}"
    if asset.build:
        identity = _identity(asset, root, hashes, key)
        output = state / "builds" / f"{name}-{identity[:12]}"
        return ResolvedAsset(kind, name, identity, recipe=BuildRecipe(asset.build, root, output, asset.inputs))
    if asset.source:  # its files are pinned when the first of them is fetched, so a plan needs no network
        return ResolvedAsset(kind, name, digest([asset.source]), source=asset.source)
    if asset.files:
        cache = state / "downloads"
        items = sorted(asset.files.items())
        files = tuple(AssetFile(k, cache / f.sha256, f.sha256, f.url, f.token_secret) for k, f in items)
    else:
        try:
            files = local_files(Path(asset.path or "").expanduser(), hashes)
        except OSError as error:
            raise ConfigError(escape_line(f"{key}.path: cannot read {error.filename}: {error.strerror}")) from None
        refuse_links(files, Path(asset.path or "").expanduser(), f"{key}.path")
        if not files:
            message = f"{key}.path: no file at {asset.path}; set it to the file or folder with the data"
            raise ConfigError(escape_line(message))
    return ResolvedAsset(kind, name, hashlib.sha256(manifest_text(files).encode()).hexdigest(), files)


def local_files(path: Path, hashes: HashCache) -> tuple[AssetFile, ...]:
    """Return the files at or below `path` with their hashes; empty if it does not exist."""
    known = hashes.digests(files_below(path))
    one = path.is_file()
    return tuple(AssetFile(path.name if one else p.relative_to(path).as_posix(), p, known[p].sha256) for p in known)


def files_below(path: Path) -> list[Path]:
    """Return the files of a folder that belong to an asset, or the one file that `path` is."""
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and not ALWAYS_SKIPPED & set(p.relative_to(path).parts))


def refuse_links(files: tuple[AssetFile, ...], folder: Path, key: str) -> None:
    """Raise ConfigError if a link leads out of a folder: it would upload a file that the config does not name.

    In the cache of the Hub's library the files of a snapshot are links to its `blobs`.
    """
    root = folder.resolve()
    places = (root, root.parents[1] / "blobs") if root.parent.name == "snapshots" else (root,)
    for file in files:
        if file.local.is_symlink() and file.local != folder:
            target = file.local.resolve()
            if not any(target.is_relative_to(place) for place in places):
                message = f"{file.local} is a link to {target}, outside {folder}; copy it there, or name its own folder"
                raise ConfigError(escape_line(f"{key}: {message}"))


def path_exists(path: Path) -> bool:
    """Return whether the path exists; False for a name that is too long for a file."""
    try:
        return path.exists()
    except OSError:
        return False


def _identity(asset: Asset, root: Path, hashes: HashCache, key: str) -> str:
    """Hash a build's command line and every file that it or `inputs` names; the build need not have run."""
    assert asset.build, "only builds are identified by their command"
    argv = asset.build
    read: dict[str, str] = {}
    program = () if "/" in argv[0] else argv[:1]  # found on PATH: ./slipway beside it is something else
    for word in dict.fromkeys([*argv[len(program) :], *asset.inputs]):
        path = root / word
        inside = word and path_exists(path) and path.resolve() != root.resolve()
        if word in asset.inputs and not path_exists(path):
            raise ConfigError(escape_line(f"{key}.inputs: no file at {path}"))
        if inside or word in asset.inputs:
            read |= {f"{word}:{f.name}": f.sha256 for f in local_files(path, hashes)}
    return digest([argv, read])
