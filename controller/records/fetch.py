"""Download the files of a run from its bucket, and choose one of its checkpoints.

A file is downloaded in parts under a temporary name, which holds the object's generation, and renamed at the end. A
second download continues after the last part, and skips files that are complete.
"""

import base64
import hashlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.core.errors import CloudError, ConfigError
from controller.core.json_documents import checked
from controller.core.text import finite_number, is_folder, object_url, one_line
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import NotFoundError
from controller.records.ledger import parse_record
from controller.records.local_names import content_problem, split_names

PART_BYTES = 8 << 20
ON_THEIR_WAY = "parts/"
"""Folder of what pods have yet to join to files, or were killed over: see trainer/telemetry/uploads.py."""


@dataclass(frozen=True)
class RemoteFile:
    """Object of a run; `path` is relative to the run's folder in the bucket."""

    name: str
    path: str
    size: int
    generation: str
    md5: str
    """MD5 in Base64; empty for composite objects."""


def list_files(google: GoogleClient, bucket: str, prefix: str, path: str) -> list[RemoteFile]:
    """List the files of a run below a path, which is a file or a folder; "" lists all.

    Raises ConfigError, which names what there is, if there are none.
    """
    wanted = path.strip("/")
    every = list(_list_objects(google, bucket, f"{prefix}/"))
    found = [f for f in every if not wanted or f.path == wanted or f.path.startswith(f"{wanted}/")]
    if not found:
        top = sorted({f.path.partition("/")[0] + ("/" if "/" in f.path else "") for f in every})
        there = f"it has {', '.join(map(one_line, top))}" if top else "the bucket has no files of this run"
        raise ConfigError(f"get: {object_url(bucket, f'{prefix}/{wanted}')}: no such file or folder; {there}")
    return found


def _list_objects(google: GoogleClient, bucket: str, prefix: str) -> Iterator[RemoteFile]:
    for item in google.objects(bucket, prefix, "name,size,generation,md5Hash"):
        path = item["name"].removeprefix(prefix)
        # an empty object stands for a folder
        if path and not path.endswith("/") and not path.startswith(ON_THEIR_WAY):
            size, generation = int(item["size"]), str(item["generation"])
            yield RemoteFile(item["name"], path, size, generation, item.get("md5Hash", ""))


def local_files(files: Sequence[RemoteFile], folder: Path) -> tuple[dict[Path, RemoteFile], dict[str, str]]:
    """Return where each file goes, and why each other one is not written, by its path: see `local_names`."""
    places, refused = split_names(file.path for file in files)
    return {folder / places[file.path]: file for file in files if file.path in places}, refused


def is_complete(file: RemoteFile, target: Path) -> bool:
    """Return whether the target has the object's content already; without a checksum, its size decides."""
    if not target.is_file() or target.stat().st_size != file.size:
        return False
    return not file.md5 or _md5(target) == file.md5


def fetch_file(
    google: GoogleClient, bucket: str, file: RemoteFile, target: Path, moved: Callable[[int], object]
) -> None:
    """Download a file, continuing where an earlier download of the same generation stopped.

    Raises CloudError if the content is not what the object's checksum says, or is obeyed by tools, or the object has
    changed meanwhile.

    Args:
        google: client of the bucket's project.
        bucket: name of the bucket.
        file: object to download.
        target: where the file goes; an earlier file there is replaced at the end.
        moved: called with the number of bytes after each part.
    """
    where = object_url(bucket, file.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{file.generation}.part")
    done = partial.stat().st_size if partial.exists() else 0
    if done > file.size:
        partial.unlink()
        done = 0
    moved(done)
    with partial.open("ab") as out:
        while done < file.size:
            end = min(done + PART_BYTES, file.size)
            try:
                part = google.download_range(bucket, file.name, file.generation, done, end)
            except NotFoundError:
                raise CloudError(f"{where} was replaced during the download; try again") from None
            if len(part) != end - done:
                raise CloudError(f"{where}: expected {end - done} bytes, got {len(part)}; try again")
            out.write(part)
            done = end
            moved(len(part))
    if file.md5 and _md5(partial) != file.md5:
        partial.unlink()
        raise CloudError(f"{where}: the downloaded content does not match its checksum; try again")
    if problem := content_problem(target.name, partial):
        partial.unlink()
        raise CloudError(f"{where} {problem}")
    partial.replace(target)


def _md5(path: Path) -> str:
    with path.open("rb") as content:
        return base64.b64encode(
            hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).digest()
        ).decode()


