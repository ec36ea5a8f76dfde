"""Hydra launcher `hydra/launcher=slipway`: each job of a multirun is a run of Slipway on a Cloud TPU pod.

Hydra imports every plugin whenever it starts, so this module imports nothing of Slipway. A process of its own drives
the jobs, `controller.multirun.jobs`: the app may have packages that are called `conf`, `controller` or `trainer` too.
"""

import atexit
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from ._app import app_words, job_words, local_overrides, output_folders, refers_to_the_job_number

log = logging.getLogger(__name__)

_PLACE = Path(__file__).resolve().parents[2]
ROOT = _PLACE / "slipway" / "packages" if (_PLACE / "slipway" / "packages").is_dir() else _PLACE.parents[1]
"""Folder of Slipway's packages: in site-packages, or the clone of an editable installation."""
MODULE = "controller.multirun.jobs"
START = f"import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module('{MODULE}', None, '__main__', True)"
"""`python -m` in a process that finds Slipway's packages first, whatever the app's folder holds."""
DETACH_SECONDS = 30.0
"""Time for the controller to release the pods after Ctrl-C."""
INTERRUPTED = 130


@dataclass
class SlipwayLauncherConf:
    """Keys of `hydra.launcher`; docs/hydra-launcher.md describes them."""

    _target_: str = "hydra_plugins.slipway_launcher.slipway_launcher.SlipwayLauncher"
    cloud: str | None = None
    tpu: str | None = None
    zone: str | None = None
    pods: int = 1
    name: str | None = None
    packages: str | None = None
    requirements: str | None = None
    setup: list[Any] | None = None
    fetch_max_mb: float = 200.0
    job_num: bool | None = None
    yes: bool = False
    take_over: bool = False
    overrides: list[str] = field(default_factory=list)


ConfigStore.instance().store(group="hydra/launcher", name="slipway", node=SlipwayLauncherConf, provider="slipway")


class SlipwayLauncherError(CompactHydraException):
    """The jobs could not be driven to their end; Slipway has printed why."""


class JobFailedError(CompactHydraException):
    """A job ended with an error; the message is that of the job's program."""


