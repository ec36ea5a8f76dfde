"""The code of a recorded run, unpacked from the archive in the bucket and compared with its hash.

It is kept in the state folder, or, if that takes no files, in a temporary folder for as long as this process lives.
"""

import atexit
import errno
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from controller.agent.commands.run_inputs import unpack
from controller.agent.fs import AgentError, tree_files, tree_hash
from controller.core.errors import ConfigError
from controller.core.local_notes import OF_THE_DISK
from controller.core.text import object_url
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import NotFoundError
from controller.inputs.code import CodeSnapshot
from controller.records.local_names import repository_problem
from controller.records.recorder import RunRecord

OF_THE_FOLDER = OF_THE_DISK | {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}
"""Errors of the state folder, not of what is unpacked there."""


class MissingInputsError(ConfigError):
    """The bucket no longer has the code or the data of a recorded run."""


@dataclass(frozen=True)
class ArchivedCode(CodeSnapshot):
    """Code from an archive, which is shipped again byte for byte."""

    archive_bytes: bytes

    @cached_property
    def archive(self) -> bytes:
        return self.archive_bytes


def restore_code(google: GoogleClient, document: RunRecord, state: Path) -> CodeSnapshot:
    """Unpack the recorded code on this machine, in a temporary folder if need be, and check it against its hash."""
    sha256, bucket = checked_hash(document, document["code_sha256"]), document["bucket"]
    where = object_url(bucket, f"code/{sha256}.tar.gz")
    try:
        packed = google.download(bucket, f"code/{sha256}.tar.gz")
    except NotFoundError:
        raise MissingInputsError(f"--run {document['run']}: its code is missing from {where}") from None
    folder = state / "code" / sha256
    if not folder.is_dir():
        told = f"--run {document['run']}: cannot unpack the code in {where}: "
        try:
            _unpack_code(packed, where, folder, document["run"])
        except (AgentError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
            raise ConfigError(f"{told}{error}") from None
        except OSError as error:
            if error.errno not in OF_THE_FOLDER:
                raise ConfigError(f"{told}{error}") from None
            print(f"warning: {folder}: {error.strerror}; a temporary folder has the recorded code", file=sys.stderr)
            spare = tempfile.mkdtemp(prefix="slipway-code-")
            atexit.register(shutil.rmtree, spare, ignore_errors=True)
            folder = Path(spare) / sha256
            try:
                _unpack_code(packed, where, folder, document["run"])
            except OSError as full:
                raise ConfigError(f"{told}{full}") from None
    names = tree_files(folder)
    if tree_hash(folder, names) != sha256:
        raise ConfigError(f"--run {document['run']}: {folder} does not match the record; delete it and try again")
    links = tuple((name, str((folder / name).readlink())) for name in names if (folder / name).is_symlink())
    files = tuple(name for name in names if not (folder / name).is_symlink())
    return ArchivedCode(folder, files, packed, links=links)


def _unpack_code(packed: bytes, where: str, folder: Path, run_id: str) -> None:
    """Unpack the code of a run into a folder whose name is its hash. Raises ConfigError if it has another one."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name[:12]}-", dir=folder.parent))
    try:
        (draft / "archive").write_bytes(packed)
        unpack(draft / "archive", draft / "tree")
        if tree_hash(draft / "tree") != folder.name:
            raise ConfigError(f"--run {run_id}: the code in {where} does not match the record")
        if problem := repository_problem(tree_files(draft / "tree")):
            raise ConfigError(f"--run {run_id}: the code in {where} has {problem!r}, which tools obey")
        if not folder.is_dir():
            os.replace(draft / "tree", folder)  # noqa: PTH105 - of a folder
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def checked_hash(document: RunRecord, text: str) -> str:
    """Return a hash that is safe as a file name: others can write to the bucket that the record comes from."""
    if not re.fullmatch(r"[0-9a-f]{64}", str(text)):
        raise ConfigError(f"--run {document['run']}: its record contains an invalid SHA-256: {text!r}")
    return text
