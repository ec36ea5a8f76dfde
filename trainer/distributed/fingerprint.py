"""Fingerprints of files and folders that are cheap even for large data.

`python -m trainer.distributed.fingerprint run.yaml` prints those of a run's inputs; `slipway verify` asks every worker.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from conf.schema.training.run_yaml import RunFile, load

MAX_FULL_HASH_BYTES = 1 << 23
EDGE_BYTES = 1 << 20


def input_fingerprints(experiment: RunFile) -> dict[str, str]:
    """Return the fingerprint of every file, folder or pattern that the config names, by its key."""
    return {key: file_fingerprint(path) for key, path in _input_files(experiment)}


def _input_files(experiment: RunFile) -> Iterator[tuple[str, str]]:
    """Yield keys and values of the config that name files."""
    teacher, lora = getattr(experiment.loop, "teacher", None), getattr(experiment.model, "lora", None)
    folders = {
        "model.weights": experiment.model.weights,
        "loop.teacher.weights": teacher and teacher.weights,
        "model.lora.adapter": lora and lora.adapter,
    }
    yield from ((key, folder) for key, folder in folders.items() if folder)
    for name, value in experiment.data.model_dump().items():
        if isinstance(value, str) and (name.endswith("path") or "/" in value):
            yield f"data.{name}", value


def file_fingerprint(path: str) -> str:
    """Return SHA-256 of names, sizes and contents of a file, the files below a folder, or a pattern's matches.

    In a bucket, the store's checksum stands for the contents; for a local file above 8 MiB, its first and last MiB do.
    Returns "absent" if nothing exists.
    """
    files, root = fsspec.url_to_fs(path)
    try:
        found = files.glob(root, detail=True) if any(c in root for c in "*?[") else files.find(root, detail=True)
    except FileNotFoundError:  # the bucket does not exist
        found = {}
    if not found:
        return "absent"
    top = len(str(Path(root).parent))
    lines = [f"{name[top:]} {item['size']} {_content_hash(name, item)}" for name, item in sorted(found.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _content_hash(name: str, item: dict[str, Any]) -> str:
    for stored in ("crc32c", "md5Hash"):
        if stored in item:
            return item[stored]
    path = Path(name)
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        if item["size"] <= MAX_FULL_HASH_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        first = file.read(EDGE_BYTES)
        file.seek(-EDGE_BYTES, 2)
        return hashlib.sha256(first + file.read()).hexdigest()


if __name__ == "__main__":
    print(json.dumps(input_fingerprints(load(Path(sys.argv[1])))))
