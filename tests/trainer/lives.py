"""Lives of a run in this process: they end by themselves or are killed, and share what they compile."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from conf.schema.training.run_yaml import RunFile
from trainer import main
from trainer.checkpoint.manager import CheckpointManager
from trainer.distributed import mesh as meshes
from trainer.rl import programs as programs_module
from trainer.step import train_step
from trainer.telemetry import startup_report


class KilledError(Exception):
    """Stands for whatever ends a process."""


def changed(raw: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A copy with other values in these sections, or with another section where they name its kind."""
    new = copy.deepcopy(raw)
    for name, values in sections.items():
        new[name] = new[name] | values if isinstance(values, dict) and "kind" not in values else values
    return new


def lines_of(folder: Path | str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / file).read_text().splitlines()]


def saved(raw: dict[str, Any], *steps: int, abstract: Any = None) -> list[tuple[Any, dict[str, Any]]]:
    """State and position of these checkpoints, or of the last one."""
    experiment = RunFile.model_validate(raw)
    if abstract is None:
        mesh = meshes.build_mesh(experiment.mesh)
        abstract = train_step.abstract_state(experiment.model, experiment.optimizer, mesh)
    with CheckpointManager(experiment.dir, experiment.checkpoint) as checkpoints:
        return [checkpoints.restore(step, abstract) for step in steps or [checkpoints.latest_step() or 0]]


def final_state(raw: dict[str, Any]) -> train_step.State:
    return saved(raw)[0][0]


def train(raw: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run it in this process; the lines of metrics."""
    main.train(RunFile.model_validate(raw), folder)
    return lines_of(folder)


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
        compilation, build_sampler, ready = startup_report.Compilation, programs_module.build_sampler, self._ready

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
        monkeypatch.setattr(programs_module, "build_sampler", build_once)
