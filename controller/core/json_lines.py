"""Files of JSON lines that several processes append to."""

import fcntl
import os
from pathlib import Path


def append_lines(file: Path, text: str) -> None:
    """Append whole lines; a line that was cut short by a crash is left on its own."""
    if not text:
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file.open("a+b") as out:
        fcntl.flock(out, fcntl.LOCK_EX)  # controllers of several runs append at the same time
        if out.seek(0, os.SEEK_END):
            out.seek(-1, os.SEEK_END)
            text = text if out.read() == b"\n" else f"\n{text}"
        out.write(text.encode())
