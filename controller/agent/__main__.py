"""Entry point of the zip file. It unpacks itself once, because Python keeps no bytecode of modules in a zip file."""

import os
import sys
from importlib import import_module
from pathlib import Path


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
    return folder if folder.is_dir() else archive


if __name__ == "__main__":
    os.umask(0o077)
    sys.dont_write_bytecode = False
    sys.path.insert(0, str(unpack(Path(sys.argv[0]).resolve())))
    sys.exit(import_module("slipway_agent.main").main())
