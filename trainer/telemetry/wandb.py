"""Log config and metrics to Weights & Biases if `logging.wandb` is set; only process 0 connects.

A run keeps one id through all its attempts. After a resume the steps since the checkpoint are repeated, bit for bit;
W&B ignores steps older than its last one, so each counts once. https://docs.wandb.ai/models/runs/resuming
"""

import logging
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from conf.schema.training.run_yaml import RunFile, RunFileError
from conf.schema.training.settings import Wandb
from trainer.checkpoint.storage import first_line

FINISH_SECONDS = 60
"""Seconds that the end of a run waits for pending uploads."""
SERVICE_SECONDS = 300
"""Startup timeout of W&B's own process, on a machine that has just begun to compile."""
logger = logging.getLogger(__name__)


class WandbRun:
    """A W&B run. Errors are printed and training continues; all data are in the run's folder too."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, values: dict[str, float | None]) -> None:
        """Log one line of metrics.jsonl, without its nulls."""
        self._attempt(lambda: self._run.log({k: v for k, v in values.items() if v is not None}, step=step))

    def summarize(self, values: dict[str, Any]) -> None:
        self._attempt(lambda: self._run.summary.update(values))

    def finish(self) -> None:
        """Wait for uploads to finish, up to a timeout."""
        end = threading.Thread(target=lambda: self._attempt(self._run.finish), daemon=True)
        end.start()
        end.join(FINISH_SECONDS)
        if end.is_alive():
            logger.warning("logging.wandb: uploads did not finish within %d s", FINISH_SECONDS)

    def _attempt(self, act: Any) -> None:
        try:
            act()
        except Exception as error:  # no W&B error may end the run
            logger.warning("logging.wandb: %s", first_line(error))


def start_run(experiment: RunFile, folder: Path) -> WandbRun | None:
    """Start or resume the W&B run; None if not configured, or W&B is unreachable.

    folder: this worker's; offline runs are written to its subfolder `wandb`. Raises RunFileError if the package is
    missing.
    """
    settings = experiment.logging.wandb
    if settings is None:
        return None
    try:
        wandb = import_module("wandb")  # imported dynamically: the type checker's environment lacks it
    except ImportError:
        raise RunFileError("logging.wandb: the package wandb is not installed; install it, or set null") from None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return WandbRun(_init(wandb, settings, experiment, folder))
    except Exception as error:  # no network, a wrong key, an unknown team
        logger.warning("logging.wandb: continuing without it: %s", first_line(error))
        return None


def _init(wandb: Any, settings: Wandb, experiment: RunFile, folder: Path) -> Any:
    """Initialize W&B. Only config and metrics leave this machine: no code, console output or host name."""
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
