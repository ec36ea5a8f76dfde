"""Turns the jobs of Hydra's launcher, which asks in JSON, into runs of a sweep, drives them, and copies their outputs.

The same jobs have the same run ids every time.

Run as a program, with the arguments REQUEST ANSWERS LIFELINE, it is what the launcher starts: a process of its own,
because the app's process has modules, signals and a Hydra of its own. LIFELINE is the number of a pipe that the
launcher holds open: when it closes, because of Ctrl-C or a kill, this process detaches from the jobs.
"""

import gzip
import io
import json
import os
import shutil
import signal
import sys
import tarfile
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from controller.config.compose import compose, compose_raw, sound
from controller.connect import open_context, project_of
from controller.core.errors import ConfigError, SlipwayError
from controller.core.events import Events
from controller.core.json_documents import checked, dump, stamped
from controller.core.text import object_url, one_line, sanitized_output
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import NotFoundError
from controller.inputs.git import repository_root
from controller.inputs.own_program import OwnProgram, quote_words
from controller.multirun.job import RETURN_VALUE
from controller.plan.build import build_plan
from controller.records.ledger import Ledger
from controller.records.recorder import JOB_MODULE
from controller.run.options import RunOptions
from controller.sweep.definition import JobBuilder, SweepDefinition, with_pod_number
from controller.sweep.grid import Variant
from controller.sweep.pod_pool import RunsFailedError, drive_session
from controller.sweep.sweep_session import SweepSession, delete_if_unused, open_definition


@dataclass(frozen=True)
class Job:
    """One job of a multirun.

    Attributes:
        title: the overrides in which it differs from the others.
        words: the app's arguments on a worker.
        output: folder on this machine for the job's files.
    """

    title: str
    words: tuple[str, ...]
    output: Path


@dataclass(frozen=True)
class Request:
    """Jobs of one app.

    Attributes:
        folder: folder in which the app was started.
        app: how Python starts it there: `("app.py",)` or `("-m", "lab.app")`.
        jobs: the jobs; none: delete the pods that `keep` has left.
        own_folders: folders of the app's outputs on this machine, which are not shipped.
        given: Slipway's overrides.
        tpu: slice type; empty: that of the config.
        zone: zone of the pods; empty: that of the slice type.
        name: name of the runs; empty: derived from the app.
        keep: whether more jobs will follow, so that the pods stay.
        batches: what all batches of a sweeper have in common, so that they are one sweep; empty for a single batch.
        fetch_max_mb: largest output, in MB, that is copied to this machine.
        yes: whether to create billed resources without a prompt.
        take_over: whether to replace another controller of the same jobs.
    """

    folder: Path
    app: tuple[str, ...]
    jobs: tuple[Job, ...]
    own_folders: tuple[str, ...]
    given: tuple[str, ...]
    tpu: str
    zone: str
    name: str
    keep: bool
    batches: str
    fetch_max_mb: float
    yes: bool
    take_over: bool

    @classmethod
    def from_json(cls, body: Mapping[str, Any], where: str) -> "Request":
        """Read a request. Raises ConfigError if another version of Slipway wrote it."""
        known = checked(dict(body), where)
        jobs = tuple(Job(job["title"], tuple(job["words"]), Path(job["output"])) for job in known.pop("jobs"))
        lists = {name: tuple(known.pop(name)) for name in ("app", "own_folders", "given")}
        return cls(folder=Path(known.pop("folder")), jobs=jobs, **lists, **known)


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
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
            left_out = [member.name for member in tar if not _extract(tar, member, folder)]
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        return f"{object_url(bucket, name)} is damaged: {one_line(str(error))}"
    said = "links, paths outside the folder and names that are taken were left out"
    return f"{said}: {', '.join(left_out)}" if left_out else ""


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> bool:
    """Unpack one file or folder; return False for links, devices and paths outside the folder.

    Not with `filter="data"`, which Python 3.11.0 to 3.11.3 do not have.
    """
    try:
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
    except (ValueError, IsADirectoryError, NotADirectoryError, FileExistsError):  # no name, or one that another took
        return False
    return True


def describe_job(folder: Path, bucket: str, run_id: str, state: str, not_fetched: str) -> None:
    """Write into a job's folder which run it was, and where its files are."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"run": run_id, "state": state, "results": f"gs://{bucket}/runs/{run_id}"}
    if not_fetched:
        about |= {"output": f"gs://{bucket}/{output_object(run_id)}", "not_fetched": not_fetched}
    (folder / ABOUT_FILE).write_text(dump(about, indent=1))


PACKAGE = JOB_MODULE.partition(".")[0]
"""Package on the workers that runs a job."""
SHIPPED = (
    "__init__.py", "agent/__init__.py", "agent/fs.py", "agent/worker_processes.py", "agent/transfers.py",
    "multirun/__init__.py", "multirun/job.py",
)  # fmt: skip
"""Its files, relative to `controller/`."""
DEFAULTS = ("sweep.on_failure=skip",)
"""Overrides unless the user sets the key: a job that failed is not tried again, as with Hydra's other launchers."""


