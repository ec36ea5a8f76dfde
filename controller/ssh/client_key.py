"""SSH key of a project, created once and kept in the state folder."""

import os
import tempfile
from pathlib import Path

KEY_FILE_NAME = "id_ed25519"


def private_key(folder: Path) -> Path:
    """Return the private key's file (OpenSSH format, mode 0600). Of several processes, the first creates the key."""
    path = folder / KEY_FILE_NAME
    if not path.exists():
        _generate(path)
    return path


def public_key_line(folder: Path, comment: str) -> str:
    """Return `ssh-ed25519 AAAA… comment`, as in `authorized_keys` or, after `user:`, in `ssh-keys` metadata."""
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_ssh_private_key(private_key(folder).read_bytes(), password=None)
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return f"{key.public_key().public_bytes(encoding, form).decode()} {comment}"


def _generate(path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    text = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{KEY_FILE_NAME}.") as draft:  # 0600
        draft.write(text)
        draft.flush()
        try:
            os.link(draft.name, path)
        except FileExistsError:  # another controller created the key first
            return
