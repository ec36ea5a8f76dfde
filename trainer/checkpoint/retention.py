"""Which checkpoints are kept: the newest, and the best by its score."""

import json
import math
from collections.abc import Sequence
from typing import Any

from etils import epath

from conf.formats import FORMAT, RunFileError, format_problem
from conf.schema.training.settings import CheckpointSettings
from conf.strict_json import dumps
from trainer.checkpoint.storage import RunStorage

SCORES_FILE = "scores.json"


class Retention:
    """Preservation policy for Orbax. Scores, and hence decisions, are the same on all processes."""

    def __init__(self, folder: epath.Path, settings: CheckpointSettings, storage: RunStorage, writes: bool) -> None:
        self._file, self._storage, self._writes = folder / SCORES_FILE, storage, writes
        self._keep, self._best = settings.max_to_keep, settings.best
        self._scores: dict[int, float] = {}
        self.broken_steps: set[int] = set()
        if self._best and self._file.exists():
            body = json.loads(self._file.read_text())
            if problem := format_problem(body, str(self._file)):
                raise RunFileError(problem)
            if body["metric"] == self._best.metric:
                known = {int(step): value for step, value in body["scores"].items() if value is not None}
                self._scores = {step: value for step, value in known.items() if math.isfinite(value)}

    def record_score(self, step: int, value: float) -> None:
        """Record the score of the weights after `step` updates. Process 0 writes it to scores.json.

        What is not finite is no score: the checkpoint never is the best.
        """
        self._scores.pop(step, None)
        if math.isfinite(value):
            self._scores[step] = value
        elif self._writes and self._best:
            print(f"WARNING: {self._best.metric} after update {step} is {value}: it cannot be the best", flush=True)
        self.write()

    def write(self) -> None:
        """Write scores.json on process 0, if there are scores; during an outage the next call does."""
        if not (self._writes and self._best and self._scores and self._storage.answers()):
            return
        content = {"format": FORMAT, "metric": self._best.metric, "mode": self._best.mode}
        content |= {"best": self.best_step(list(self._scores))}
        partial = self._file.with_suffix(".partial")
        with self._storage.tolerated(SCORES_FILE):
            partial.write_text(dumps(content | {"scores": self._scores}, indent=1) + "\n")
            partial.replace(self._file)

    def best_step(self, steps: Sequence[int]) -> int | None:
        """Return the best of these steps, the first among equals, or None if none has been evaluated."""
        scored = sorted(step for step in steps if step in self._scores)
        if not self._best or not scored:
            return None
        return (min if self._best.mode == "min" else max)(scored, key=self._scores.__getitem__)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Select checkpoints for Orbax, by `step`. Broken ones are dropped once a newer one is complete."""
        sound = sorted(info.step for info in checkpoints if info.step not in self.broken_steps)
        kept = self.kept(sound)
        return [info.step in kept for info in checkpoints]

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Return the newest of these steps, which are in order, and the best one."""
        best = self.best_step(steps)
        return {*steps[-self._keep :], *([] if best is None else [best])}
