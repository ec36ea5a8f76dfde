"""Sweeps end to end on the emulated cloud, one controller each and per pod: others are told, or take its place."""

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from controller.cli import main
from controller.core.errors import ConfigError
from controller.gcp.prices import hourly_price
from controller.lease_store import BucketLeaseStore, Identity
from controller.plan.project_steps import shared_resources
from controller.reconcile import reconcile
from controller.records import index
from controller.resources.pod.capacity_log import load_entries
from controller.run.driven_here import driven_here
from controller.run.estimate import estimate_run
from controller.sweep.definition import Estimate, define_sweep, estimate
from controller.sweep.pod_pool import GridSource
from controller.sweep.sweep_session import open_definition, open_sweep
from tests.controller.cli.verbs.test_up import until
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.planes import Plane, pods
from tests.scenarios.unattended.test_two_controllers import controllers, launches

TWO_PODS = "sweep.pods=2"


def waiting(slipway: SlipwayCli, pod: Sequence[str], seeds: str = "0,1,2") -> list[str]:
    """A sweep whose programs end once `go` is there."""
    program = f'program.command=[sh,-c,"while [ ! -e {slipway.home}/go ]; do sleep 0.1; done"]'
    return ["-m", *pod, TWO_PODS, program, f"run.seed={seeds}"]


def run_when(slipway: SlipwayCli, number: int) -> None:
    until(lambda: [row["state"] for row in index.load_rows(slipway.home)].count("running") == number, seconds=300)


def states(slipway: SlipwayCli) -> dict[str, str]:
    return {" ".join(w for w in row["overrides"] if "seed" in w): row["state"] for row in index.load_rows(slipway.home)}


@pytest.mark.one_plane
@pytest.mark.deep
@pytest.mark.e2e
def test_killed_and_preempted_a_sweep_does_what_is_missing_and_leaves_no_pod(slipway: SlipwayCli, plane: Plane) -> None:
    go = slipway.home / "go"
    words = waiting(slipway, plane.one, "0,1,2,3,4")
    with controllers(slipway, words) as (first,):
        run_when(slipway, 2)
        first.process.kill()
        first.ends()
    [board] = slipway.home.glob("sweeps/*.json")
    assert "its controller has ended, and was last heard of at " in " ".join(
        slipway("status", "--sweep", board.stem)[1].split()
    )
    before = launches(slipway)
    with controllers(slipway, words) as (second,):
        until(lambda: pods(slipway.cloud().get("state")) != {})
        slipway.cloud().post("faults", {"key": "p", "faults": [{"kind": "preempted", "after_seconds": 0}]})
        go.touch()
        assert second.ends() == 0, second.said
    assert set(states(slipway).values()) == {"finished"}
    assert len(states(slipway)) == 5
    assert before == [name for name in launches(slipway) if name in before]
    held = {name.split("/")[1] for name in before}
    assert {name.split("/")[1] for name in launches(slipway) if not name.endswith("0001.json")} <= held
    assert pods(slipway.cloud().get("state")) == {}
    assert "5 runs, 5 finished, 0 remaining" in slipway(*words)[1]
    assert {run["state"] for run in slipway.json("status", *words)["runs"]} == {"finished"}


@pytest.mark.deep
@pytest.mark.e2e
def test_a_sweep_has_pods_of_both_planes_at_once(slipway: SlipwayCli) -> None:
    """The TPU API has capacity for one pod only: the other one comes from Compute Engine, and both work."""
    go = slipway.home / "go"
    words = waiting(slipway, ("tpu=v6e_1", "cloud.quotas={tpu-v6e-preemptible: 1}"), "0,1,2,3")
    with controllers(slipway, words) as (sweep,):
        run_when(slipway, 2)
        found = slipway.cloud().get("state")
        machines = [path for path in pods(found) if "/instances/" in path]
        assert (len(found["node"]), len(machines)) == (1, 1)
        go.touch()
        assert sweep.ends() == 0, sweep.said
    assert "4 finished" in sweep.said
    assert pods(slipway.cloud().get("state")) == {}
    made = {entry.provisioner for entry in load_entries(slipway.home) if entry.answer == "granted"}
    assert made == {"queued", "instance"}


