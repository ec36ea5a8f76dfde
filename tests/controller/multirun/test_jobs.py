"""Jobs of a Hydra app as runs of Slipway, a job on a worker, and the launcher's own config and refusals."""

import ast
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from controller.config.compose import with_overrides
from controller.core.errors import ConfigError, SlipwayError
from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.gcp.folder_store import FolderClient
from controller.multirun.job import Recorder, plain_value
from controller.multirun.jobs import (
    Job,
    Request,
    command,
    define_jobs,
    describe_job,
    fetch_output,
    shared_overrides,
    shipped_files,
)
from controller.records.recorder import row_from_record, split_job
from controller.sweep.board import Board, BoardRow
from controller.sweep.definition import JobBuilder
from controller.sweep.sweep_session import open_definition
from tests.fakes.loopback import FakeBucket
from tests.golden import golden
from tests.paths import ROOT


@pytest.fixture
def request_(tmp_path: Path, home: Path) -> Request:
    lab = home.parent / "repository" / "lab"
    lab.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(lab.parent)], check=True)
    (lab / "app.py").touch()
    jobs = tuple(Job(f"lr={lr}", (f"lr={lr}", "note=${x}, 'y'"), tmp_path / lr) for lr in ("1", "2", "1"))
    given = ("cloud=local", "sweep.pods=2")
    return Request(
        lab, ("app.py",), jobs, ("multirun", "results"), given, "v5litepod-1", "", "", False, "", 1.0, False, False
    )


def ids(request: Request) -> list[str]:
    return [job.run_id for job in define_jobs(request, JobBuilder(request.folder, shipped_files())).jobs]


def test_a_job_is_the_same_run_whatever_python_and_hydra_left(request_: Request) -> None:
    before = ids(request_)
    assert before[0] == before[2] != before[1]
    assert before[0].startswith("app-")
    for name in ("multirun/1/loss.txt", "results/a/b.txt", "__pycache__/app.pyc"):
        (request_.folder / name).parent.mkdir(parents=True)
        (request_.folder / name).touch()
    assert ids(request_) == before
    assert ids(replace(request_, keep=True, given=(*request_.given, "sweep.pods=1"))) == before
    (request_.folder / "app.py").write_text("edited")
    assert ids(request_)[0] != before[0]


def test_a_job_starts_in_the_apps_folder_with_its_words_unchanged(request_: Request) -> None:
    words = ["python", "-m", "slipway_job.multirun.job", "--in", "lab", "app.py", "lr=1", "note=${x}, 'y'"]
    assert command(request_, request_.jobs[0].words) == words
    builder = JobBuilder(request_.folder, shipped_files())
    config = define_jobs(request_, builder).jobs[0].config
    assert list(config.program.command or ()) == words
    assert (config.sweep.on_failure, config.tpu.accelerator_type) == ("skip", "v5litepod-1")
    dated = replace(request_, own_folders=("multirun", "multirun/2026-11-23/05-48-12", "results"))
    assert shared_overrides(dated) == shared_overrides(request_), "folders inside another that is left out"
    stays = ["cleanup.on_success=keep" in shared_overrides(replace(request_, keep=keep)) for keep in (False, True)]
    assert stays == [False, True], "pods stay only while more jobs will come"
    with tarfile.open(fileobj=io.BytesIO(builder.build_plan(config).snapshot.archive)) as tar:
        assert {"lab/app.py", "slipway_job/multirun/job.py", "slipway_job/agent/transfers.py"} <= set(tar.getnames())


def test_batches_of_a_sweeper_are_one_sweep_which_shows_the_runs_of_earlier_ones(request_: Request) -> None:
    first, second, third = (replace(request_, jobs=(job,), batches="app, n_trials=3") for job in request_.jobs)
    builder = JobBuilder(request_.folder, shipped_files())
    found = [define_jobs(request, builder) for request in (first, second, third)]
    assert found[0].id == found[1].id != define_jobs(replace(first, batches="n_trials=4"), builder).id
    assert define_jobs(replace(first, batches=""), builder).id != define_jobs(replace(second, batches=""), builder).id
    earlier, now = found[0].jobs[0].run_id, found[1].jobs[0].run_id
    with open_definition(found[1]) as session:
        session.board_file.parent.mkdir(parents=True)
        lines = [BoardRow(earlier, "lr=1", state="finished"), BoardRow("app-killed", "lr=3", state="running")]
        Board([*lines, BoardRow(now, "lr=2", state="running")], session.board_file, Clock(), json_lines=False).close()
        assert [(row.run, row.state) for row in session.board_rows()] == [(earlier, "finished"), (now, "running")]
        assert len(session.summary_lines()) == 4
        [line] = replace(session, finished_runs={now}).summary_lines()  # nothing is left that takes time or money
        assert line == f"sweep    {found[1].id}: 1 run, 1 finished, 0 remaining"


