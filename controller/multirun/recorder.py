"""Hydra callback of a job on a worker: keeps what the app returned. Shipped to the worker; see `job.py`."""

import json
import os
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

RETURN_VALUE = "return_value"
"""Key of the app's return value in summary.json."""


class Recorder(Callback):
    """Adds the return value of the app to `$SLIPWAY_RUN_DIR/summary.json`, which becomes a part of the run's result."""

    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        if job_return.status.name != "COMPLETED" or job_return.return_value is None:
            return
        try:
            value = plain_value(job_return.return_value)
        except TypeError as error:
            print(f"slipway: the app returned {error}, which JSON cannot hold; its multirun gets None", flush=True)
            return
        file = Path(os.environ["SLIPWAY_RUN_DIR"]) / "summary.json"
        summary = json.loads(file.read_text()) if file.is_file() else {}
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps({**summary, RETURN_VALUE: value}))
        draft.replace(file)


def plain_value(value: Any) -> Any:
    """Return a value as JSON holds it; arrays of one number, as of NumPy and JAX, become that number.

    Raises:
        TypeError: JSON cannot hold it; names its type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain_value(entry) for entry in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain_value(entry) for key, entry in value.items()}
    item = getattr(value, "item", None)
    if getattr(value, "size", None) == 1 and item is not None:
        return plain_value(item())
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")
