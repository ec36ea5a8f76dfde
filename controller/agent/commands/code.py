"""Code on a worker: downloaded from the bucket, verified, and copied for each run."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ..fs import AgentError, locked, remove_tree, safe_join
from ..tree_hash import current_tree_hash, tree_files, tree_hash

if TYPE_CHECKING:
    from ..protocol import InstalledCode

MAX_BYTES = 1 << 30
MAX_FILES = 100_000


def install_code(bucket: str, object: str, sha256: str, tree: str) -> InstalledCode:
    """Download a tree from the bucket, unless it is installed and unchanged.

    Args:
        bucket: bucket of the archive.
        object: tar archive of plain files, compressed or not.
        sha256: SHA-256 of the archive.
        tree: `tree_hash` of its content.
    """
    from ..storage import download_object, with_retries  # importing HTTP takes a third of `observe`'s start-up time

    folder = safe_join("code", tree)
    with locked(f"code-{tree}"):
        if current_tree_hash(folder) == tree:
            return {"tree": tree, "changed": False}
        archive, fresh, old = (folder.with_name(f".{tree}.{word}") for word in ("archive", "new", "old"))
        archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with_retries(lambda: download_object(bucket, object, sha256, archive))
        remove_tree(fresh)
        try:
            unpack(archive, fresh)
        except (tarfile.TarError, OSError, EOFError) as error:
            raise AgentError(f"cannot unpack gs://{bucket}/{object}: {error}") from error
        if (found := tree_hash(fresh)) != tree:
            raise AgentError(f"gs://{bucket}/{object} contains the tree {found}, expected {tree}")
        remove_tree(old)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        remove_tree(old)
        archive.unlink()
    return {"tree": tree, "changed": True}


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive of plain files and folders into a new folder.

    Raises:
        AgentError: the archive holds links, devices, paths outside it, or more than MAX_FILES or MAX_BYTES.
    """
    files = total = 0
    folder.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            files, total = files + 1, total + member.size
            if member.name.startswith("/") or ".." in parts:
                raise AgentError(f"the archive contains {member.name!r}, which leads outside it")
            if not (member.isfile() or member.isdir()):
                raise AgentError(f"the archive contains {member.name!r}, which is neither a file nor a folder")
            if files > MAX_FILES or total > MAX_BYTES:
                raise AgentError(f"the archive contains more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
            path = folder.joinpath(*parts)
            (path if member.isdir() else path.parent).mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            if content:
                with content, path.open("xb") as file:
                    shutil.copyfileobj(content, file)
                path.chmod(0o700 if member.mode & 0o100 else 0o600)


def check_out(code: str, work: Path) -> str:
    """Copy the code into the working directory of a run and return the hash of the copy.

    A program may write files next to its code. In place, they would look like modified code and leak into other runs.
    """
    source = safe_join("code", code)
    if not source.is_dir():
        raise AgentError(f"the code {code} is not on this worker: install it first")
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = tree_files(source)
    for name in names:
        target = work / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copy(source / name, target, follow_symlinks=False)
    return tree_hash(work, names)