class SlipwayLauncher(Launcher):
    """Runs the jobs of a multirun on a pool of pods. Finished jobs are not repeated."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.config: DictConfig
        self.hydra_context: HydraContext
        self.task_function: TaskFunction
        self._release_request: dict[str, Any] = {}
        """What to ask for at exit, when no module of the app is left; empty: nothing."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context, self.task_function = config, hydra_context, task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; return what each returned, or the error that ended it."""
        setup_globals()
        allowed = getattr(self.hydra_context, "execution_whitelist", None)  # since Hydra 1.4
        told = {} if allowed is None else {"execution_whitelist": allowed}
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose, **told)
        configs = [self._job_config(words, initial_job_idx + n) for n, words in enumerate(job_overrides)]
        outputs = [Path(OmegaConf.select(config, "hydra.runtime.output_dir")) for config in configs]
        log.info("Launching %d jobs on Cloud TPU pods", len(configs))
        jobs = self._jobs(job_overrides, outputs, initial_job_idx)
        keep = self._expects_more_batches()
        request = self._request(jobs, keep=keep)
        if keep and not self._release_request:
            atexit.register(self._release)
            self._release_request = request | {"jobs": [], "keep": False}
        answers = self._drive(request)
        return [self._job_return(*each) for each in zip(configs, outputs, answers, strict=True)]

    def _job_config(self, words: Sequence[str], number: int) -> DictConfig:
        config = self.hydra_context.config_loader.load_sweep_config(self.config, list(words))
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        from hydra.core.hydra_config import HydraConfig

        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(config)  # `${hydra:…}` in sweep.dir and sweep.subdir means this job
        try:
            output = Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir)
        finally:
            HydraConfig.instance().cfg = before
        with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
            config.hydra.runtime.output_dir = str(output.absolute())
        return config

    def _jobs(self, batch: Sequence[Sequence[str]], outputs: Sequence[Path], first: int) -> list[dict[str, Any]]:
        in_all = set.intersection(*(set(words) for words in batch)) if len(batch) > 1 else set[str]()
        numbered = self.settings["job_num"]
        if numbered is None:
            numbered = refers_to_the_job_number(self.config)
        jobs = []
        for number, (words, output) in enumerate(zip(batch, outputs, strict=True), first):
            title = " ".join(filter_overrides([word for word in words if word not in in_all]))
            worker_words = job_words(self.config, words, number if numbered else None)
            jobs.append({"title": title or "(no overrides)", "words": worker_words, "output": str(output)})
        return jobs

    def _expects_more_batches(self) -> bool:
        """Return whether the sweeper may call `launch` again, as optimizers do; then the pods stay until the end."""
        sweeper = self.config.hydra.sweeper
        return not sweeper._target_.endswith(".BasicSweeper") or sweeper.get("max_batch_size") is not None

    def _request(self, jobs: list[dict[str, Any]], *, keep: bool) -> dict[str, Any]:
        settings, folder = self.settings, Path(self.config.hydra.runtime.cwd)
        app = app_words(self.config, self.task_function, folder)
        sweeper = OmegaConf.to_container(self.config.hydra.sweeper, resolve=False)
        return {
            "format": 1,
            "folder": str(folder),
            "app": app,
            "jobs": jobs,
            "own_folders": output_folders(self.config),
            "given": local_overrides(settings),
            "tpu": settings["tpu"] or "",
            "zone": settings["zone"] or "",
            "name": settings["name"] or "",
            "keep": keep,
            "batches": json.dumps([app, list(self.config.hydra.overrides.task), sweeper], default=str) if keep else "",
            "fetch_max_mb": settings["fetch_max_mb"],
            "yes": settings["yes"],
            "take_over": settings["take_over"],
        }

    def _drive(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Have the jobs driven; return the answers.

        Raises:
            SlipwayLauncherError: they were not driven to their end.
            KeyboardInterrupt: running jobs continue, and the same command re-attaches to them.
        """
        with tempfile.TemporaryDirectory(prefix="slipway-") as folder:
            asked, answered = Path(folder) / "request.json", Path(folder) / "answers.json"
            asked.write_text(json.dumps(request))
            code = _run_controller(asked, answered)
            if code == INTERRUPTED:
                raise KeyboardInterrupt
            if code:
                raise SlipwayLauncherError(f"Slipway ended with exit code {code}; its messages are above")
            return json.loads(answered.read_text())["jobs"] if request["jobs"] else []

    def _release(self) -> None:
        with suppress(SlipwayLauncherError, KeyboardInterrupt):
            self._drive(self._release_request)

    def _job_return(self, config: DictConfig, output: Path, answer: dict[str, Any]) -> JobReturn:
        own = OmegaConf.masked_copy(config, "hydra")
        with open_dict(config):
            task = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        failed = answer["state"] != "finished"
        value = JobFailedError(f"{answer['error']}\nresults: {answer['results']}") if failed else answer["return_value"]
        return JobReturn(
            overrides=list(config.hydra.overrides.task),
            cfg=task,
            hydra_cfg=own,
            working_dir=str(output),
            task_name=config.hydra.job.name,
            status=JobStatus.FAILED if failed else JobStatus.COMPLETED,
            _return_value=value,
        )


def _run_controller(request: Path, answers: Path) -> int:
    """Run the process that drives the jobs; return its exit code. It detaches as soon as the pipe to it closes."""
    reader, writer = os.pipe()
    words = [str(ROOT), str(request), str(answers), str(reader)]
    try:
        process = subprocess.Popen([sys.executable, "-P", "-c", START, *words], pass_fds=(reader,))
        os.close(reader)
        try:
            return process.wait()
        except KeyboardInterrupt:
            os.close(writer)
            writer = -1
            with suppress(subprocess.TimeoutExpired):
                process.wait(DETACH_SECONDS)
            raise
    finally:
        if writer >= 0:
            os.close(writer)
