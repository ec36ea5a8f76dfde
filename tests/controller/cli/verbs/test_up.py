"""`up` and the verbs around it, end to end on the emulated cloud, with a program that echoes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from controller.cli import main as cli
from tests.conftest import wide
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.controller.localcloud.harness import wait_for as until
from tests.paths import ROOT
from tests.planes import Plane

pytestmark = pytest.mark.e2e
KEEP = "cleanup.on_success=keep"
TWO_WORKERS = ("tpu.accelerator_type=v4-16", "tpu.zone=us-central2-b")
SLOW = 'program.command=[sh,-c,"echo up; while [ ! -e ../go ]; do sleep 0.1; done"]'


def workers_home(slipway: SlipwayCli) -> list[Path]:
    return sorted((slipway.home / "localcloud" / "nodes").glob("*/worker-*/home"))


def let_go(slipway: SlipwayCli) -> None:
    """Let the slow program end, on every worker."""
    for home in workers_home(slipway):
        for run in (home / ".slipway" / "runs").iterdir():
            (run / "go").touch()


def up_apart(slipway: SlipwayCli, *words: str) -> subprocess.Popen[str]:
    """`slipway up …` in a process of its own, in real time; it finds the emulated cloud awake."""
    slipway.cloud()
    argv = [sys.executable, "-m", "controller", *slipway.line("up", *words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def read_until(running: subprocess.Popen[str], pattern: str) -> None:
    """Read what a process says up to a line of this pattern."""
    assert running.stdout is not None
    said = []
    for line in running.stdout:
        said.append(line)
        if re.search(pattern, line):
            return
    raise AssertionError(f"it ended before it said {pattern!r}: {''.join(said)}")


def typed(slipway: SlipwayCli, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of these words and no others."""
    return cli.run(words), *slipway.capsys.readouterr()


def test_a_run_from_nothing_to_nothing(slipway: SlipwayCli, plane: Plane) -> None:
    four = [ECHO_COMMAND, *plane.four]
    code, out, err = slipway("up", "--queue", *four)  # there is no bucket yet, and nobody to wait for
    assert (code, err) == (0, "")
    steps = ("network slipway", "nat slipway", "firewall slipway-allow-ssh", "TPU v", "steps unchanged")
    assert all(words in out for words in ("hello from worker 0", *steps))
    status = slipway.json("status", *four)
    assert (status["pod"]["state"], status["run"]["state"]) == ("absent", "finished")
    run = status["run"]["id"]
    kept = json.dumps(slipway.cloud().get("state")["objects"])
    logs = (f"logs/attempt-1/worker-{worker}.log" for worker in range(4))
    assert all(f"runs/{run}/{name}" in kept for name in ("plan.yaml", "result.json", *logs))
    code, out, _ = slipway("logs", "--worker", "3", *four)
    assert (code, out) == (0, "hello from worker 3\n")
    assert slipway.json("logs", "--worker", "3", *four) == {"log": "hello from worker 3\n"}
    code, out, err = slipway("logs", "--worker", "0,2", *four)
    assert (code, out, err) == (0, "worker 0| hello from worker 0\nworker 2| hello from worker 2\n", "")
    assert len(slipway("logs", "--worker", "all", *four)[1].splitlines()) == 4
    for named in ([run], ["--run", run], [run.rpartition("-")[0]]):  # its name is that of its latest run
        assert typed(slipway, "logs", *named, "--worker", "3", "--tail", "5")[:2] == (0, "hello from worker 3\n")
    assert typed(slipway, "logs", run, "-n", "0")[:2] == (0, "")
    before = slipway.mutations()
    assert "has already finished; nothing was changed" in slipway("up", *four)[1]
    assert slipway.mutations() == before
    # Verbs without config words mean the last run of this folder.
    code, out, err = typed(slipway, "logs", "--worker", "0")
    assert (code, out) == (0, "hello from worker 0\n")
    assert "cloud=local" in err
    edited = slipway.repository / "hello.txt"
    edited.write_text("edited\n")  # the same words mean another run, and the verbs the one that was started
    for verb, told in {"logs": "hello", "status --json": run, "get --list": "result.json", "cancel --yes": run}.items():
        code, out, err = typed(slipway, *verb.split())
        assert (code, f"note: what was edited since is no part of {run};" in err) == (0, True), out + err
        assert told in out
    edited.write_text("hello\n")
    here = slipway.home / "here"  # outside of the folder whose files are shipped as code
    code, out, _ = slipway("get", "--to", str(here), *four)
    assert (code, len(list((here / "logs/attempt-1").glob("*.log")))) == (0, 4)
    assert json.loads((here / "result.json").read_text())["outcome"] == "finished"
    assert "of them unchanged" in slipway("get", "--to", str(here), *four)[1]
    assert "result.json" in typed(slipway, "get", run, "result.json", "--list")[1]
    assert "no such file or folder; it has" in typed(slipway, "get", run, "nowhere")[2]
    assert slipway("logs", "--attempt", "2", *four)[0::2] == (2, "error: --attempt 2: the run has attempts 1\n")
    assert slipway("logs", "--worker", "1,7", *four)[0::2] == (2, "error: --worker 7: the pod has workers 0 to 3\n")
    slipway.repository.joinpath("other").mkdir()
    os.chdir(slipway.repository / "other")
    assert "no run was started from this folder" in typed(slipway, "logs")[2]


