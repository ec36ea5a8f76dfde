"""Our SSH key, made once and kept in the state folder, and the host keys that we hold the workers to."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

NAME = "id_ed25519"


def private_key(folder: Path) -> Path:
    """The private key's file (OpenSSH format, 0600); the key is made on first use, by one of several processes."""
    path = folder / NAME
    if not path.exists():
        _make(path)
    return path


def public_line(folder: Path, comment: str) -> str:
    """`ssh-ed25519 AAAA… comment`, as in `authorized_keys` or, behind `user:`, in a node's `ssh-keys` metadata."""
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_ssh_private_key(private_key(folder).read_bytes(), password=None)
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return f"{key.public_key().public_bytes(encoding, form).decode()} {comment}"


def _make(path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    text = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{NAME}.") as draft:  # 0600
        draft.write(text)
        draft.flush()
        try:
            os.link(draft.name, path)
        except FileExistsError:  # another controller was faster: its key is the one
            return


class HostKeys:
    """The host keys of a pod's workers, read when they are first needed, and again when one does not match."""

    def __init__(self, read: Callable[[], Sequence[str]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known: Sequence[str] = ()

    def of(self, worker: int, refused: str | None = None) -> str:
        """The lines of one worker, none if it has published none; read anew if they are still what was `refused`."""
        with self._lock:
            if self._line(worker) in ("", refused):
                self._known = self._read()
            return self._line(worker)

    def _line(self, worker: int) -> str:
        return self._known[worker] if worker < len(self._known) else ""