LATEST, BEST = "latest", "best"
MARK = "commit_success.txt"
"""File that Orbax writes last into a checkpoint."""
SCORES_FILE = "scores.json"


def choose_step(google: GoogleClient, bucket: str, run_id: str, wanted: str, key: str) -> int:
    """Return the step of a complete checkpoint.

    Raises ConfigError if the run has no such checkpoint; the message names those that it has.

    Args:
        google: client of the bucket's project.
        bucket: name of the bucket, or the folder of `cloud=here`.
        run_id: id of the run.
        wanted: LATEST, BEST or a step.
        key: what the user gave it with; begins the message.
    """
    steps = complete_steps(google, bucket, run_id)
    if not steps:
        raise ConfigError(
            f"{key}: {run_id} has no complete checkpoint in {object_url(bucket, f'runs/{run_id}/checkpoints')} yet; "
            "the bundled trainer saves one every checkpoint.save_interval updates"
        )
    there = f"{run_id} has checkpoints of steps {', '.join(map(str, steps))}"
    if wanted == LATEST:
        return steps[-1]
    if wanted == BEST:
        best = _best_step(google, bucket, run_id, steps)
        if best is None:
            raise ConfigError(f"{key}: {run_id} did not record a best checkpoint (checkpoint.best); {there}")
        return best
    if int(wanted) not in steps:
        raise ConfigError(f"{key}: there is no checkpoint of step {wanted}; {there}")
    return int(wanted)


def complete_steps(google: GoogleClient, bucket: str, run_id: str) -> list[int]:
    """Return the steps of the run's complete checkpoints, in order."""
    prefix = f"runs/{run_id}/checkpoints/"
    names = (item["name"].removeprefix(prefix) for item in google.objects(bucket, prefix))
    found = (re.fullmatch(rf"(\d+)/{re.escape(MARK)}", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def _best_step(google: GoogleClient, bucket: str, run_id: str, steps: list[int]) -> int | None:
    name = f"runs/{run_id}/{SCORES_FILE}"
    if (content := google.read(bucket, name)) is None:
        return None
    mode, known = parse_record(content, _parse_scores, object_url(bucket, name))
    scores = {step: value for step, value in known.items() if step in steps and value is not None}
    if not scores:
        return None
    return (min if mode == "min" else max)(sorted(scores), key=scores.__getitem__)


def _parse_scores(body: Any, where: str) -> tuple[str, dict[int, float | None]]:
    known = checked(body, where)
    return known["mode"], {int(step): finite_number(value) for step, value in known["scores"].items()}


def fetch_checkpoint(
    google: GoogleClient, bucket: str, run_id: str, step: int, state: Path, moved: Callable[[str, int, int], object]
) -> Path:
    """Return the folder of a checkpoint on this machine, below a folder with the run's run.yaml and tokenizer.

    That of `cloud=here` is where it is. Others are copied to `state`/weights/RUN, which keeps one checkpoint per run:
    an interrupted copy continues, and a second call copies nothing. Raises ConfigError if the copy cannot be written.

    Args:
        google: client of the bucket's project.
        bucket: name of the bucket, or the folder of `cloud=here`.
        run_id: id of the run.
        step: number of a complete checkpoint.
        state: state folder of this machine.
        moved: called with a file's path, the bytes copied since the last call, and those of all missing files.
    """
    if is_folder(bucket):
        return Path(bucket) / "runs" / run_id / "checkpoints" / str(step)
    folder = state / "weights" / run_id
    prefix = f"runs/{run_id}"
    files = [
        file
        for file in list_files(google, bucket, prefix, "")
        if (file.path == "run.yaml" or file.path.startswith(("tokenizer/", f"checkpoints/{step}/")))
    ]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in (folder / "checkpoints").glob("*"):
            if other.name != str(step):
                shutil.rmtree(other)
        targets, refused = local_files(files, folder)
        for path, why in refused.items():
            print(f"warning: not copied: {one_line(path)}: {why}", file=sys.stderr)
        missing = {target: file for target, file in targets.items() if not is_complete(file, target)}
        total = sum(file.size for file in missing.values())
        for target, file in missing.items():

            def advance(size: int, path: str = file.path) -> None:
                moved(path, size, total)

            fetch_file(google, bucket, file, target, advance)
    except OSError as error:
        raise ConfigError(f"run.state_dir: {folder} cannot be written: {error.strerror}") from None
    return folder / "checkpoints" / str(step)