@pytest.mark.one_plane
@pytest.mark.deep
@pytest.mark.e2e
@pytest.mark.always_on("compute_engine")
def test_what_fails_is_tried_again_and_told(slipway: SlipwayCli, plane: Plane) -> None:
    fails = 'program.command=[sh,-c,"test $SEED != 1 && test $SLIPWAY_ATTEMPT$SEED != 12"]'
    words = ["-m", *plane.one, TWO_PODS, fails, "env.vars.SEED='0','1','2'"]
    code, out, err = slipway(*words)
    assert code == 5
    assert "1 of 3 runs failed; run the same command to retry them" in err
    assert "2 finished, 1 failed" in out
    assert out.count("; retrying") == 2
    document = slipway.json("plan", *words)
    assert sorted(run["state"] for run in document["runs"]) == ["failed", "finished", "finished"]
    assert "deleted: nothing" in slipway("down", *words)[1]


def test_a_pod_goes_on_with_the_run_that_it_had(home: Path) -> None:
    jobs = define_sweep(["+experiment=quickstart", "run.seed=0,1,2"], home).jobs
    ids = [job.run_id for job in jobs]
    source = GridSource(jobs, {2: ids[0], 3: "finished long ago"})
    taken = [source.next_job(pod) for pod in (1, 2, 1, 2)]
    assert [job.run_id if job else None for job in taken] == [ids[1], ids[0], ids[2], None]


def test_a_pod_without_a_run_is_neither_rented_nor_planned(home: Path) -> None:
    definition = define_sweep(["+experiment=quickstart", "run.seed=0,1", "sweep.pods=8"], home)
    with open_definition(definition) as session:
        assert session.pods == 2
        done = {definition.jobs[0].run_id}
        one_left = replace(session, finished_runs=done)
        assert (one_left.pods, replace(session, finished_runs={job.run_id for job in definition.jobs}).pods) == (1, 1)
        [line] = [line for line in one_left.summary_lines() if line.startswith("pods")]
        assert line.startswith("pods     1 pod of v5litepod-16 (of sweep.pods=8; the others would have no run); ")


def test_the_estimate_is_by_runs_of_the_same_name(tmp_path: Path) -> None:
    config = main.parse(["plan", "+experiment=quickstart", "tpu=v6e_8", "cloud=gcp"]).options.cloud_config()
    arithmetic = estimate(config, 12, 2, tmp_path, 0.0)
    run = estimate_run(config, hourly_price(config, 0.0))
    assert run is not None
    assert arithmetic.hours == pytest.approx(6 * run.hours)
    assert arithmetic.usd == pytest.approx(12 * (run.usd or 0.0))
    assert arithmetic.why.startswith("an estimate: ")
    assert arithmetic.spread == pytest.approx(run.spread)
    twice = Estimate(1, 1.0, 1.0, 10.0, "", (0.5, 2.0))
    assert twice.describe(twice.usd, "${:.2f}".format) == "about $10.00 ($5.00 to $20.00)"
    assert twice.describe(None, str) == "unknown"
    command = config.model_copy(update={"program": config.program.model_copy(update={"kind": "command"})})
    assert estimate(command, 12, 2, tmp_path, 0.0).hours is None
    row = {"name": "quickstart", "type": config.tpu.accelerator_type, "state": "finished", "metrics": {}}
    rows = [{**row, "run": str(i), "seconds": seconds} for i, seconds in enumerate((90.0, 100.0, 500.0))]
    index.append_rows(tmp_path, rows)
    guess = estimate(config, 12, 5, tmp_path, 0.0)
    assert (guess.seconds_each, guess.hours, guess.spread) == (100.0, 300 / 3600, None)
    assert guess.usd == pytest.approx(12 * 100 / 3600 * (hourly_price(config, 0.0).total or 0.0))