@dataclass(frozen=True)
class Answer:
    """What became of a job."""

    run: str
    state: str
    """finished, failed or cancelled."""
    return_value: Any
    error: str
    results: str

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def run_jobs(request: Request) -> list[Answer]:
    """Drive the jobs to their end; return what became of each, in order.

    Raises SlipwayError if nothing was started, or another controller has taken over.
    """
    builder = JobBuilder(request.folder, shipped_files())
    definition = define_jobs(request, builder)
    unique = {job.run_id: job for job in definition.jobs}  # a sweeper may propose a job twice
    once = replace(definition, jobs=tuple(unique.values()))
    errors: Mapping[str, str] = {}
    options = RunOptions(yes=request.yes, take_over=request.take_over)
    with open_definition(once) as session:
        try:
            drive_session(session, options, builder)
        except RunsFailedError as failed:
            errors = failed.errors
        answers = {run: _answer(session, run, errors) for run in unique}
        for job, asked in zip(definition.jobs, request.jobs, strict=True):
            run, bucket = job.run_id, session.bucket
            why = fetch_output(session.context.google, bucket, run, asked.output, request.fetch_max_mb)
            describe_job(asked.output, bucket, run, answers[run].state, why)
    return [answers[job.run_id] for job in definition.jobs]


def _answer(session: SweepSession, run: str, errors: Mapping[str, str]) -> Answer:
    results = f"gs://{session.bucket}/runs/{run}"
    result = Ledger(session.context.google, session.bucket, run).result()
    if result is not None:
        return Answer(run, "finished", result.summary.get(RETURN_VALUE), "", results)
    if run in errors:
        return Answer(run, "failed", None, errors[run], results)
    return Answer(run, "cancelled", None, f"{run} was cancelled; the same command continues it", results)


def define_jobs(request: Request, builder: JobBuilder) -> SweepDefinition:
    """Define the sweep of the jobs. Raises ConfigError if an override is wrong, or the app would not be shipped."""
    shared = shared_overrides(request)
    variants = [
        Variant((*shared, f"program.command={quote_words(command(request, job.words))}"), (job.title,))
        for job in request.jobs
    ]
    jobs = tuple(builder.build_jobs(variants))
    first = jobs[0].config
    if first.env.packages == "lock" and not first.program.setup:  # only a billed pod would notice that it has no Hydra
        raise ConfigError(
            f"hydra.launcher.requirements: {request.folder} has no uv.lock, requirements.txt or pyproject.toml, and "
            "Slipway's own packages do not include hydra-core; name a requirements file that does, or set "
            "hydra.launcher.packages=image if the workers' Python has it"
        )
    return SweepDefinition(first, jobs, request.folder, batches=request.batches)


def shared_overrides(request: Request) -> tuple[str, ...]:
    """Return the overrides of all jobs: everything but the command."""
    app = OwnProgram(("python", *request.app), request.folder, request.tpu, request.zone, request.name)
    words = [word for word in app.overrides(request.given) if not word.startswith("program.command=")]
    kept = ["cleanup.on_success=keep"] if request.keep else []
    return (*DEFAULTS, *words, *kept, *_without_outputs(request, words))


def _without_outputs(request: Request, words: Sequence[str]) -> list[str]:
    """Return the override that keeps the app's outputs out of its code: otherwise each multirun would be a new one."""
    top = repository_root(request.folder).resolve()
    places = [Path(request.folder, folder).resolve() for folder in request.own_folders]
    outermost = [place for place in places if not any(other in place.parents for other in places)]
    inside = [f"/{place.relative_to(top).as_posix()}/" for place in outermost if top in place.parents]
    excluded = compose_raw(words, extra_dir=request.folder / "slipway")["code"]["exclude"]
    return [f"code.exclude={quote_words([*excluded, *inside])}"]


def command(request: Request, words: tuple[str, ...]) -> list[str]:
    """Return the command of a job on a worker."""
    place = request.folder.resolve().relative_to(repository_root(request.folder).resolve()).as_posix()
    inside = [] if place == "." else ["--in", place]
    return ["python", "-m", JOB_MODULE, *inside, *request.app, *words]


def shipped_files() -> dict[str, Path]:
    """Return the files that run a job on a worker, by their path in the shipped tree."""
    own = Path(__file__).parents[1]
    return {f"{PACKAGE}/{name}": own / name for name in SHIPPED}


def release_pods(request: Request) -> None:
    """Delete the pods that were kept for further jobs, unless something runs there or the config keeps them."""
    config = sound(compose(shared_overrides(request), extra_dir=request.folder / "slipway"))
    if config.cleanup.on_success != "delete":
        return
    for number in range(1, config.sweep.pods + 1):
        numbered = with_pod_number(config, number)
        with open_context(numbered) as (context, _):
            context.events = Events(context.clock)
            plan = build_plan(numbered, project_of(numbered), request.folder)
            delete_if_unused(plan, context, "the multirun has no more jobs")


def main(request_file: str, answers_file: str, lifeline: str) -> int:
    """Run the jobs of the request and write the answers; return the exit code of `slipway`."""
    os.umask(0o077)
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to both; the launcher decides
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    threading.Thread(target=_watch, args=(int(lifeline),), daemon=True, name="lifeline").start()
    try:
        request = Request.from_json(json.loads(Path(request_file).read_text()), request_file)
        os.chdir(request.folder)
        if not request.jobs:
            release_pods(request)
            return 0
        answers = [answer.to_json() for answer in run_jobs(request)]
        Path(answers_file).write_text(json.dumps(stamped({"jobs": answers})))
    except SlipwayError as error:
        for line in error.problems if isinstance(error, ConfigError) else [str(error)]:
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _watch(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns at the end of the file
    os.kill(os.getpid(), signal.SIGUSR1)


if __name__ == "__main__":
    with sanitized_output():
        sys.exit(main(*sys.argv[1:]))
