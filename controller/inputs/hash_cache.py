"""Cache of local file hashes by path, size and modification time, so that 30 GB of weights are read once."""

import base64
import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import TracebackType
from typing import Any, Self

CHUNK = 1 << 22
THREADS = 4


@dataclass(frozen=True)
class Digests:
    """SHA-256 in hex; MD5 in base64, as in Cloud Storage's object metadata."""

    sha256: str
    md5: str


class HashCache:
    """Hash cache of a state folder; a context manager that saves new hashes on exit."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._changed = False
        try:
            self._known: dict[str, Any] = json.loads(file.read_bytes())
        except (OSError, ValueError):  # a lost cache only costs time
            self._known = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._changed:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # assets are resolved in parallel and each exit saves: each writes its own temporary file, and the last wins
            with NamedTemporaryFile("w", dir=self._file.parent, prefix=f".{self._file.name}.", delete=False) as draft:
                json.dump(self._known, draft)
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
