"""Weights of another run, `model.weights=run:ID`, as the path of a checkpoint, before anything is billed.

The config, and so the record of the run, then holds the path with the step: a repeat starts from the same weights.
"""

import re
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from conf.schema.config import Config
from conf.schema.training.model import different_weights, read_model_section
from controller.connect import open_context
from controller.core.errors import ConfigError
from controller.core.text import is_folder, object_url, width_of, wrap
from controller.records.fetch import LATEST, choose_step
from controller.records.recorder import load_record
from controller.records.restore import download_record

WEIGHTS = "model.weights"
RUN_PREFIX = "run:"
RUN_REFERENCE = re.compile(r"run:(?P<run>[A-Za-z0-9._-]+)(@(?P<which>best|\d+))?")


def with_resolved_weights(config: Config) -> Config:
    """Return the config with `run:ID` replaced by the path of a checkpoint; unchanged if it names none.

    Raises ConfigError if the run is unknown, has no such checkpoint, is of another model, or the pod cannot read it.
    """
    model = config.model
    if model is None or model.weights is None or not model.weights.startswith(RUN_PREFIX):
        return config
    found = RUN_REFERENCE.fullmatch(model.weights)
    if found is None:
        raise ConfigError(f"{WEIGHTS}: {model.weights} is none of run:ID, run:ID@best and run:ID@STEP")
    run_id = found["run"]
    state = Path(config.run.state_dir).expanduser()
    record = load_record(state, run_id) or _record_of_run(config, run_id)
    _check_weights(config, run_id, record)
    with open_context(config) as (context, _):
        bucket = record["bucket"]
        step = choose_step(context.google, bucket, run_id, found["which"] or LATEST, WEIGHTS)
    path = object_url(bucket, f"runs/{run_id}/checkpoints/{step}")
    said = f"note: {WEIGHTS}: {model.weights} is step {step}: {path}"
    print(wrap(said, width_of(sys.stderr), 2), file=sys.stderr)
    return config.model_copy(update={"model": model.model_copy(update={"weights": path})})


def _record_of_run(config: Config, run_id: str) -> dict[str, Any]:
    try:
        return download_record(config, run_id)
    except ConfigError as error:
        raise ConfigError([f"{WEIGHTS}: {str(problem).removeprefix('--run ')}" for problem in error.problems]) from None


def _check_weights(config: Config, run_id: str, record: dict[str, Any]) -> None:
    """Raise ConfigError if the weights of the recorded run do not suit the config."""
    theirs, here = record["config"]["cloud"]["kind"], config.cloud.kind
    if theirs != here and (is_folder(record["bucket"]) or "local" in (theirs, here)):
        raise ConfigError(
            f"{WEIGHTS}: {run_id} ran with cloud={theirs}, whose checkpoints cloud={here} cannot read; `slipway export "
            f"{run_id} --format slipway --to FOLDER` copies them; then set {WEIGHTS} to it, or to an asset of it"
        )
    assert config.model is not None
    try:
        made = read_model_section(record["config"].get("model"))
    except ValidationError:
        if record["config"].get("model") is None:
            raise ConfigError(f"{WEIGHTS}: {run_id} is no run of the bundled trainer, so it has no weights") from None
        raise ConfigError(
            f"{WEIGHTS}: {run_id} was made by another version of Slipway, whose keys of the model differ; name its "
            "checkpoint's path instead"
        ) from None
    if key := different_weights(made, config.model):
        wish, there = getattr(config.model, key), getattr(made, key)
        raise ConfigError(f"model.{key}: is {wish!r}, but {there!r} in {run_id}, whose weights {WEIGHTS} names")
