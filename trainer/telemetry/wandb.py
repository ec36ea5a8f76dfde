"""Config and metrics to Weights & Biases, where `logging.wandb` asks for it: process 0 alone speaks to it.

A run has one id there, its own, through all its lives. After a resume the steps since the checkpoint come again, bit
for bit; W&B takes no step that is older than its last one, so that each counts once.
https://docs.wandb.ai/models/runs/resuming
"""

from __future__ import annotations

import logging
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from conf.schema.training.run_yaml import RunFile, RunFileError
from conf.schema.training.settings import Wandb

FINISH_SECONDS = 60
"""How long the end of a run waits for what has not arrived there yet."""
SERVICE_SECONDS = 300
"""How long W&B's own process may take to come up, on a machine that has just begun to compile."""
logger = logging.getLogger(__name__)


class WandbRun:
    """The run there. What goes wrong there is told, and training goes on: all of it is in the run's folder too."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, values: dict[str, float | None]) -> None:
        """The values of one line of metrics.jsonl; what is null is left out."""
        self._try(lambda: self._run.log({k: v for k, v in values.items() if v is not None}, step=step))

    def summarize(self, values: dict[str, Any]) -> None:
        """The results of the run."""
        self._try(lambda: self._run.summary.update(values))

    def finish(self) -> None:
        """Wait until all has arrived, but not for ever."""
        end = threading.Thread(target=lambda: self._try(self._run.finish), daemon=True)
        end.start()
        end.join(FINISH_SECONDS)
        if end.is_alive():
            logger.warning("logging.wandb: not all has arrived there after %d s", FINISH_SECONDS)

    def _try(self, act: Any) -> None:
        try:
            act()
        except Exception as error:  # whatever it is, it is none of the run's business
            logger.warning("logging.wandb: %s", _first_line(error))


def start_run(experiment: RunFile, folder: Path) -> WandbRun | None:
    """The run there, begun or gone on with; None where none is wanted, or it cannot be reached.

    Args:
        folder: of this worker; offline runs are written to `wandb` in it.

    Raises RunFileError where the package is missing.
    """
    settings = experiment.logging.wandb
    if settings is None:
        return None
    try:
        wandb = import_module("wandb")  # not among the packages that the types are checked with
    except ImportError:
        raise RunFileError("logging.wandb: the package wandb is not installed; set it to null, or install it") from None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return WandbRun(_init(wandb, settings, experiment, folder))
    except Exception as error:  # no network, a wrong key, no such team
        logger.warning("logging.wandb: goes without it, for %s", _first_line(error))
        return None


def _init(wandb: Any, settings: Wandb, experiment: RunFile, folder: Path) -> Any:
    """Nothing but config and metrics leaves this machine: no code, no output, no names of it."""
    quiet = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        host=experiment.pod.accelerator_type,
        save_code=False,
        silent=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
        x_service_wait=SERVICE_SECONDS,
    )
    config = experiment.model_dump(mode="json", exclude={"dir": True, "logging": {"wandb"}})
    return wandb.init(
        project=settings.project,
        entity=settings.entity,
        id=experiment.id,
        name=experiment.id,
        group=experiment.name,
        resume="allow",
        mode=settings.mode,
        dir=str(folder),
        config=config,
        settings=quiet,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
