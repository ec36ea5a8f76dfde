"""Checkpoint retention: keep the newest, and the best by an evaluation metric."""

import json
from collections.abc import Sequence
from typing import Any

from etils import epath

from conf.formats import FORMAT, format_problem
from conf.schema.training.run_yaml import RunFileError
from conf.schema.training.settings import CheckpointSettings

SCORES_FILE = "scores.json"


class Retention:
    """Preservation policy for Orbax. Scores, and hence decisions, are the same on all processes."""

    def __init__(self, folder: epath.Path, settings: CheckpointSettings, writes: bool) -> None:
        self._file, self._keep, self._best, self._writes = (
            folder / SCORES_FILE,
            settings.max_to_keep,
            settings.best,
            writes,
        )
        self._scores: dict[int, float] = {}
        self.broken: set[int] = set()
        if self._best and self._file.exists():
            body = json.loads(self._file.read_text())
            if problem := format_problem(body, str(self._file)):
                raise RunFileError(problem)
            if body["metric"] == self._best.metric:
                self._scores = {int(step): value for step, value in body["scores"].items()}

    def score(self, step: int, value: float) -> None:
        """Record the score of the weights after `step` updates. Process 0 writes it to scores.json."""
        assert self._best
        self._scores[step] = value
        if self._writes:
            content = {"format": FORMAT, "metric": self._best.metric, "mode": self._best.mode}
            content |= {"best": self.best(list(self._scores))}
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps(content | {"scores": self._scores}, indent=1) + "\n")
            partial.replace(self._file)

    def best(self, steps: Sequence[int]) -> int | None:
        """Return the best of these steps, the first among equals, or None if none has been evaluated."""
        scored = sorted(step for step in steps if step in self._scores)
        if not self._best or not scored:
            return None
        return (min if self._best.mode == "min" else max)(scored, key=self._scores.__getitem__)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Select checkpoints for Orbax, by `step`. Broken ones are dropped once a newer one is complete."""
        sound = sorted(info.step for info in checkpoints if info.step not in self.broken)
        kept = {*sound[-self._keep :], self.best(sound)}
        return [info.step in kept for info in checkpoints]
