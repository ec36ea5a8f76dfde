"""TensorBoard's files of runs, copied from the bucket: one folder for each run, under a name for people.

TensorBoard reads a bucket only with credentials of its own and a library for it; local files it follows as they grow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from controller.gcp.client import GoogleClient, NotFoundError

PART = re.compile(r"[A-Za-z0-9][\w.=+-]{0,199}", re.ASCII)
"""Of a path: workers name the objects of a run, and may not name any other file here."""
PARALLEL_RUNS = 8


class TensorBoardMirror:
    """Copies what is new.

    Args:
        folders: by run the folder that its files go to.
    """

    def __init__(self, google: GoogleClient, bucket: str, folders: Mapping[str, Path]) -> None:
        self._google, self._bucket, self._folders = google, bucket, folders
        self._seen: dict[str, str] = {}

    def update(self, runs: set[str]) -> int:
        """Copy the files of these runs that are new or have grown; returns how many."""
        with ThreadPoolExecutor(max_workers=PARALLEL_RUNS, thread_name_prefix="mirror") as pool:
            return sum(pool.map(self._update_run, sorted(runs)))

    def _update_run(self, run: str) -> int:
        prefix, copied = f"runs/{run}/tb/", 0
        where = {"bucket": self._bucket, "prefix": prefix, "fields": "items(name,generation),nextPageToken"}
        try:
            items = list(self._google.pages("storage", "objects.list", "items", **where))
        except NotFoundError:
            return 0
        for item in items:
            name, generation = item["name"], item["generation"]
            parts = name.removeprefix(prefix).split("/")
            if self._seen.get(name) == generation or not all(PART.fullmatch(part) for part in parts):
                continue
            try:
                content = self._google.download(self._bucket, name)
            except NotFoundError:
                continue  # replaced or deleted since it was listed
            _write_file(self._folders[run].joinpath(*parts), content)
            self._seen[name] = generation
            copied += 1
        return copied


def folder_name(label: str, run: str) -> str:
    """A setting and its run as the name of a folder, which is that of the run in TensorBoard."""
    words = re.sub(r"[^\w.=+-]+", "_", label, flags=re.ASCII).strip("_.-")[:100]
    return f"{words}_{run[-8:]}" if words else run


def _write_file(file: Path, content: bytes) -> None:
    """In place where it has only grown: TensorBoard keeps the file open and reads on."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = file.read_bytes() if file.is_file() else b""
    if known and content.startswith(known):
        with file.open("ab") as out:
            out.write(content[len(known) :])
    else:
        file.write_bytes(content)
