"""Trace a few updates for TensorBoard's profile page, if `logging.profile` is set."""

from pathlib import Path
from typing import Any

import jax

from conf.schema.training.settings import ProfileSettings


class Profiler:
    """Profiler on the process that writes the metrics.

    Updates are counted from the start of the process, so a resumed run can be traced with another `logging.profile`.
    """

    def __init__(self, settings: ProfileSettings | None, folder: Path, writes: bool) -> None:
        self._settings = settings if writes else None
        self._folder, self._num_updates, self._tracing = folder, 0, False

    def before_update(self, arrays: Any) -> None:
        """Start or stop the trace when due. arrays: the last update's outputs, which it waits for."""
        if self._settings is None:
            return
        if self._num_updates == self._settings.after:
            jax.block_until_ready(arrays)
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        elif self._num_updates == self._settings.after + self._settings.updates:
            jax.block_until_ready(arrays)
            self.close()
        self._num_updates += 1

    def close(self) -> None:
        """Stop the trace if one is running."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
