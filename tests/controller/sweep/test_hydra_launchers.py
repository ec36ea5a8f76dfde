"""Who is used to Hydra's launchers gets what he means, or the key to set."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.core.errors import ConfigError
from controller.sweep.definition import define_sweep
from controller.sweep.hydra_launchers import apply_launcher

GRID = ["+experiment=quickstart", "run.seed=0,1"]


@pytest.mark.parametrize(
    ("words", "pods"),
    [
        ([], 1),
        (["hydra/launcher=pods", "sweep.pods=3"], 3),
        (["hydra/launcher=basic"], 1),
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=4"], 4),
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=4", "sweep.pods=4"], 4),
        (["hydra/launcher=joblib", "sweep.pods=2"], 2),
        (["+hydra/launcher=joblib", "hydra/sweeper=basic"], 1),
    ],
)
def test_words_of_a_launcher_are_a_number_of_pods(
    words: list[str], pods: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    found = define_sweep([*GRID, *words], tmp_path)
    assert found.sweep.pods == pods
    assert [job.run_id for job in found.jobs] == [job.run_id for job in define_sweep(GRID, tmp_path).jobs]
    assert not any("hydra" in word for job in found.jobs for word in job.variant.overrides)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["hydra/launcher=submitit_slurm"],
            "hydra/launcher: not supported, slipway runs sweeps itself; set sweep.pods=4",
        ),
        (
            ["hydra/launcher=joblib", "hydra.launcher.backend=loky"],
            "hydra/launcher: not supported, slipway runs sweeps itself",
        ),
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=-1"], "hydra.launcher.n_jobs: -1 is not a number of pods"),
        (["hydra/launcher=basic", "sweep.pods=2"], "sweep.pods: 2, but hydra/launcher=basic means 1"),
        (["hydra/sweeper=optuna"], "hydra/sweeper: not supported; set sweep.search="),
        (["hydra.sweeper.n_trials=3"], "hydra/sweeper: not supported; set sweep.search="),
    ],
)
def test_what_cannot_be_meant_names_the_key(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        apply_launcher([*GRID, *words])
    assert str(error.value).startswith(said)