def test_a_running_run_is_reattached_and_another_ends_it_only_if_asked_to(slipway: SlipwayCli) -> None:
    assert slipway("up", "--detach", SLOW)[0] == 0
    before = slipway.mutations()
    assert "re-attached to attempt 1" in slipway("up", "--detach", SLOW)[1]
    assert slipway.mutations()[len(before) :] == []
    for verb, said in {"down": r"run-\S+ is running on the pod", "up": "busy with run-"}.items():
        code, _, err = slipway(verb, ECHO_COMMAND)
        assert (code, bool(re.search(said, err))) == (2, True), err
    assert slipway.json("status", SLOW)["pod"]["state"] == "ready"
    assert SLOW in typed(slipway, "status")[2], "what was refused is not this folder's last run"
    code, out, _ = slipway("up", "--yes", ECHO_COMMAND)
    assert (code, "stopped run-" in out) == (0, True)


@pytest.mark.deep
@pytest.mark.real_time
def test_a_busy_pod_queues_the_next_run(slipway: SlipwayCli) -> None:
    """The first run finishes and leaves its pod to the one that waits; the second one deletes it."""
    assert slipway("up", "--detach", SLOW)[0] == 0
    status = slipway.json("status", SLOW)
    first, node = status["run"]["id"], status["pod"]["name"]
    err = slipway("up", ECHO_COMMAND)[2]
    assert f"the pod is busy with {first}; --queue waits for it" in err
    both = [up_apart(slipway, SLOW), up_apart(slipway, ECHO_COMMAND, "--queue")]
    try:
        until(lambda: "/waiting/" in json.dumps(slipway.cloud().get("state")["objects"]))
        read_until(both[0], "re-attached")
        read_until(both[1], f"waiting for {first}")  # it is in the queue before it says so
        let_go(slipway)
        said = [one.communicate(timeout=300)[0] for one in both]
    finally:
        for one in both:
            one.kill()
    assert [one.returncode for one in both] == [0, 0], said
    assert "the pod stays for the next run: run-" in said[0]
    assert "hello from worker 0" in said[1]
    deletions = [m for m in slipway.mutations() if m.startswith("DELETE /tpu/") and node in m]
    assert len(deletions) == 1, deletions  # by the second run, at its end
    assert slipway.json("status", ECHO_COMMAND)["pod"]["state"] == "absent"
    assert "/waiting/" not in json.dumps(slipway.cloud().get("state")["objects"])


@pytest.mark.deep
def test_edited_code_is_a_new_run_on_the_same_pod(slipway: SlipwayCli) -> None:
    first = slipway.json("plan", ECHO_COMMAND)["run"]
    assert slipway("up", ECHO_COMMAND, KEEP)[0] == 0
    before = slipway.mutations()
    (slipway.repository / "hello.txt").write_text("hello, again\n")
    assert slipway.json("plan", ECHO_COMMAND)["run"] != first
    assert slipway("up", ECHO_COMMAND, KEEP)[0] == 0
    changed = slipway.mutations()[len(before) :]
    assert changed
    assert [m for m in changed if "/storage/v1/b/" not in m] == []  # objects of the new run, and nothing else


@pytest.mark.deep
@pytest.mark.one_plane
def test_an_altered_byte_on_a_worker_is_found_and_repaired(slipway: SlipwayCli, plane: Plane) -> None:
    words = [SLOW, KEEP, *plane.two]
    assert slipway("up", "--detach", *words)[0] == 0
    assert slipway("verify", *words)[0] == 0
    folders = [home / ".slipway" for home in workers_home(slipway)]
    [file] = (folders[0] / "runs").glob("*/run.yaml")
    whole = file.read_text()
    file.write_text(whole.replace("seed: 0", "seed: 1"))
    assert slipway("verify", *words)[0] == 4
    assert slipway("up", "--detach", *words)[0] == 0
    assert file.read_text() == whole
    [code] = (folders[1] / "code").glob("*/hello.txt")
    code.write_text("hellO\n")
    found = slipway("verify", "--json", *words)
    assert found[0] == 4
    assert [row["wrong"] for row in json.loads(found[1])["workers"]] == [[], ["code"]]
    assert slipway("cancel", *words)[0] == 0
    assert slipway("up", "--detach", *words)[0] == 0
    assert code.read_text() == "hello\n"
    assert slipway("verify", *words)[0] == 0


