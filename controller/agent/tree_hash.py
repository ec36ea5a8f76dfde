"""Hash of a file tree; the controller and the workers compute the same one."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from .fs import CHUNK_BYTES


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def tree_files(folder: Path) -> list[str]:
    """Return the sorted relative POSIX paths of the files and links below a folder, without `__pycache__`."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        place = Path(parent)
        links = [name for name in folders if (place / name).is_symlink()]
        found += [(place / name).relative_to(folder).as_posix() for name in files + links]
    return sorted(found)


def tree_hash(folder: Path, paths: Iterable[str] | None = None) -> str:
    """Return the SHA-256 of a tree, over the sorted lines [path, kind, SHA-256 of the content] of its files.

    The kind is "file", "exec" (executable by its owner) or "link" (its content is its target).

    Args:
        folder: root of the tree.
        paths: relative POSIX paths of the files to hash; by default all files, without `__pycache__`.
    """
    return files_hash({name: folder / name for name in (tree_files(folder) if paths is None else paths)})


def files_hash(files: Mapping[str, Path]) -> str:
    """Return the `tree_hash` of a tree whose files are still in several places, by their relative POSIX path in it."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        if path.is_symlink():
            kind, content = "link", hashlib.sha256(os.fsencode(path.readlink())).hexdigest()
        else:
            kind, content = "exec" if path.stat().st_mode & 0o100 else "file", file_hash(path)
        digest.update(json.dumps([name, kind, content]).encode() + b"\n")
    return digest.hexdigest()


def current_tree_hash(folder: Path) -> str | None:
    """Return the hash of the folder as it is, or None if it is missing or being replaced."""
    try:
        return tree_hash(folder) if folder.is_dir() else None
    except FileNotFoundError:
        return None
