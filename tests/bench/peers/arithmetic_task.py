"""The task that `tests.bench.peers.accuracy` sets other libraries: files, and the reward. Needs Python alone."""

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NUMBER = re.compile(r"-?\d+")


def is_right(response: str, answer: str) -> bool:
    """Return whether the last number of a response is the answer."""
    numbers = NUMBER.findall(response)
    return bool(numbers) and int(numbers[-1]) == int(answer)


class Task:
    """A folder with `policy/` in Hugging Face's format, settings.json, train.jsonl in order, and test.jsonl."""

    def __init__(self, folder: Path) -> None:
        self.policy = folder / "policy"
        self.settings: dict[str, Any] = json.loads((folder / "settings.json").read_text())
        self.train, self.test = (self._read(folder / f"{name}.jsonl") for name in ("train", "test"))

    @staticmethod
    def _read(file: Path) -> list[dict[str, Any]]:
        """Rows with `prompt`, text with the start token, its `tokens`, and `answer`."""
        return [json.loads(line) for line in file.read_text().splitlines()]

    def learning_rate(self, update: int) -> float:
        """Return the rate of an update, from 0: a linear rise, then a linear fall to a fraction of the highest."""
        given = self.settings
        if update < given["warmup_steps"]:
            return given["lr"] * (update + 1) / given["warmup_steps"]
        done = min(1.0, (update - given["warmup_steps"]) / (given["horizon_steps"] - given["warmup_steps"]))
        return given["lr"] * (1 - (1 - given["final_fraction"]) * done)


class Progress:
    """Greedy accuracy on the test every so many updates, and the seconds of training until then."""

    def __init__(self, task: Task, respond: Callable[[Sequence[dict[str, Any]]], list[str]]) -> None:
        """Start the clock. respond: returns the greedy responses to rows of the test."""
        self._task, self._respond = task, respond
        self.restart()

    def restart(self) -> None:
        """Start the clock again: what was before is not counted."""
        self._paused, self._cpu_paused = 0.0, 0.0
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def evaluate(self, update: int) -> bool:
        """Return whether the level is reached. Evaluations are not counted."""
        at, cpu = time.perf_counter(), time.process_time()
        responses = self._respond(self._task.test)
        right = [is_right(text, row["answer"]) for text, row in zip(responses, self._task.test, strict=True)]
        seconds, cpu_seconds = at - self._began - self._paused, cpu - self._cpu_began - self._cpu_paused
        accuracy = sum(right) / len(right)
        point = {"update": update, "seconds": seconds, "cpu_seconds": cpu_seconds, "accuracy": accuracy}
        print(json.dumps(point), flush=True)
        self._paused += time.perf_counter() - at
        self._cpu_paused += time.process_time() - cpu
        return accuracy >= self._task.settings["level"]

    def is_due(self, update: int) -> bool:
        """Return whether an evaluation follows this update, from 1."""
        return update % self._task.settings["eval_interval"] == 0
