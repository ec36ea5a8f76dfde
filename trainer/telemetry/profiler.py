"""A trace of a few updates for TensorBoard's profile page, where `logging.profile` asks for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from conf.schema.training.settings import ProfileSettings


class Profiler:
    """Traces on the process that writes the metrics. Updates are counted from the start of the process, so that a run
    that is resumed with another `logging.profile` can be looked at, too."""

    def __init__(self, settings: ProfileSettings | None, folder: Path, writes: bool) -> None:
        self._settings = settings if writes else None
        self._folder, self._num_updates, self._tracing = folder, 0, False

    def before_update(self, arrays: Any) -> None:
        """Begin or end the trace, if it is time; arrays: what the last update gives, waited for."""
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
        """End the trace, if one is under way."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
