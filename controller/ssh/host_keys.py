"""Pin the host keys of a pod's workers: read them from Google once and keep them for the pod's lifetime.

The file has OpenSSH's format (`worker-3 ssh-ed25519 AAAA…`), below a comment that names the incarnation.
"""

import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

KnownKeys = dict[str, str]
"""Keys of one worker in base64, by type."""
_HEADER = "# incarnation "
KEY = re.compile(r"((?:ssh-ed25519|ecdsa-|ssh-rsa)\S*) +([A-Za-z0-9+/]+=*)( .*)?")


class HostKeys:
    """Pinned host keys. A known key changes only by `replace`; keys of further types may be added. Thread-safe."""

    def __init__(self, read: Callable[[], Sequence[str]], file: Path | None = None, incarnation: str = "") -> None:
        """Store the parameters; nothing is read before the first use.

        Args:
            read: returns the keys that Google publishes now, per worker: lines of `TYPE KEY`.
            file: stores the keys; those of another incarnation are dropped. None: they are not stored.
            incarnation: uid of the pod.
        """
        self._read, self._file, self._incarnation = read, file, incarnation
        self._lock = threading.Lock()
        self._known: dict[int, KnownKeys] | None = None

    def keys_of(self, worker: int) -> KnownKeys:
        """Return the pinned keys of a worker; the first call reads them from Google. Empty if none are published."""
        with self._lock:
            if not self._all().get(worker):
                self._merge(dict(enumerate(_parse(lines) for lines in self._read())))
            return dict(self._all().get(worker, {}))

    def cached(self, worker: int) -> KnownKeys:
        """Return the pinned keys of a worker without asking Google."""
        with self._lock:
            return dict(self._all().get(worker, {}))

    def published(self, worker: int) -> KnownKeys:
        """Return the keys that Google publishes now, whether pinned or not."""
        lines = self._read()
        return _parse(lines[worker]) if worker < len(lines) else {}

    def pin(self, worker: int, kind: str, text: str) -> None:
        """Pin a key of a worker."""
        with self._lock:
            self._merge({worker: {kind: text}})

    def replace(self, worker: int, kind: str, text: str) -> None:
        """Forget the pinned keys of a worker, whose VM was rebuilt, and pin this one."""
        with self._lock:
            self._known = {**self._all(), worker: {kind: text}}
            self._save(self._known)

    def _all(self) -> dict[int, KnownKeys]:
        if self._known is None:
            self._known = self._load()
        return self._known

    def _merge(self, found: dict[int, KnownKeys]) -> None:
        known = self._all()
        merged = {w: found.get(w, {}) | known.get(w, {}) for w in sorted({*known, *found})}
        merged = {worker: keys for worker, keys in merged.items() if keys}
        if merged != known:
            self._known = merged
            self._save(merged)

    def _load(self) -> dict[int, KnownKeys]:
        known: dict[int, KnownKeys] = {}
        if self._file is None or not self._file.is_file():
            return known
        header, *lines = self._file.read_text().splitlines() or [""]
        if header != _HEADER + self._incarnation:
            return known
        for line in lines:
            name, kind, text = line.split()
            known.setdefault(int(name.removeprefix("worker-")), {})[kind] = text
        return known

    def _save(self, known: dict[int, KnownKeys]) -> None:
        if self._file is None:
            return
        lines = [f"worker-{worker} {kind} {text}" for worker, keys in known.items() for kind, text in keys.items()]
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False) as draft:
            draft.write("\n".join([_HEADER + self._incarnation, *lines, ""]))
        Path(draft.name).replace(self._file)


def _parse(lines: str) -> KnownKeys:
    """Return the well-formed keys; a program on a worker may publish anything."""
    found = map(KEY.fullmatch, lines.splitlines())
    return {match[1]: match[2] for match in found if match}
