"""Entry point of the zip file. It unpacks itself once, because Python keeps no bytecode of modules in a zip file.

Later commands run this file where it was unpacked: Python opens a zip file with modules that take 10 ms to import.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

OLD_SECONDS = 24 * 3600.0


def unpack(archive: Path) -> Path:
    """Unpack the archive beside itself, unless that has been done, and return the folder to import from.

    Returns the archive itself if that is impossible, for instance on a full disk. Safe to run concurrently.
    """
    folder = archive.with_suffix("")
    if folder.is_dir():
        return folder
    import shutil
    import tempfile
    import zipfile

    try:
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=archive.parent))
    except OSError:
        return archive
    try:
        with zipfile.ZipFile(archive) as zipped:
            zipped.extractall(draft)
        draft.rename(folder)
    except OSError:  # another process was faster, or the disk is full
        shutil.rmtree(draft, ignore_errors=True)
    remove_old_agents(archive)
    return folder if folder.is_dir() else archive


def remove_old_agents(archive: Path, proc: Path = Path("/proc")) -> None:
    """Remove what other versions left beside the archive over a day ago, unless a process still runs it.

    A supervisor or watchdog imports modules of its own version late. A controller of another version uploads it again.
    """
    import shutil
    import time

    if not proc.is_dir():
        return  # macOS: it is unknown what runs
    used = b""
    for path in proc.glob("[0-9]*/cmdline"):
        try:
            used += path.read_bytes()
        except OSError:
            continue  # it has ended in the meantime, or belongs to another user
    for path in [*archive.parent.glob("agent-*"), *archive.parent.glob(".agent-*")]:
        version = path.name.removesuffix(".pyz")
        try:
            is_old = time.time() - path.stat().st_mtime > OLD_SECONDS
        except OSError:
            continue  # another process has removed it
        if version == archive.stem or not is_old or version.encode() in used:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def archive_of(program: Path) -> Path:
    """Return the zip file of an agent that runs as `program`: that file, or the `__main__.py` unpacked from it."""
    return program.parent.with_name(f"{program.parent.name}.pyz") if program.name == "__main__.py" else program


if __name__ == "__main__":
    os.umask(0o077)
    sys.dont_write_bytecode = False
    program = Path(sys.argv[0]).resolve()
    archive = archive_of(program)
    if archive == program:
        sys.path.insert(0, str(unpack(archive)))
    sys.argv[0] = str(archive)  # names this version, and starts the processes that outlive this command
    sys.exit(import_module("slipway_agent.dispatch").main())
