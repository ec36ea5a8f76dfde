"""`rehearse`: every experiment end to end on an emulated cloud of its own, preempted once; nothing is left."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import psutil
import pytest

from controller.cli import main
from controller.cloud import emulator
from controller.cloud.emulator import mark_in_use
from tests.emulators import Emulators

pytestmark = pytest.mark.e2e
FAST = "cloud.operation_seconds=0"
DEEP = pytest.mark.deep


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulators: Emulators) -> Path:
    """A state folder; the emulated clouds of rehearsals are forked, and their workers are as a user's."""
    monkeypatch.setattr(emulator, "run_emulator_verb", emulators.with_real_agents().run_emulator_verb)
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def rehearse(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.run(["rehearse", FAST, *words])
    out, err = capsys.readouterr()
    return code, out, err


def nothing_is_left(home: Path) -> bool:
    running = [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or [])]
    return not running and not list((home / "rehearsals").iterdir())


@pytest.mark.deep
def test_the_trainer_is_preempted_and_goes_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_workers = ["tpu.accelerator_type=v4-16", "tpu.zone=us-central2-b"]
    code, out, err = rehearse(capsys, "+experiment=gemma2b_gsm8k", "cloud.project=my-own", *two_workers)
    assert (code, err) == (0, "")
    assert (
        "✓ preempted (after_object checkpoints/2/commit_success): replaced, and the program resumed: 2 attempts" in out
    )
    assert "shared resources created, and unchanged when observed again\n" in out
    assert "✓ no billed resource is left" in out
    assert "✗" not in out
    assert nothing_is_left(home)


@pytest.mark.deep
def test_the_quick_start(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = rehearse(capsys, "+experiment=quickstart", "tpu=v5litepod_8")
    assert (code, err) == (0, "")
    assert "replaced, and the program resumed: 2 attempts" in out
    assert "✓ no billed resource is left" in out
    assert "✗" not in out
    assert nothing_is_left(home)


@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param("simply_gemma2_2b_gsm8k", marks=DEEP),
        pytest.param("trm_e1_1_baseline_xla", marks=DEEP),
        pytest.param("trm_stable1", marks=DEEP),
        pytest.param("nanochat_d16_v5e8", marks=DEEP),
        pytest.param("nanochat_d16_v6e4", marks=DEEP),
        pytest.param("nash_mhc_original", marks=DEEP),
    ],
)
def test_the_guides_programs(experiment: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = rehearse(capsys, f"+experiment={experiment}")
    assert (code, err) == (0, "")
    assert "✗" not in out
    if experiment == "trm_stable1":
        assert "✓ stable-1 still exists; no other billed resource does" in out
    else:
        assert re.search(r"resumed_from +[246]\b", out), out
        # On a busy machine no step of the first attempt may arrive before the preemption.
        before_it = r"resumed: 2 attempts|started again: 2 attempts; at step [357] of 8; no step arrived"
        assert re.search(f"replaced, and the program ({before_it})", out), out
    assert nothing_is_left(home)


@pytest.mark.deep
def test_an_adopted_pod_is_made_beforehand_and_stays(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hello.txt").write_text("hello\n")
    adopted = ["tpu=v5litepod_8", "tpu.adopt=true", "tpu.name=stable-1"]
    code, out, err = rehearse(capsys, "program=command", "program.command=[cat,hello.txt]", *adopted)
    assert code == 0, err
    assert "✓ ssh_refused (seconds 2" in out
    assert "✓ stable-1 still exists; no other billed resource does" in out
    assert " deleted " not in out
    assert nothing_is_left(home)


def test_misfortune_that_never_came_proves_nothing(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Path("hello.txt").write_text("hello\n")
    mine = ["program=command", "program.command=[cat,hello.txt]", "tpu=v5litepod_8"]
    code, out, _ = rehearse(capsys, *mine, "cloud.faults=[{kind: preempted, after_object: nowhere}]")
    assert code == 2
    assert "✗ preempted (after_object nowhere): did not occur" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "slipway get" not in out
    assert nothing_is_left(home)


def test_a_failure_is_kept_for_a_look_and_a_fault_overcome(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hello.txt").write_text("hello\n")
    mine = ["program=command", "program.command=[cat,goodbye.txt]", "tpu=v5litepod_8"]
    code, _, err = rehearse(capsys, *mine)
    assert code == 5
    assert "goodbye.txt" in err
    look = re.search(r"inspect it with `slipway (status .*?)`", err)
    assert look
    assert main.run([*shlex.split(look[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pod"]["state"] == "ready"
    Path("goodbye.txt").write_text("bye\n")
    code, out, err = rehearse(capsys, *mine, "cloud.faults=[{kind: stockout, times: 1}]", "--json")
    assert code == 0, err
    document = json.loads(out.splitlines()[-1])
    assert [fact["proven"] for fact in document["facts"]] == [True] * len(document["facts"])
    assert "stockout (times 1): overcome" in [fact["words"] for fact in document["facts"]]
    assert nothing_is_left(home)


def test_two_of_one_name_do_not_get_into_each_others_way(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hello.txt").write_text("hello\n")
    mine = ["program=command", "program.command=[cat,hello.txt]", "tpu=v5litepod_8"]
    with mark_in_use(home / "rehearsals" / "run" / "localcloud"):
        code, _, err = rehearse(capsys, *mine)
    assert code == 2
    assert "run.name: a rehearsal of run is running" in err
