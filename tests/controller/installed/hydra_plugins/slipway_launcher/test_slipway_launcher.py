"""The launcher under Hydra itself and a sweeper that calls it several times; a fake controller runs the jobs."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

CONTROLLER = '''
"""Remembers finished jobs, and is interrupted when as many have run as the file `interrupt` says."""
import json, pathlib, sys

home = pathlib.Path(__file__).parents[2]
request = json.loads(pathlib.Path(sys.argv[1]).read_text())
with (home / "requests").open("a") as log:
    log.write(json.dumps(request) + "\\n")
answers, limit = [], int((home / "interrupt").read_text())
for job in request["jobs"]:
    ran = (home / "ran").read_text().splitlines()
    [rate] = [word for word in job["words"] if word.startswith("lr=")]
    if rate not in ran:
        if len(ran) == limit:
            sys.exit(130)
        (home / "ran").write_text("\\n".join([*ran, rate]))
    answer = {"run": "app-1", "state": "finished", "error": "", "results": ""}
    answers.append(answer | {"return_value": 10 * float(rate[3:])})
pathlib.Path(sys.argv[2]).write_text(json.dumps({"format": 1, "jobs": answers}))
'''


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the launcher as it is installed in a clone, the fake controller beside it, and an app."""
    plugin = "controller/installed/hydra_plugins/slipway_launcher"
    shutil.copytree(ROOT / plugin, tmp_path / plugin)
    shutil.copytree(ROOT / "tests" / "fixtures" / "hydra_apps" / "structured", tmp_path / "app")
    (tmp_path / "controller" / "multirun").mkdir(parents=True)
    (tmp_path / "controller" / "multirun" / "__main__.py").write_text(CONTROLLER)
    (tmp_path / "ran").touch()
    return tmp_path


def multirun(place: Path, day: str, interrupt: int) -> tuple[int, str, list[dict[str, Any]]]:
    """The exit code, the output and the requests of a multirun that is interrupted after so many jobs."""
    (place / "interrupt").write_text(str(interrupt))
    (place / "requests").write_text("")
    words = ["hydra/launcher=slipway", "hydra/sweeper=growing", f"hydra.sweep.dir=multirun/{day}", "steps=10"]
    done = subprocess.run(
        [sys.executable, "app.py", "-m", *words],
        cwd=place / "app",
        env={**os.environ, "PYTHONPATH": str(place / "controller" / "installed")},
        capture_output=True,
        text=True,
        check=False,
    )
    requests = [json.loads(line) for line in (place / "requests").read_text().splitlines()]
    return done.returncode, done.stdout + done.stderr, requests


def test_a_sweeper_with_growing_batches_goes_on_where_it_was_interrupted(place: Path) -> None:
    code, out, requests = multirun(place, "monday", 4)
    assert code != 0
    assert [len(request["jobs"]) for request in requests] == [1, 2, 3, 0]
    before = (place / "ran").read_text().splitlines()
    assert len(before) == 4
    code, out, again = multirun(place, "tuesday", 100)
    assert code == 0, out
    tried = ast.literal_eval(out.rpartition("tried ")[2].splitlines()[0])
    rates = [rate for rate, _ in tried]
    assert (place / "ran").read_text().splitlines() == [f"lr={rate}" for rate in rates]
    assert [value for _, value in tried] == [10 * rate for rate in rates]
    assert rates[:3] == [0.4, 0.2, 0.1]  # the second batch halves the first, the third the best of the second
    assert [len(request["jobs"]) for request in again] == [1, 2, 3, 0]
    assert [request["keep"] for request in again] == [True, True, True, False]
    assert len({request["batches"] for request in [*requests[:3], *again[:3]]}) == 1  # one sweep, on any day
    assert [job["words"] for job in again[2]["jobs"]] == [["steps=10", f"lr={rate}"] for rate in rates[3:]]
