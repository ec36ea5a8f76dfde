"""The quick start with real JAX, cut short: preempted, moved or repeated, it ends with the same weights to the bit."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller import emulator
from controller.cli import main
from controller.gcp.client import GoogleClient
from controller.records import index
from controller.resources.pod.capacity_log import load_entries
from tests.emulators import Emulators
from tests.paths import ROOT

pytestmark = pytest.mark.e2e
SHORT = [
    "+experiment=quickstart",
    "tpu.accelerator_type=v4-16",  # 2 workers
    "tpu.zone=us-central2-b",
    "loop.steps=4",
    "loop.warm_start_steps=2",
    "loop.prompts_per_step=8",
    "loop.eval_prompts=32",
    "loop.max_new_tokens=16",
    "loop.filter_overlong_solutions=true",
    "checkpoint.save_interval=3",
    "logging.log_interval=1",
]


def run(capsys: pytest.CaptureFixture[str], *words: str, short: list[str] = SHORT) -> str:
    """What `up` prints of a run that finishes."""
    code = main.run(["up", *short, *words])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    return out


def folder_of(home: Path, run: str = "") -> Path:
    """The bucket's objects of a run, of all by default, as files."""
    target = home / f"copy{run}"
    config = main.parse(["up", *SHORT]).options.config()[0]
    cloud = emulator.ensure_running(config.cloud, str(home))  # pyright: ignore[reportArgumentType]
    google = client(cloud)
    bucket = "slipway-local-slipway-us-central2"
    for item in google.list_all("storage", "objects.list", "items", bucket=bucket, prefix=f"runs/{run}"):
        file = target / item["name"].partition("/")[2].partition("/")[2]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(google.download(bucket, item["name"]))
    google.close()
    return target


def client(cloud: emulator.Emulator) -> GoogleClient:
    from google.oauth2.credentials import Credentials

    from controller.core.this_process import Clock

    return GoogleClient(Credentials(token=cloud.token), Clock(), cloud.roots)


def weights(folder: Path, step: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """The state of a checkpoint, by default the last, read by Orbax."""
    import jax
    import orbax.checkpoint as ocp

    step = step or max(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit())
    saved = (folder / "checkpoints" / str(step) / "state").resolve()
    with ocp.StandardCheckpointer() as checkpointer:
        shapes = checkpointer.metadata(saved).item_metadata.tree
        state = checkpointer.restore(saved, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def position(folder: Path, step: int) -> dict[str, Any]:
    """The loop's position in a checkpoint."""
    return json.loads((folder / f"checkpoints/{step}/position/metadata").read_text())["position"]


def exports_to_the_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    """Export the last run's weights to its bucket, where a second export is refused and a run finds them."""
    url = "gs://slipway-local-slipway-us-central2/models/mine"
    assert main.run(["export", "--to", url]) == 0
    assert "step 6: 7 files in " in capsys.readouterr().out
    assert main.run(["export", "--to", url]) == 2
    assert f"{url} exists and is not empty" in capsys.readouterr().err
    assert main.run(["export", "--to", "gs://nobodys-bucket/models/mine"]) == 2
    assert "The specified bucket does not exist" in capsys.readouterr().err
    for folder, is_missing in ((url, False), (f"{url}-not", True)):
        main.run(["plan", *SHORT, f"model.weights={folder}"])
        assert ("error: model.weights" in capsys.readouterr().out) == is_missing


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulators: Emulators) -> Iterator[Callable[[str], Path]]:
    """State folders to enter; their emulated clouds are forked, and stay awake."""
    monkeypatch.setattr(emulator, "run_emulator_verb", emulators.run_emulator_verb)
    monkeypatch.chdir(tmp_path)
    made: list[Path] = []
    with ExitStack() as awake:

        def enter(name: str) -> Path:
            monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / name))
            made.append(emulator.state_folder(str(tmp_path / name)))
            awake.enter_context(emulator.mark_in_use(made[-1]))
            return tmp_path / name

        yield enter
    for cloud in made:
        emulators.run_emulator_verb(["wipe"], cloud)


def assert_same(left: Path, right: Path) -> None:
    """Assert that two runs have saved the same weights, bit for bit."""
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.deep
@pytest.mark.wide
def test_a_run_that_comes_back_on_the_other_plane_ends_with_the_same_weights(
    homes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """v6e-16: four VMs on either plane. Where the run is preempted, there is no capacity any more."""
    words = [word for word in SHORT if not word.startswith("tpu.")]
    words += ["tpu=v6e_8", "tpu.accelerator_type=v6e-16", "loop.prompts_per_step=16"]
    words += ["cloud.bucket=slipway-local-slipway-us-central2"]
    quiet = homes("quiet")
    run(capsys, short=words)
    undisturbed = folder_of(quiet)
    ways = {"tpu_api": "queued", "compute_engine": "mig"}
    for first, other in permutations(ways):
        cut = homes(first)
        faults = ["{kind: preempted, after_object: checkpoints/3/commit_success}"]
        if first == "compute_engine":  # the TPU API is asked first, and refuses once
            faults.append("{kind: stockout, times: 1, plane: tpu_api, at: request}")
        faults.append(f"{{kind: stockout, times: 9999, plane: {first}, at: request, after_object: checkpoints/3/}}")
        out = run(capsys, f"cloud.faults=[{', '.join(faults)}]", short=words)
        assert "preempted: " in out
        made = [(entry.provisioner, entry.ended) for entry in load_entries(cut) if entry.answer == "granted"]
        assert made == [(ways[first], "preempted"), (ways[other], "deleted")]
        assert_same(undisturbed, folder_of(cut))


@pytest.mark.deep
@pytest.mark.wide
def test_a_run_has_the_same_weights_when_it_is_preempted_and_when_another_slipway_repeats_it(
    homes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disturbed_home = homes("disturbed")
    out = run(capsys, "cloud.faults=[{kind: preempted, after_object: checkpoints/3/commit_success}]")
    assert "preempted: " in out
    disturbed = folder_of(disturbed_home)
    steps = [json.loads(line)["step"] for line in (disturbed / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert list((disturbed / "tb").glob("events.out.tfevents.*"))
    home = homes("quiet")
    assert "accuracy " in run(capsys)
    assert_same(disturbed, folder_of(home))
    exports_to_the_bucket(capsys)
    [row] = index.load_rows(home)
    clone = tmp_path / "clone"
    for name in ("conf", "controller", "trainer"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    (clone / "trainer" / "main.py").write_text("raise SystemExit('this is not the code of the record')\n")
    words = [sys.executable, "-m", "controller", "up", "--run", row["run"]]
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    done = subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(disturbed, folder_of(home, f"{row['run']}-r1/"))