def test_runs_of_another_scale_or_cloud_say_nothing_of_these(home: Path) -> None:
    quickstart, tiny = "+experiment=quickstart", "scale=tiny"
    row = {"name": "quickstart", "type": "v5litepod-16", "cloud": "local", "state": "finished", "metrics": {}}
    took = {(quickstart,): 300.0, (quickstart, "optimizer.lr=0.1"): 320.0, (quickstart, tiny): 20.0,
            (quickstart, "loop.steps=9"): 30.0}  # fmt: skip
    rows = [{**row, "run": str(i), "seconds": took[words], "overrides": list(words)} for i, words in enumerate(took)]
    index.append_rows(home, [*rows, {**rows[0], "run": "real", "cloud": "gcp", "seconds": 7.0}])

    def guess(*words: str) -> Estimate:
        made = define_sweep([quickstart, "run.seed=0,1", *words], home)
        about = (made.fixed_words, made.swept_keys)
        return estimate(made.base_config, 2, 1, home, 0.0, (), about)

    alike, both = guess(), guess("optimizer.lr=0.1,0.2")
    assert (alike.seconds_each, alike.why) == (300.0, "from 1 finished run like these")
    assert (both.seconds_each, both.why) == (310.0, "from 2 finished runs like these")
    assert guess("optimizer.lr=0.1,0.2", tiny).seconds_each == 20.0
    assert guess("loop.steps=99").seconds_each is None  # no run was as long


def test_runs_of_a_sweep_rent_no_pods_of_samplers(tmp_path: Path) -> None:
    words = ["+experiment=quickstart", "loop.async_depth=1", "loop.sampler.pods=1", "loop.sampler.tpu=v5litepod-1"]
    with pytest.raises(ConfigError, match=r"run\.seed=0: loop\.sampler\.pods: a sweep rents no further pods"):
        define_sweep([*words, "run.seed=0,1"], tmp_path)


@pytest.mark.e2e
def test_a_sweep_that_another_controller_drives_is_left_to_it(slipway: SlipwayCli) -> None:
    words = ["-m", "tpu=v5litepod_1", TWO_PODS, ECHO_COMMAND, "run.seed=0,1"]
    with open_sweep(main.parse(["plan", *slipway.line(*words)]).options) as session:
        reconcile(shared_resources(session.definition.base_config, session.bucket), session.context)
        store = BucketLeaseStore(session.context.google, session.bucket, session.definition.id, "sweeps")
        store.write(Identity("laptop", "run-0", holder="anna@lab").new_record(1, time.time(), 3600.0), 0)
    code, _, err = slipway(*words)
    assert code == 8
    assert "anna@lab (laptop) for run-0" in err
    assert "controls this sweep (last seen" in err
    assert slipway("status", *words)[1].splitlines()[1].startswith("controlled by anna@lab")
    assert pods(slipway.cloud().get("state")) == {}


@pytest.mark.e2e
def test_down_asks_before_it_ends_a_controller_that_has_no_lease_yet(slipway: SlipwayCli) -> None:
    words = ["-m", "tpu=v5litepod_1", TWO_PODS, ECHO_COMMAND, "run.seed=0,1"]
    with open_sweep(main.parse(["plan", *slipway.line(*words)]).options) as session, driven_here(session.lock_file):
        code, _, err = slipway("down", *words)
    assert code == 2
    assert "nothing was deleted; a controller on this machine is starting the sweep; pass --yes" in err