def test_the_table_of_runs_shows_the_apps_words(request_: Request) -> None:
    job = define_jobs(request_, JobBuilder(request_.folder, shipped_files())).jobs[0]
    assert split_job(job.config.program.command or ()) == (["app.py"], ["lr=1", "note=${x}, 'y'"])
    module = command(replace(request_, app=("-m", "lab.app")), ("lr=1",))
    assert split_job(module) == (["-m", "lab.app"], ["lr=1"])
    record = golden("record")
    record["config"] |= {"program": {"command": module}}
    row = row_from_record(record)
    assert (row["program"], row["overrides"]) == ("lab.app", ["lr=1"])


def test_workers_without_hydra_are_found_before_anything_is_billed(request_: Request) -> None:
    cloud = replace(request_, given=("cloud.project=p",))
    with pytest.raises(ConfigError, match=r"hydra.launcher.requirements: .* do not include hydra-core"):
        ids(cloud)
    (request_.folder / "requirements.txt").write_text("hydra-core\n")
    assert ids(cloud)


def test_a_request_of_another_version_is_refused(request_: Request) -> None:
    body = json.loads(json.dumps({**vars(request_), "jobs": [vars(job) for job in request_.jobs]}, default=str))
    assert Request.from_json({"format": 1, **body}, "request") == request_
    with pytest.raises(SlipwayError, match="request has format 2"):
        Request.from_json({"format": 2, **body}, "request")


def output_of(folder: Path, *members: tarfile.TarInfo) -> GoogleClient:
    """A bucket in a folder that has the output of a job."""
    buffer, google = io.BytesIO(), FolderClient(Clock())
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO())
    google.upload(str(folder), "runs/app-1/output/worker-0.tar.gz", buffer.getvalue())
    return google


def test_outputs_are_unpacked_here_unless_they_are_absent_or_too_large(tmp_path: Path) -> None:
    google, bucket = output_of(tmp_path / "b", tarfile.TarInfo("./deep/er.txt")), str(tmp_path / "b")
    assert fetch_output(google, bucket, "app-1", tmp_path / "0", 1.0) == ""
    assert (tmp_path / "0" / "deep" / "er.txt").exists()
    why = fetch_output(google, bucket, "app-1", tmp_path / "1", 1e-6)
    assert "more than hydra.launcher.fetch_max_mb=1e-06" in why
    describe_job(tmp_path / "1", "b", "app-1", "finished", why)
    about = json.loads((tmp_path / "1" / "slipway.json").read_text())
    assert about["output"] == "gs://b/runs/app-1/output/worker-0.tar.gz"
    assert fetch_output(google, bucket, "app-2", tmp_path / "2", 1.0) == "the job left no output"


def test_links_and_paths_outside_the_folder_are_left_out(tmp_path: Path) -> None:
    link, inside, escape = map(tarfile.TarInfo, ("./latest", "./latest/x", "../escape.txt"))
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    google = output_of(tmp_path / "b", link, inside, escape)
    why = fetch_output(google, str(tmp_path / "b"), "app-1", tmp_path / "0", 1.0)
    assert why == "links, paths outside the folder and names that are taken were left out: ./latest, ../escape.txt"
    assert not (tmp_path / "escape.txt").exists()
    assert (tmp_path / "0" / "latest" / "x").is_file(), "the link was not made, so this is a folder"


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


