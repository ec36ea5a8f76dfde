"""The main job with real JAX on the emulated cloud, cut short: a preempted run ends with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller import cli, emulator
from controller.google import Google

pytestmark = pytest.mark.e2e
SHORT = [
    "+experiment=quickstart",
    "tpu.accelerator_type=v4-16",  # 2 workers
    "tpu.zone=us-central2-b",
    "loop.steps=4",
    "loop.warm_start_steps=2",
    "loop.prompts=8",
    "loop.eval_prompts=32",
    "loop.response_length=16",
    "checkpoint.every=3",
    "cloud.operation_seconds=0",
    "logging.every=1",
]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = cli.run(["up", *SHORT, *words])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    return out


def folder_of(home: Path) -> Path:
    """The bucket's objects, as files."""
    target = home / "copy"
    config = cli.parse(["up", *SHORT]).config()[0]
    cloud = emulator.ensure_running(config.cloud, str(home))  # pyright: ignore[reportArgumentType]
    google = client(cloud)
    bucket = "slipway-local-slipway-us-central2"
    for item in google.pages("storage", "objects.list", "items", bucket=bucket, prefix="runs/"):
        file = target / item["name"].partition("/")[2].partition("/")[2]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(google.download(bucket, item["name"]))
    google.close()
    return target


def client(cloud: emulator.Emulator) -> Google:
    from google.oauth2.credentials import Credentials

    from controller.clock import Clock

    return Google(Credentials(token=cloud.token), Clock(), cloud.roots)


def weights(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The parameters of the last checkpoint, read by Orbax."""
    import jax
    import orbax.checkpoint as ocp

    steps = sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit())
    saved = (folder / "checkpoints" / str(steps[-1]) / "state").resolve()
    with ocp.StandardCheckpointer() as checkpointer:
        shapes = checkpointer.metadata(saved).item_metadata.tree
        state = checkpointer.restore(saved, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    made: list[Path] = []

    def enter(name: str) -> Path:
        monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / name))
        made.append(tmp_path / name)
        return tmp_path / name

    yield enter
    for home in made:
        status, words = emulator.command(["wipe"], emulator.state_folder(str(home)))
        assert status == 0, words


def test_a_preempted_run_ends_with_the_same_weights(homes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = homes("quiet")
    out = run(capsys)
    assert "accuracy_before" in out
    assert "accuracy_after" in out
    undisturbed = folder_of(quiet)
    disturbed_home = homes("disturbed")
    out = run(capsys, "cloud.faults=[{kind: preempted, after_object: checkpoints/3/commit_success}]")
    assert "preempted: " in out
    disturbed = folder_of(disturbed_home)
    left, right = weights(undisturbed), weights(disturbed)
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name], right[name]) for name in left)
    steps = [json.loads(line)["step"] for line in (disturbed / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert list((disturbed / "tb").glob("events.out.tfevents.*"))
