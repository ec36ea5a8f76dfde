"""One controller per sweep, and per pod of it: others are told, or take its place; what is under way is begun once."""

import signal
import time

import pytest

from controller.cli import main
from controller.lease.store import BucketLeaseStore, Identity
from controller.plan.project import shared_resources
from controller.reconcile.reconciler import reconcile
from controller.sweep.session import open_sweep
from tests.controller.cli.verbs.test_up import until
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.controller.sweep.test_pool import TWO_PODS, run_when, waiting
from tests.planes import Plane, pods
from tests.scenarios.unattended.test_two_controllers import controllers, launches

pytestmark = pytest.mark.e2e


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
            until(lambda: second.said.count("re-attached to attempt 1") == 2, 300)
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
