"""The trackers that a config names: how a run begins or continues in each, gets a row of metrics, and ends.

Each is made with (name of the run, config, folder, settings) in the program's own Python, whose packages it needs.
Besides `log(step, metrics)` and `finish(results)` it may have `last_step`, the last step that its own store holds, and
`is_buffered`: whether its files lack rows until it is finished.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict


class TrackerOrder(TypedDict):
    """A tracker of the run: a built-in name or `module:name`, its settings, and what it is told of the run.

    `by_phase`: metrics of other phases than `train` get the phase before their name, since they may share one.
    `earlier`: the last lines of metrics.jsonl in earlier attempts, as the controller was told them.
    """

    use: str
    settings: dict[str, Any]
    config: dict[str, Any]
    by_phase: bool
    earlier: str


PROJECT = "slipway"
"""Project, or experiment, in trackers that group runs, unless their own variable names another."""
SERVICE_SECONDS = 300
"""Startup timeout of W&B's own process, on a machine that has just begun to compile."""
MAX_BATCH = 100
"""Parameters in a request of MLflow, whose values have at most MAX_TEXT characters."""
MAX_TEXT = 500


def load_tracker(use: str) -> Callable[..., Any]:
    """Return what makes a tracker: a class of this module, or the user's own `module:name`."""
    if use in KINDS:
        return KINDS[use]
    module, _, name = use.partition(":")
    made = getattr(importlib.import_module(module), name)
    return lambda run, config, folder, settings: made(run, config, folder)


class TensorBoard:
    """Event files. A reader forgets the points from the first step of this attempt on, which are drawn again."""

    def __init__(self, run: str, config: Mapping[str, Any], folder: str, settings: Mapping[str, Any]) -> None:
        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self._writer = writer(folder, filename_suffix=f".{time.time_ns()}")
        log = self._event.SessionLog(status=self._event.SessionLog.START)
        self._add(step=settings["step"] + 1, session_log=log)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step=step, summary=self._summary(value=points))

    def finish(self, results: Mapping[str, Any] | None) -> None:
        self._writer.close()

    def _add(self, **what: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), **what))
        self._writer.flush()


class Trackio:
    """A run of https://github.com/gradio-app/trackio: in `folder`, or in the Space that TRACKIO_SPACE_ID names."""

    def __init__(self, run: str, config: Mapping[str, Any], folder: str, settings: Mapping[str, Any]) -> None:
        os.environ.setdefault("TRACKIO_DIR", folder)  # is read when the package is imported
        self._trackio: Any = importlib.import_module("trackio")
        project, space = os.environ.get("TRACKIO_PROJECT", PROJECT), os.environ.get("TRACKIO_SPACE_ID")
        self._trackio.init(
            project=project, name=run, group=config["name"], config=dict(config), resume="allow", space_id=space,
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        self.last_step: int | None = None if space else storage.get_max_step_for_run(project, run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def finish(self, results: Mapping[str, Any] | None) -> None:
        self._trackio.finish()


class Mlflow:
    """A run of MLflow at MLFLOW_TRACKING_URI, else in `folder`. It is found again by a tag."""

    def __init__(self, run: str, config: Mapping[str, Any], folder: str, settings: Mapping[str, Any]) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name, tag = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), "slipway.run"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        found = self._client.search_runs([experiment], f"tags.`{tag}` = '{run}'", max_results=1)
        made = found[0] if found else self._client.create_run(experiment, tags={tag: run}, run_name=run)
        self._run: str = made.info.run_id
        histories = [self._client.get_metric_history(self._run, name) for name in made.data.metrics]
        self.last_step = max((point.step for history in histories for point in history), default=None)
        if found:
            self._client.update_run(self._run, status="RUNNING")
            return
        texts = [self._entities.Param(key, str(value)[:MAX_TEXT]) for key, value in _flat(config)]
        for first in range(0, len(texts), MAX_BATCH):
            self._client.log_batch(self._run, params=texts[first : first + MAX_BATCH])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        points = [self._entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=points)

    def finish(self, results: Mapping[str, Any] | None) -> None:
        if results is not None:
            for name, value in _flat(results):
                self._client.set_tag(self._run, f"slipway.{name}", str(value)[:MAX_TEXT])
            self._client.set_terminated(self._run)


class Wandb:
    """A W&B run (https://docs.wandb.ai/models/runs/resuming). Config and metrics leave this machine: no code, no
    output, no host name.
    """

    def __init__(self, run: str, config: Mapping[str, Any], folder: str, settings: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        quiet = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            host=config["pod"]["accelerator_type"],
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            x_service_wait=SERVICE_SECONDS,
        )
        self._run = wandb.init(
            project=settings.get("project") or os.environ.get("WANDB_PROJECT", PROJECT),
            entity=settings.get("entity"), id=run, name=run, group=config["name"], resume="allow",
            mode=settings.get("mode"), dir=folder, config=dict(config), settings=quiet,
        )  # fmt: skip
        self.last_step = self._run.starting_step - 1 if self._run.resumed else None
        self.is_buffered: bool = self._run.offline

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def finish(self, results: Mapping[str, Any] | None) -> None:
        if results:
            self._run.summary.update(dict(results))
        self._run.finish()


KINDS: Mapping[str, Callable[..., Any]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "mlflow": Mlflow,
    "wandb": Wandb,
}
KEPT: Mapping[str, str] = {"wandb": "wandb/offline-run-*/*.wandb"}
"""Which of a tracker's files belong to the results; all of the others'. W&B's logs are none of them."""
PLACES: Mapping[str, str] = {"tensorboard": "tb", "wandb": ""}
"""Where a tracker's files are in the run's folder; those of others in `trackers/NAME`. W&B's begin with `wandb/`."""


def kept_files(use: str, folder: Path) -> list[Path]:
    """Return the files of a tracker that survive this machine; those beside a database of SQLite do not."""
    found = sorted(folder.glob(KEPT.get(use, "**/*")))
    return [path for path in found if path.is_file() and not path.name.endswith(("-wal", "-shm", "-journal"))]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner
