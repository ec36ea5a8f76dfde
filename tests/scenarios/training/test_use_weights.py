"""The weights of a run are exported, tried, and start another run, as docs/use-weights.md shows."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from controller import api
from controller.cli import main
from trainer.pretrained import hf_files

pytestmark = [pytest.mark.e2e, pytest.mark.deep]
SHORT = [
    "+experiment=quickstart",
    "cloud=here",
    "cloud.backend=cpu",
    "env.packages=image",
    "loop.prompts_per_step=8",
    "loop.eval_prompts=32",
    "loop.test_prompts=8",
    "loop.max_new_tokens=16",
    "loop.filter_overlong_solutions=true",
    "checkpoint.save_interval=2",
    "logging.log_interval=1",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    (work := folder / "work").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        patch.setenv("SLIPWAY_HOME", str(folder / "state"))
        yield work


@pytest.fixture(scope="module")
def run(home: Path) -> str:
    """Of two steps of warm start and two of GRPO."""
    return api.up(*SHORT, "loop.steps=2", "loop.warm_start_steps=2")["run"]


def slipway(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    code = main.run(words)
    out, err = capfd.readouterr()
    assert code == 0, out + err
    return out


def test_weights_leave_a_run(home: Path, run: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert "step 4: 7 files in model" in slipway(capfd, "export", run, "--to", "model", "cloud=here")
    assert json.loads((home / "model/config.json").read_text())["architectures"] == ["Gemma2ForCausalLM"]
    words = ("--prompt", "Tom has 3 apples.", "--temperature", "0", "--json", "cloud=here")
    [said] = slipway(capfd, "generate", run, "-n", "1", *words).splitlines()
    assert json.loads(said)["prompt"] == "Tom has 3 apples."
    assert main.run(["export", run, "--to", "model", "cloud=here"]) == 2
    assert "exists and is not an empty folder" in capfd.readouterr().err
    slipway(capfd, "get", run, "checkpoints", "--to", "copy", "cloud=here")
    assert (home / "copy/checkpoints/4/commit_success.txt").is_file()


def test_a_run_starts_from_the_weights_of_another(home: Path, run: str, capfd: pytest.CaptureFixture[str]) -> None:
    weights = f"model.weights=run:{run}@2"
    row = api.up(*SHORT, "loop.steps=1", "loop.warm_start_steps=0", "optimizer.lr=1e-30", weights)
    slipway(capfd, "export", run, "--step", "2", "--to", "first", "cloud=here")
    slipway(capfd, "export", row["run"], "--to", "second", "cloud=here")
    begin, end = (dict(hf_files.iter_tensors(epath.Path(home / name))) for name in ("first", "second"))
    assert begin.keys() == end.keys()
    for name, array in begin.items():
        np.testing.assert_allclose(end[name], array, rtol=0, atol=1e-20, err_msg="updates of 1e-30 change nothing")
    record = json.loads((home.parent / f"state/runs/{row['run']}/record.json").read_text())
    assert record["config"]["model"]["weights"].endswith(f"/runs/{run}/checkpoints/2")
    assert weights in record["overrides"]