def test_values_are_kept_as_json_has_them_and_others_are_named() -> None:
    assert [plain_value(value) for value in (np.float32(0.5), np.ones((1, 1)))] == [0.5, 1.0]
    assert plain_value({"a": (1, "a", None, True)}) == {"a": [1, "a", None, True]}
    for value in (np.ones(2), {1: 2}, object()):
        with pytest.raises(TypeError, match=f"a {type(value).__module__}.{type(value).__qualname__}"):
            plain_value(value)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("returned", "before", "kept", "said"),
    [
        (0.5, '{"loss": 1}', {"loss": 1, "return_value": 0.5}, ""),
        (0.5, "[1]", {"return_value": 0.5}, "summary.json is not a JSON object"),
        (0.5, "9" * 5000, {"return_value": 0.5}, "summary.json is not a JSON object"),
        (0.5, '{"a": ' * 90 + "1" + "}" * 90, {"return_value": 0.5}, "summary.json is nested too deeply"),
        (nested(60), '{"loss": 1}', {"loss": 1}, "a value that is too large or nested too deeply"),
        ([10**5000], '{"loss": 1}', {"loss": 1}, "a value that is too large or nested too deeply"),
        ({1: 2}, '{"loss": 1}', {"loss": 1}, "a builtins.dict"),
    ],
)
def test_whatever_an_app_returned_or_wrote_the_job_ends_as_it_did(
    returned: Any, before: str, kept: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SLIPWAY_RUN_DIR", str(tmp_path))
    (tmp_path / "summary.json").write_text(before)
    Recorder().on_job_end(None, SimpleNamespace(status=SimpleNamespace(name="COMPLETED"), return_value=returned))
    assert json.loads((tmp_path / "summary.json").read_text()) == kept
    assert said in capsys.readouterr().out


INSTALLED = "controller/installed"
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
    plugin = f"{INSTALLED}/hydra_plugins/slipway_launcher"
    shutil.copytree(ROOT / plugin, tmp_path / plugin)
    shutil.copytree(ROOT / "tests" / "fixtures" / "hydra_apps" / "structured", tmp_path / "app")
    (tmp_path / "controller" / "multirun").mkdir(parents=True)
    (tmp_path / "controller" / "multirun" / "jobs.py").write_text(CONTROLLER)
    (tmp_path / "ran").touch()
    return tmp_path


def multirun(place: Path, day: str, interrupt: int) -> tuple[int, str, list[dict[str, Any]]]:
    """The exit code, the output and the requests of a multirun that is interrupted after so many jobs."""
    (place / "interrupt").write_text(str(interrupt))
    (place / "requests").write_text("")
    words = ["hydra/launcher=slipway", "hydra/sweeper=growing", f"hydra.sweep.dir=multirun/{day}", "steps=10"]
    argv, environment = [sys.executable, "app.py", "-m", *words], {**os.environ, "PYTHONPATH": f"{place}/{INSTALLED}"}
    done = subprocess.run(argv, cwd=place / "app", env=environment, capture_output=True, text=True, check=False)
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


SETTINGS: dict[str, Any] = {
    "cloud": None, "pods": 1, "packages": None, "requirements": None, "setup": None, "overrides": [],
}  # fmt: skip


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / INSTALLED))
    from hydra_plugins.slipway_launcher import _app

    return _app


def config(hydra: str, **rest: Any) -> DictConfig:
    words = {"overrides": {"hydra": hydra.split()}, "job": {"num": "???", "name": "app"}}
    folders = {"run": {"dir": "outputs/${now:%Y}"}, "sweep": {"dir": "multirun/1"}}
    return OmegaConf.create({"hydra": {**words, **folders}, **rest})


def test_a_worker_gets_the_jobs_words_but_not_those_about_the_multirun(app: ModuleType) -> None:
    about = "hydra/launcher=slipway hydra.launcher.tpu=v6e-8 hydra/sweeper=optuna +hydra.sweeper.n_trials=3 "
    about += "hydra.sweep.dir=x hydra.mode=MULTIRUN hydra.run.dir=y "
    found = app.job_words(config(about + "hydra.verbose=true hydra/job_logging=none"), ["lr=1"], None)
    assert found == ["lr=1", "hydra.verbose=true", "hydra/job_logging=none"]
    numbered = app.job_words(config(""), ["lr=1"], 7)
    assert numbered == ["lr=1", "++hydra.job.num=7", "++hydra.job.id=7"]


def test_the_jobs_number_is_passed_on_where_the_config_refers_to_it(app: ModuleType) -> None:
    """And folders of outputs end where the time begins."""
    assert app.output_folders(config("")) == ["multirun", "multirun/1", "outputs"]
    assert app.refers_to_the_job_number(config("", model={"seed": "${hydra:job.num}"}))
    assert app.refers_to_the_job_number(config("", seed="${add:${hydra.job.id},1}"))
    assert not app.refers_to_the_job_number(config("", name="${hydra:job.name}"))


def test_settings_are_overrides_of_slipway(app: ModuleType) -> None:
    assert app.local_overrides(SETTINGS) == ["sweep.pods=1"]
    settings = {**SETTINGS, "cloud": "local", "requirements": "reqs.txt", "overrides": ["sweep.pods=3"]}
    words = ["cloud=local", "sweep.pods=1", "env.requirements=reqs.txt", "env.packages=requirements", "sweep.pods=3"]
    assert app.local_overrides(settings) == words
    commands = [["uv", "pip", "install", "a b"], ["sh", "-c", "echo '$X' ${y}"]]
    setup = app.local_overrides({**SETTINGS, "setup": commands})[-1]
    composed = OmegaConf.create(with_overrides({}, [setup]))
    assert OmegaConf.to_container(composed, resolve=True) == {"program": {"setup": commands}}
