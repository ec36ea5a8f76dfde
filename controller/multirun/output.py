"""Copies the output folder of a job from the bucket to this machine."""

import io
import shutil
import tarfile
from pathlib import Path

from controller.core.formats import dump
from controller.gcp.client import GoogleClient
from controller.gcp.errors import NotFoundError

ABOUT_FILE = "slipway.json"
"""File in a job's folder that names its run and where the rest of it is."""


def output_object(run_id: str) -> str:
    """Return the object with the output of worker 0; `job.py` uploads it."""
    return f"runs/{run_id}/output/worker-0.tar.gz"


def fetch_output(google: GoogleClient, bucket: str, run_id: str, folder: Path, max_mb: float) -> str:
    """Unpack worker 0's output into a folder; return why that was not done, or an empty text."""
    name = output_object(run_id)
    try:
        size = int(google.call("storage", "objects.get", bucket=bucket, object=name)["size"])
        if size > max_mb * 1e6:
            return f"{size / 1e6:.0f} MB are more than hydra.launcher.fetch_max_mb={max_mb:g}"
        content = google.download(bucket, name)
    except NotFoundError:
        return "the job left no output"
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
        left_out = [member.name for member in tar if not _extract(tar, member, folder)]
    return f"links and paths outside the folder were left out: {', '.join(left_out)}" if left_out else ""


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> bool:
    """Unpack one file or folder; return False for links, devices and paths outside the folder.

    Not with `filter="data"`, which Python 3.11.0 to 3.11.3 do not have.
    """
    target = (folder / member.name).resolve()
    if not target.is_relative_to(folder.resolve()) or not (member.isfile() or member.isdir()):
        return False
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return True
    target.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None  # it is a file
    with source, target.open("wb") as file:
        shutil.copyfileobj(source, file)
    return True


def describe_job(folder: Path, bucket: str, run_id: str, state: str, not_fetched: str) -> None:
    """Write into a job's folder which run it was, and where its files are."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"run": run_id, "state": state, "results": f"gs://{bucket}/runs/{run_id}"}
    if not_fetched:
        about |= {"output": f"gs://{bucket}/{output_object(run_id)}", "not_fetched": not_fetched}
    (folder / ABOUT_FILE).write_text(dump(about, indent=1))