@pytest.mark.deep
def test_a_failing_program_ends_with_5_and_shows_the_worker_that_failed_first(slipway: SlipwayCli) -> None:
    """And is tried again as a new attempt."""
    once = "if [ $SLIPWAY_ATTEMPT = 2 ]; then exit; fi; if [ $TPU_WORKER_ID = 1 ]; then echo boom; exit 7; fi; sleep 60"
    fails = f'program.command=[sh,-c,"{once}"]'
    code, _, err = slipway("up", fails, *TWO_WORKERS)
    assert (code, "boom" in err) == (5, True)
    assert "worker 1 exited with code 7; it failed first" in err
    status = slipway.json("status", fails, *TWO_WORKERS)
    assert status["pod"]["state"] == "ready"  # kept, for a look
    assert status["run"]["state"] == "not finished, program error"
    assert "worker 1: its program exited with code 7" in status["run"]["verdicts"][0]["message"]
    assert "launched attempt 2" in slipway("up", fails, *TWO_WORKERS)[1]
    assert slipway("logs", fails, *TWO_WORKERS)[2] == "(attempt 2 of 2; --attempt N shows another)\n"


@pytest.mark.deep
@pytest.mark.one_plane
def test_a_preempted_pod_is_replaced_and_the_run_goes_on(slipway: SlipwayCli, plane: Plane) -> None:
    flag = 'if [ "$SLIPWAY_ATTEMPT" = 1 ]; then sleep 600; fi; echo attempt $SLIPWAY_ATTEMPT'
    program = f"program.command=[sh,-c,'{flag}']"
    faults = "cloud.faults=[{kind: preempted, after_object: launches/0001, delay_seconds: 1}]"
    code, out, err = slipway("up", program, *plane.one, faults)
    assert (code, err) == (0, "")
    assert "preempted: the node is " in out
    assert "launched attempt 2 on 1 worker" in out
    assert slipway.json("status", program, *plane.one)["run"]["attempts"] == 2


@pytest.mark.deep
@pytest.mark.sleeps
def test_no_process_of_a_run_is_left(slipway: SlipwayCli) -> None:
    assert slipway("up", ECHO_COMMAND)[0] == 0
    home = str(slipway.home)
    until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if home in " ".join(p.info["cmdline"] or [])])


@pytest.mark.real_time
def test_ctrl_c_before_the_launch_says_that_the_pod_is_kept(slipway: SlipwayCli) -> None:
    running = up_apart(slipway, SLOW, "env.packages=requirements", "program.setup=[[sleep,'600']]")
    read_until(running, "TPU v.* created")
    running.send_signal(signal.SIGINT)
    rest, _ = running.communicate(timeout=300)
    assert running.returncode == 130, rest
    assert re.search(r"TPU v\S+ .*slipway-\S+ is kept or asked for; `slipway down` deletes it", " ".join(rest.split()))
    assert "interrupted; run the same command to resume" in rest
    assert slipway("down", "--yes", SLOW)[0] == 0


@pytest.mark.parametrize("verb", [("cancel",), ("down", "--yes"), ("stop", "--yes")], ids=" ".join)
def test_a_detached_run_that_is_ended_is_ended_in_both_tables(slipway: SlipwayCli, verb: tuple[str, ...]) -> None:
    """Nobody drives it, so the verb that ends it says so."""
    pod = ["tpu=v5litepod_8", "tpu.capacity=on_demand"] if verb[0] == "stop" else []
    assert slipway("up", "--detach", SLOW, *pod)[0] == 0
    [row] = json.loads(typed(slipway, "runs", "--json")[1])
    assert row["state"] == "running"
    assert slipway(*verb, SLOW, *pod)[0] == 0
    [row] = json.loads(typed(slipway, "runs", "--json")[1])
    assert (row["state"], row["ended"] >= row["created"]) == ("cancelled", True)
    [published] = json.loads(slipway("runs", "--refresh", "--json")[1])
    assert (published["state"], published["ended"]) == ("cancelled", row["ended"])
    if verb[0] == "cancel":  # and goes on where it is started again
        assert slipway("up", "--detach", SLOW)[0] == 0
        assert json.loads(typed(slipway, "runs", "--json")[1])[0]["state"] == "running"


@pytest.mark.deep
@pytest.mark.real_time
@pytest.mark.parametrize("verb", [("cancel",), *wide(("down", "--yes"))])
def test_ctrl_c_detaches_and_what_is_ended_on_purpose_is_not_started_again(
    slipway: SlipwayCli, verb: tuple[str, ...]
) -> None:
    running = up_apart(slipway, SLOW)
    read_until(running, r"^\s*up$")
    running.send_signal(signal.SIGINT)
    rest, _ = running.communicate(timeout=300)
    assert (running.returncode, "the run continues" in rest) == (0, True), rest
    assert all(worker["running"] for worker in slipway.json("status", SLOW)["workers"])
    following = up_apart(slipway, SLOW)
    read_until(following, r"^\s*up$")
    assert slipway(*verb, SLOW)[0] == 0
    rest, _ = following.communicate(timeout=300)
    assert following.returncode == 0, rest
    assert "cancelled; run the same command to resume" in rest
    status = slipway.json("status", SLOW)
    assert status["run"]["attempts"] == 1
    assert status["pod"]["state"] == ("absent" if verb[0] == "down" else "ready")