@pytest.mark.one_plane
@pytest.mark.e2e
@pytest.mark.deep
def test_a_second_controller_is_told_takes_over_and_ctrl_c_lets_go(slipway: SlipwayCli, plane: Plane) -> None:
    words = waiting(slipway, plane.one)
    with controllers(slipway, words) as (first,):
        run_when(slipway, 2)
        code, _, err = slipway(*words)
        assert code == 8
        assert "(laptop) for run-" in err
        assert "controls this sweep (last seen" in err
        assert slipway("status", *words)[1].splitlines()[1].startswith("controlled by ")
        begun = launches(slipway)
        assert len(begun) == 2
        with controllers(slipway, [*words, "--take-over"]) as (second,):
            assert first.ends() == 8, first.said
            assert "taken over by" in first.said
            until(lambda: second.said.count("re-attached to attempt 1") == 2, seconds=300)
            second.process.send_signal(signal.SIGINT)
            assert second.ends() == 130, second.said
            assert "detached: active runs continue, no new ones start" in second.said
            assert "Traceback" not in second.said
    assert launches(slipway) == begun
    (slipway.home / "go").touch()
    code, out, err = slipway(*words)
    assert (code, err) == (0, "")
    assert "3 finished" in out
    assert len(launches(slipway)) == 3
    assert pods(slipway.cloud().get("state")) == {}


@pytest.mark.one_plane
@pytest.mark.e2e
@pytest.mark.deep
def test_down_asks_before_it_ends_runs_and_the_controller_ends_well(slipway: SlipwayCli, plane: Plane) -> None:
    words = waiting(slipway, plane.one, "0,1")
    with controllers(slipway, words) as (sweep,):
        run_when(slipway, 2)
        code, _, err = slipway("down", *words)
        assert code == 2
        assert "is running on the pods; " in err
        assert "pass --yes" in err
        code, out, err = slipway("down", "--yes", *words)
        assert code == 0, err
        assert out.count("-1") + out.count("-2") >= 2
        assert sweep.ends() == 0, sweep.said
        assert "deleted by" in sweep.said
    assert pods(slipway.cloud().get("state")) == {}


@pytest.mark.one_plane
@pytest.mark.e2e
@pytest.mark.deep
def test_a_run_on_a_pod_of_a_sweep_is_told_and_may_replace_what_runs_there(slipway: SlipwayCli, plane: Plane) -> None:
    words = [*waiting(slipway, plane.one, "0,1"), "sweep.pods=1"]
    with controllers(slipway, words) as (sweep,):
        run_when(slipway, 1)
        pod = next(name.rpartition("/")[2] for name in pods(slipway.cloud().get("state")))
        alone = ["up", ECHO_COMMAND, *plane.one, f"tpu.name={pod}"]
        code, _, err = slipway(*alone)
        assert code == 2
        assert "the pod is busy with run-" in err
        assert slipway(*alone, "--yes")[0] == 0
        assert sweep.ends() == 8, sweep.said
        assert "taken over by" in sweep.said
        (slipway.home / "go").touch()
    assert slipway(*words)[0] == 0


@pytest.mark.one_plane
@pytest.mark.e2e
@pytest.mark.deep
def test_by_the_policy_stop_what_runs_is_let_end_and_nothing_further_begins(slipway: SlipwayCli, plane: Plane) -> None:
    home, go = slipway.home, slipway.home / "go"
    fails = f"while [ ! -e {home}/other ]; do sleep 0.1; done; exit 7"
    ends = f"touch {home}/other; while [ ! -e {go} ]; do sleep 0.1; done"
    program = f'program.command=[sh,-c,"if test $SEED = 0; then {fails}; else {ends}; fi"]'
    words = ["-m", *plane.one, TWO_PODS, program, "env.vars.SEED='0','1','2','3'", "sweep.on_failure=stop"]
    with controllers(slipway, words) as (sweep,):
        sweep.hears("failed: ")
        run_when(slipway, 1)
        go.touch()
        assert sweep.ends() == 5, sweep.said
    assert "1 of 4 runs failed; run the same command to retry them" in sweep.said
    assert "1 failed, 1 finished, 2 waiting" in sweep.said
    assert len(launches(slipway)) == 2
    [kept] = {name.rpartition("/")[2] for name in pods(slipway.cloud().get("state"))}  # of the run that failed
    assert kept in slipway("down", *words)[1]
