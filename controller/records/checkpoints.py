"""Checkpoints of a run in its bucket: which there are, which is the best, and a copy on this machine."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from controller.core.errors import ConfigError
from controller.core.text import is_folder, object_url
from controller.gcp.client import GoogleClient
from controller.gcp.errors import NotFoundError
from controller.records.fetch import RemoteFile, fetch_file, is_complete, list_files, local_path

LATEST, BEST = "latest", "best"
MARK = "commit_success.txt"
"""File that Orbax writes last into a checkpoint."""
SCORES_FILE = "scores.json"


def choose_step(google: GoogleClient, bucket: str, run_id: str, wanted: str, key: str) -> int:
    """Return the step of a complete checkpoint.

    Args:
        google: client of the bucket's project.
        bucket: name of the bucket, or the folder of `cloud=here`.
        run_id: id of the run.
        wanted: LATEST, BEST or a step.
        key: what the user gave it with; begins the message.

    Raises:
        ConfigError: the run has no such checkpoint; the message names those that it has.
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
    try:
        items = list(google.list_all("storage", "objects.list", "items", bucket=bucket, prefix=prefix))
    except NotFoundError:
        return []
    found = (re.fullmatch(rf"(\d+)/{re.escape(MARK)}", item["name"].removeprefix(prefix)) for item in items)
    return sorted(int(match[1]) for match in found if match)


def _best_step(google: GoogleClient, bucket: str, run_id: str, steps: list[int]) -> int | None:
    try:
        known: dict[str, Any] = json.loads(google.download(bucket, f"runs/{run_id}/{SCORES_FILE}"))
    except NotFoundError:
        return None
    scores = {int(step): value for step, value in known["scores"].items() if int(step) in steps}
    if not scores:
        return None
    return (min if known["mode"] == "min" else max)(sorted(scores), key=scores.__getitem__)


def fetch_checkpoint(
    google: GoogleClient, bucket: str, run_id: str, step: int, state: Path, moved: Callable[[str, int, int], object]
) -> Path:
    """Return the folder of a checkpoint on this machine, below a folder with the run's run.yaml and tokenizer.

    That of `cloud=here` is where it is. Others are copied to `state`/weights/RUN, which keeps one checkpoint per run:
    an interrupted copy continues, and a second call copies nothing.

    Args:
        google: client of the bucket's project.
        bucket: name of the bucket, or the folder of `cloud=here`.
        run_id: id of the run.
        step: number of a complete checkpoint.
        state: state folder of this machine.
        moved: called with a file's path, the bytes copied since the last call, and those of all missing files.

    Raises:
        ConfigError: the copy cannot be written.
    """
    if is_folder(bucket):
        return Path(bucket) / "runs" / run_id / "checkpoints" / str(step)
    folder = state / "weights" / run_id
    prefix = f"runs/{run_id}"
    files = [file for file in list_files(google, bucket, prefix, "") if _is_needed(file, step)]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in (folder / "checkpoints").glob("*"):
            if other.name != str(step):
                shutil.rmtree(other)
        missing = [file for file in files if not is_complete(file, local_path(folder, file.path))]
        total = sum(file.size for file in missing)
        for file in missing:
            path = file.path

            def advance(size: int, path: str = path) -> None:
                moved(path, size, total)

            fetch_file(google, bucket, file, local_path(folder, path), advance)
    except OSError as error:
        raise ConfigError(f"run.state_dir: {folder} cannot be written: {error.strerror}") from None
    return folder / "checkpoints" / str(step)


def _is_needed(file: RemoteFile, step: int) -> bool:
    return file.path == "run.yaml" or file.path.startswith(("tokenizer/", f"checkpoints/{step}/"))
