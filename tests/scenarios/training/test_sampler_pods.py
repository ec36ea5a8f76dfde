"""GRPO whose samplers are on a slice of their own, with real JAX on the emulated cloud.

Whatever is lost in between, no sample is lost or learnt from twice, a replay of the journal has the same weights, and
nothing that is billed is left.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from tests.controller.conftest import SlipwayCli
from tests.planes import PLANES, Plane, pods
from tests.scenarios.experiments.test_quickstart import assert_same, client
from tests.scenarios.unattended.test_two_controllers import controllers
from trainer.rl.remote.journal import decode

pytestmark = [pytest.mark.e2e, pytest.mark.deep, pytest.mark.real_time]
STEPS, ROWS, DEPTH = 8, 64, 1
POD, SAMPLERS = "trainer", "trainer-sampler-1"
TRAINING = [
    "+experiment=quickstart", f"tpu.name={POD}", f"loop.steps={STEPS}",
    "loop.warm_start_steps=2", "loop.prompts_per_step=8", "loop.eval_prompts=32", f"loop.eval_interval={STEPS}",
    "loop.max_new_tokens=16", "loop.test_samples_per_prompt=null", f"loop.async_depth={DEPTH}",
    "loop.rollout_correction.rollout_is=token", "checkpoint.save_interval=3",
    "logging.log_interval=1", "loop.filter_overlong_solutions=true",
]  # fmt: skip


class Exactly(SlipwayCli):
    """`slipway` with these words and no others."""

    def line(self, *words: str) -> list[str]:
        return [*words]


def up(slipway: SlipwayCli, *words: str) -> str:
    code = main.run(["up", *words])
    out, err = slipway.capsys.readouterr()
    assert code == 0, out + err
    return out


def status(slipway: SlipwayCli, *words: str) -> dict[str, Any]:
    assert main.run(["status", *words, "--json"]) == 0
    return json.loads(slipway.capsys.readouterr().out)


def billed(slipway: SlipwayCli) -> dict[str, Any]:
    return pods(slipway.cloud().get("state"))


def results(slipway: SlipwayCli, url: str) -> Path:
    """The objects of a run, as files."""
    bucket, _, prefix = url.removeprefix("gs://").partition("/")
    target, google = slipway.home / "copy" / prefix, client(slipway.cloud())
    for item in google.list_all("storage", "objects.list", "items", bucket=bucket, prefix=f"{prefix}/"):
        file = target / item["name"].removeprefix(f"{prefix}/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(google.download(bucket, item["name"]))
    google.close()
    return target


def assert_whole_journal(folder: Path) -> None:
    """Every rollout has each of its samples once, none of them too old."""
    files = sorted((folder / "journal").glob("*.npz"))
    assert len(files) == STEPS
    for number, file in enumerate(files):
        drawn = decode(file.read_bytes())
        assert len(drawn) == ROWS
        for sample in drawn:
            assert max(0, number - DEPTH) <= sample.versions[0] <= sample.versions[-1] <= number


def assert_replay_is_equal(slipway: SlipwayCli, url: str, folder: Path, plane: Plane) -> None:
    """Training on the journal again, without samplers, reaches the same weights, bit for bit."""
    words = [*TRAINING, *plane.one, f"loop.replay={url}"]
    up(slipway, *words)
    assert_same(folder, results(slipway, status(slipway, *words)["run"]["results"]))


@pytest.mark.parametrize(
    ("lost", "plane"),
    [
        (SAMPLERS, PLANES[0]),
        *(
            pytest.param(*each, marks=pytest.mark.wide)
            for each in ((SAMPLERS, PLANES[1]), (POD, PLANES[0]), (POD, PLANES[1]))
        ),
    ],
    ids=str,
)
def test_a_pod_is_preempted_and_the_run_ends_as_if_it_had_not_been(
    slipway: SlipwayCli, lost: str, plane: Plane
) -> None:
    words = [*TRAINING, *plane.one, "loop.sampler.pods=1"]
    fault = f"cloud.faults=[{{kind: preempted, node: {lost}, after_object: journal/00000002}}]"
    out = up(slipway, *words, fault)
    found = status(slipway, *words)
    [samplers] = found["samplers"]
    assert (found["run"]["state"], found["run"]["attempts"]) == ("finished", 1 if lost == SAMPLERS else 2)
    assert samplers["attempts"] == (2 if lost == SAMPLERS else 1), out
    assert billed(slipway) == {}
    folder = results(slipway, found["run"]["results"])
    assert_whole_journal(folder)
    if lost == POD:
        assert_replay_is_equal(slipway, found["run"]["results"], folder, plane)


def test_a_controller_that_is_killed_leaves_both_pods_to_the_next_and_down_deletes_them(slipway: SlipwayCli) -> None:
    long = [*TRAINING, "tpu.accelerator_type=v5litepod-1", "loop.sampler.pods=1", "loop.steps=100000"]
    long += ["loop.eval_interval=100000", "recovery.lease_duration_seconds=15"]
    exactly = Exactly(**vars(slipway))
    with controllers(exactly, ["up", *long]) as (first,):
        first.hears("sampler pod 1: launched attempt 1")
        first.process.kill()
        first.ends()
    assert {name.rpartition("/")[2] for name in billed(slipway)} == {POD, SAMPLERS}
    with controllers(exactly, ["up", *long]) as (second,):
        second.hears("re-attached to attempt 1 on 1 worker")
        second.hears("sampler pod 1: re-attached to attempt 1")
        found = status(slipway, *long)
        assert [row["state"] for row in found["samplers"]] == ["ready"]
        assert main.run(["status", *long]) == main.run(["plan", *long]) == 0
        out = slipway.capsys.readouterr().out
        assert f"pod  {SAMPLERS}: ready, " in out
        assert "samplers 1 pod of v5litepod-1\n" in out
        assert f"exists   TPU v5litepod-1 (1 worker) {SAMPLERS}\n" in out
        assert main.run(["down", *long, "--yes"]) == 0
        second.ends()
    assert billed(slipway) == {}
