"""Lives of a run in this process: they end by themselves or are killed, and share what they compile."""

import json
from pathlib import Path
from typing import Any

import pytest

from conf.schema.training.run_yaml import RunFile
from trainer import main
from trainer.checkpoint.manager import CheckpointManager
from trainer.rl import batching
from trainer.telemetry import startup_report


class KilledError(Exception):
    """Stands for whatever ends a process."""


def train(raw: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run it in this process; the lines of metrics."""
    main.train(RunFile.model_validate(raw), folder)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run_until(raw: dict[str, Any], folder: Path, last_save: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run, and be killed as soon as that checkpoint is complete."""
    save = CheckpointManager.save

    def save_and_die(self: CheckpointManager, step: int, state: Any, position: Any) -> None:
        save(self, step, state, position)
        if step == last_save:
            self.close()
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "save", save_and_die)
        with pytest.raises(KilledError):
            train(raw, folder)


class SharedPrograms:
    """Lives of one config run what the first of them compiled."""

    def __init__(self) -> None:
        self._ready: dict[str, Any] = {}
        self._samplers: list[Any] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All runs are of that config until the patch ends."""
        compilation, build_sampler, ready = startup_report.Compilation, batching.build_sampler, self._ready

        class Remembered:
            def __init__(self, programs: Any) -> None:
                self.real = None if ready else compilation(programs)

            def wait(self, costs: dict[str, float]) -> dict[str, Any]:
                if self.real:
                    ready.update(self.real.wait(costs))
                costs.setdefault("compile_time", 0.0)
                return ready

        def build_once(*arguments: Any) -> Any:
            if not self._samplers:
                self._samplers.append(build_sampler(*arguments))
            return self._samplers[0]

        monkeypatch.setattr(startup_report, "Compilation", Remembered)
        monkeypatch.setattr(batching, "build_sampler", build_once)
