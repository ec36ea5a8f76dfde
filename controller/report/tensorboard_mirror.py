"""Copy TensorBoard's files of runs from the bucket: one folder per run, with a readable name.

TensorBoard needs its own credentials and an extra library to read a bucket; it follows local files as they grow.
"""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from controller.gcp.client import GoogleClient
from controller.gcp.errors import NotFoundError

PART = re.compile(r"[A-Za-z0-9][\w.=+-]{0,199}", re.ASCII)
"""Valid part of a path: workers name a run's objects and must not reach any other file here."""
PARALLEL_RUNS = 8


class TensorBoardMirror:
    """Copies new data of runs.

    Args:
        folders: the target folder of each run.
    """

    def __init__(self, google: GoogleClient, bucket: str, folders: Mapping[str, Path]) -> None:
        self._google, self._bucket, self._folders = google, bucket, folders
        self._copied: dict[str, str] = {}

    def update(self, runs: set[str]) -> int:
        """Copy new and grown files of these runs; returns how many."""
        with ThreadPoolExecutor(max_workers=PARALLEL_RUNS, thread_name_prefix="mirror") as pool:
            return sum(pool.map(self._update_run, sorted(runs)))

    def _update_run(self, run: str) -> int:
        prefix, copied = f"runs/{run}/tb/", 0
        where = {"bucket": self._bucket, "prefix": prefix, "fields": "items(name,generation),nextPageToken"}
        try:
            items = list(self._google.list_all("storage", "objects.list", "items", **where))
        except NotFoundError:
            return 0
        for item in items:
            name, generation = item["name"], item["generation"]
            parts = name.removeprefix(prefix).split("/")
            if self._copied.get(name) == generation or not all(PART.fullmatch(part) for part in parts):
                continue
            try:
                content = self._google.download(self._bucket, name)
            except NotFoundError:
                continue  # replaced or deleted since it was listed
            _write_file(self._folders[run].joinpath(*parts), content)
            self._copied[name] = generation
            copied += 1
        return copied


def folder_name(label: str, run: str) -> str:
    """Return the folder name of a run, which TensorBoard shows as the run's name: its setting and id."""
    name = re.sub(r"[^\w.=+-]+", "_", label, flags=re.ASCII).strip("_.-")[:100]
    return f"{name}_{run[-8:]}" if name else run


def _write_file(file: Path, content: bytes) -> None:
    """Append in place if the file has only grown: TensorBoard keeps it open and reads on."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = file.read_bytes() if file.is_file() else b""
    if known and content.startswith(known):
        with file.open("ab") as out:
            out.write(content[len(known) :])
    else:
        file.write_bytes(content)
