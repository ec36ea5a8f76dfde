"""A job on a worker: the app as Python starts it there, with its output and its return value kept."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from controller.multirun.jobs import shipped_files
from controller.multirun.recorder import plain_value
from tests.controller.agent.bucket import FakeBucket

APP = """
import os, sys
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base=None, config_path=None)
def main(config):
    Path(HydraConfig.get().runtime.output_dir, "seen.txt").write_text(f"{config.x} {os.getcwd()} {__name__}")
    if config.x == "bad":
        raise ValueError("it is bad")
    return [config.x, 1.5]

if __name__ == "__main__":
    main()
"""


@dataclass
class Worker:
    """A folder with what a worker gets: the app in `lab/`, and the package that runs its jobs."""

    work: Path
    bucket: FakeBucket

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        own = {"SLIPWAY_RUN_DIR": str(self.work.parent), "SLIPWAY_RUN_ID": "app-1", "SLIPWAY_BUCKET": "gs://b"}
        environment = {**os.environ, **own, "SLIPWAY_WORKER": "0", "SLIPWAY_STORAGE_ROOT": self.bucket.url}
        environment.pop("PYTHONPATH", None)  # no module of Slipway is there
        command = [sys.executable, "-m", "slipway_job.multirun.job", *words]
        return subprocess.run(command, cwd=self.work, env=environment, capture_output=True, text=True, check=False)

    def uploaded(self, name: str) -> str:
        with tarfile.open(fileobj=io.BytesIO(self.bucket.objects["runs/app-1/output/worker-0.tar.gz"])) as tar:
            member = tar.extractfile(f"./{name}")
            assert member is not None
            return member.read().decode()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    work = tmp_path / "it's a run" / "work"
    for name, source in shipped_files().items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(source.read_bytes())
    (work / "lab").mkdir()
    (work / "lab" / "app.py").write_text(APP)
    with FakeBucket.serving() as bucket:
        yield Worker(work, bucket)


def test_an_apps_return_value_and_output_are_kept(worker: Worker) -> None:
    (worker.work.parent / "summary.json").write_text('{"loss": 2}')
    done = worker.run("--in", "lab", "app.py", "+x=good")
    assert done.returncode == 0, done.stderr
    assert worker.uploaded("seen.txt") == f"good {worker.work}/lab __main__"
    assert "x: good" in worker.uploaded(".hydra/config.yaml")
    summary = json.loads((worker.work.parent / "summary.json").read_text())
    assert summary == {"loss": 2, "return_value": ["good", 1.5]}


def test_an_app_that_fails_keeps_its_output_and_has_no_value(worker: Worker) -> None:
    done = worker.run("-m", "lab.app", "+x=bad")
    assert done.returncode == 1
    assert "ValueError: it is bad" in done.stderr
    assert worker.uploaded("seen.txt").startswith("bad ")
    assert not (worker.work.parent / "summary.json").exists()


def test_an_output_that_cannot_be_kept_is_a_failure(worker: Worker) -> None:
    worker.bucket.faults = [404] * 5
    done = worker.run("lab/app.py", "+x=good")
    assert done.returncode == 1
    assert "slipway: cannot keep the job's output: the upload of gs://b/runs/app-1/output" in done.stderr


@pytest.mark.parametrize(
    ("value", "plain"),
    [(np.float32(0.5), 0.5), (np.ones((1, 1)), 1.0), ((1, "a", None), [1, "a", None]), ({"a": [True]}, {"a": [True]})],
)
def test_values_are_kept_as_json_has_them(value: object, plain: object) -> None:
    assert plain_value(value) == plain


@pytest.mark.parametrize("value", [np.ones(2), {1: 2}, object()])
def test_other_values_are_named(value: object) -> None:
    with pytest.raises(TypeError, match=f"a {type(value).__module__}.{type(value).__qualname__}"):
        plain_value(value)
