"""`up` on the emulated cloud while something goes wrong: what it is called and what is done.

On both planes where Google has a part in it; what only workers tell is told on one.
"""

import csv
import json
import re
import shutil
import sys
from dataclasses import dataclass

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from controller.checks.fit import cache_file
from controller.cli import main
from controller.core import json_documents
from controller.resources import devices
from tests.controller.cli.verbs.test_up import TWO_WORKERS
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.paths import ROOT
from tests.planes import PLANES, Plane

pytestmark = pytest.mark.e2e
PROGRAM = """
import json, os, time
from urllib.request import Request, urlopen

attempt, worker = os.environ["SLIPWAY_ATTEMPT"], os.environ["TPU_WORKER_ID"]
host, bucket = os.environ["STORAGE_EMULATOR_HOST"], os.environ["SLIPWAY_BUCKET"].removeprefix("gs://")

def begun():
    return len(json.load(urlopen(f"{host}/storage/v1/b/{bucket}/o?prefix=begun/")).get("items", []))

while worker == "2" and attempt == "1" and begun() < 3:
    time.sleep(0.1)
name = f"begun/{worker}-{attempt}"
url = f"{host}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}"
urlopen(Request(url, data=b"x", method="POST")).read()

def barrier():
    for _ in range(3000 if attempt == "1" else 0):
        time.sleep(0.1)

barrier()
print("done in attempt", attempt)
"""
"""Waits, as good as for ever, in its first attempt, as JAX does in a collective, and ends in its second. One worker is
the last to begin, so that no fault strikes while a worker is still being told to."""
SAVES = """
import os, signal, sys, time
from urllib.request import Request, urlopen

signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
host, bucket = os.environ["STORAGE_EMULATOR_HOST"], os.environ["SLIPWAY_BUCKET"].removeprefix("gs://")
url = f"{host}/upload/storage/v1/b/{bucket}/o?uploadType=media&name=begun"
urlopen(Request(url, data=b"x", method="POST")).read()
while os.environ["SLIPWAY_ATTEMPT"] == "1":
    time.sleep(0.1)
print("done in attempt", os.environ["SLIPWAY_ATTEMPT"])
"""
ALERTS = """
import json, os

losses = [3.0, 3.1, 2.9] * 4 + [9.0] * 3 + [3.0] * 2 + [float("nan")]
with open(os.environ["SLIPWAY_RUN_DIR"] + "/metrics.jsonl", "a") as file:
    for step, loss in enumerate(losses, 1):
        print(json.dumps({"step": step, "loss": loss}), file=file)
    secret = os.environ["TOKEN"]
    print(json.dumps({"step": 18, "alert": "reward hacking", "message": "the token is " + secret}), file=file)
"""
TRACKED = """
import json, os, time
from urllib.parse import quote
from urllib.request import Request, urlopen

attempt, bucket = int(os.environ["SLIPWAY_ATTEMPT"]), os.environ["SLIPWAY_BUCKET"].removeprefix("gs://")
storage, run = os.environ["STORAGE_EMULATOR_HOST"], "runs/" + os.environ["SLIPWAY_RUN_ID"]
steps = range(1, 6) if attempt == 1 else range(4, 9)
with open(os.environ["SLIPWAY_RUN_DIR"] + "/metrics.jsonl", "a") as file:
    file.write("".join(json.dumps({"step": step, "loss": 1 / step}) + "\\n" for step in steps))

def stored():
    found = json.load(urlopen(f"{storage}/storage/v1/b/{bucket}/o?prefix={quote(run + '/trackers/', safe='')}"))
    return sum(each["name"].endswith(".tar") for each in found.get("items", []))

while attempt == 1 and stored() < 2:
    time.sleep(0.1)
url = f"{storage}/upload/storage/v1/b/{bucket}/o?uploadType=media&name=begun/{attempt}"
urlopen(Request(url, data=b"x", method="POST")).read()
while attempt == 1:
    time.sleep(0.1)
"""
RUN = ("program.command=[python,train.py]", "env.packages=image")


@dataclass
class Recovered:
    """An `up` that met a fault."""

    code: int
    out: str
    err: str
    notes: list[str]

    def said(self, words: str) -> None:
        assert any(words in note for note in self.notes), (words, self.notes, self.err)


def up(slipway: SlipwayCli, plane: Plane, fault: str) -> Recovered:
    """A run that is struck as soon as the program of worker 2 has begun, which is the last to do so."""
    words = (*RUN, *plane.four)
    (slipway.repository / "train.py").write_text(PROGRAM)
    code, out, err = slipway("up", *words, f"cloud.faults=[{{{fault}, after_object: begun/2-1}}]")
    run = slipway.json("plan", *words)["run"]
    events = map(json.loads, (slipway.home / "runs" / run / "events.jsonl").read_text().splitlines())
    return Recovered(code, out, err, [event["message"] for event in events if event["kind"] == "note"])


def keeps_notifications(slipway: SlipwayCli) -> str:
    """The override for a notifier that writes down the events."""
    module, told = slipway.repository / "slipway" / "my_kept_events.py", str(slipway.home / "told")
    module.parent.mkdir()
    module.write_text(f"def keep(event):\n    with open({told!r}, 'a') as file: print(event['event'], file=file)\n")
    return "notify.notifier=my_kept_events:keep"


def notified(slipway: SlipwayCli) -> list[str]:
    sys.modules.pop("my_kept_events", None)  # the next test has another
    return (slipway.home / "told").read_text().split()


@pytest.mark.deep
@pytest.mark.parametrize("plane", PLANES[:1], ids=str)
def test_a_frozen_program_is_hung_and_says_where(slipway: SlipwayCli, plane: Plane) -> None:
    found = up(slipway, plane, "kind: frozen, worker: 2")
    assert (found.code, found.err) == (0, "")
    words = "hung: worker 2: its program has been stopped by a signal for"
    found.said(words)
    found.said("worker 2: stopped by a signal, in barrier (work/train.py:")
    found.said("worker 0, 1, 3: in barrier (work/train.py:")
    assert "stacks/attempt-1/worker-2.txt" in json.dumps(slipway.cloud().get("state")["objects"])


ILL = {
    "tpu_api": ("kind: unhealthy, worker: 2, symptom: MESH_BUILD_FAIL", "timeout (The TPU does not answer)"),
    "compute_engine": ("kind: slice_state, state: ACTIVE_DEGRADED, message: A link is down", "unhealthy topology"),
}


@pytest.mark.deep
@pytest.mark.one_plane
def test_a_sick_host_is_replaced(slipway: SlipwayCli, plane: Plane) -> None:
    """Google calls it ill, which alone is no reason; then a program ends there."""
    ill, words = ILL[plane.name]
    found = up(slipway, plane, f"{ill}, after_object: begun/2-1}}, {{delay_seconds: 1, kind: killed")
    assert (found.code, found.err) == (0, "")
    found.said(f"Google reports the pod as {words}")
    found.said("unhealthy host: worker")
    assert len(plane.deletions(slipway.mutations())) == 2


@pytest.mark.deep
@pytest.mark.one_plane
def test_maintenance_is_waited_for(slipway: SlipwayCli, plane: Plane) -> None:
    found = up(slipway, plane, "kind: maintenance, seconds: 60")
    assert (found.code, found.err) == (0, "")
    found.said("maintenance: the node is repairing; waiting")
    found.said("launched attempt 2")
    assert len(plane.deletions(slipway.mutations())) == 1  # at the end


@pytest.mark.deep
@pytest.mark.parametrize("plane", PLANES[:1], ids=str)
def test_a_worker_that_does_not_answer_is_lost_and_its_node_replaced(slipway: SlipwayCli, plane: Plane) -> None:
    found = up(slipway, plane, "kind: ssh_frozen, seconds: 30, worker: 1")
    assert (found.code, found.err) == (0, "")
    found.said("worker lost: worker 1 has not responded")


@pytest.mark.deep
@pytest.mark.one_plane
def test_an_own_program_is_told_of_a_preemption_if_it_asks_for_it(slipway: SlipwayCli, plane: Plane) -> None:
    """The node goes much later: what is seen is that its program says that it has saved."""
    words = ("recovery.preemption_signal=SIGUSR1", *plane.one)
    (slipway.repository / "train.py").write_text(SAVES)
    fault = "cloud.faults=[{kind: preempted, after_object: begun, notice_seconds: 600}]"
    code, out, err = slipway("up", *RUN, *words, fault, keeps_notifications(slipway))
    assert (code, err) == (0, "")
    assert notified(slipway) == ["preemption", "end"]
    assert "worker 0 received a preemption notice" in out
    assert (
        "preempted: worker 0 received a preemption notice; its program saved its state and exited; "
        "replacing the pod and resuming from the last checkpoint"
    ) in out
    assert "done in attempt 2" in out
    assert len(plane.deletions(slipway.mutations())) == 2
    past = slipway.json("status", *RUN, *words)["run"]["verdicts"]
    assert [(episode["kind"], episode["response"]) for episode in past] == [("preempted", "replace_node")]
    told = r"\d\d:\d\d:\d\d  .*: preempted: worker 0 received a preemption notice.*; replace node\n"
    assert re.search(told, slipway("status", *RUN, *words)[1])


def test_a_tracker_gets_each_step_once_across_a_preemption(slipway: SlipwayCli) -> None:
    """The example of the page, beside a program without code of its own for it, whose second pod repeats two steps."""
    (slipway.repository / "train.py").write_text(TRACKED)
    (slipway.repository / "slipway").mkdir()
    shutil.copy(ROOT / "docs/extend/my_tracker.py", slipway.repository / "slipway")
    words = (*RUN, "logging.trackers=[my_tracker:ToCsv, tensorboard]")
    code, out, err = slipway("up", *words, "cloud.faults=[{kind: preempted, after_object: begun/1}]")
    assert (code, err) == (0, "")
    assert "launched attempt 2" in out
    run = slipway.json("plan", *words)["run"]
    code, _, err = slipway("get", run, "--to", str(slipway.home / "got"))
    assert (code, err) == (0, "")
    rows = [*csv.reader((slipway.home / "got/trackers/my_tracker.ToCsv/metrics.csv").read_text().splitlines())]
    assert rows == [[run, "0", str(step), "loss", str(1 / step)] for step in range(1, 9)]
    read = EventAccumulator(str(slipway.home / "got/tb")).Reload()
    assert [point.step for point in read.Scalars("loss")] == [*range(1, 9)]


def test_out_of_hbm_says_what_fits_if_that_was_asked_before(slipway: SlipwayCli) -> None:
    (slipway.repository / "train.py").write_text(
        "raise RuntimeError('RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.8G of 15.7G')"
    )
    file = cache_file(main.parse(["plan", *RUN, *slipway.base_overrides, "tpu=v5litepod_8"]).options.config()[0])
    file.parent.mkdir(parents=True)
    fix = {"overrides": ["loop.micro_batch_size=1", "model.remat=full"]}
    file.write_text(json_documents.dump({"programs": [], "fix": fix}))
    code, _, err = slipway("up", *RUN, "tpu=v5litepod_8", keeps_notifications(slipway))
    assert code == 5
    assert notified(slipway) == ["failure"]
    assert "out of hbm: worker 0 exited with code 1; it failed first" in err
    assert "to fix: set loop.micro_batch_size=1 model.remat=full: it fits, as `slipway fit` found" in err


@pytest.mark.deep
def test_alerts_reach_everyone_once_and_without_secrets(slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hf_a_secret_of_the_user")
    (slipway.repository / "train.py").write_text(ALERTS)
    words = ["tpu=v6e_1", "program.command=[python,train.py]", "env.packages=image", "env.secrets.TOKEN=env"]
    code, out, err = slipway("up", *words, keeps_notifications(slipway))
    assert (code, err) == (0, "")
    names = ["loss spike", "not finite", "reward hacking"]
    assert [out.count(f"! {name}: ") for name in names] == [1, 1, 1]
    assert out.count("› loss spike is over") == 1
    assert notified(slipway) == ["alert", "alert", "alert", "end"]
    found = slipway.json("status", *words)["run"]
    assert sorted(alert["name"] for alert in found["alerts"]) == names
    assert all(alert["ended"] is not None for alert in found["alerts"])  # with the attempt at the latest
    status = slipway("status", *words)[1]
    assert status.count("past alert ") == 3
    assert slipway("report", found["id"])[0] == 0
    page = (slipway.home / "reports" / f"{found['id']}.html").read_text()
    assert page.count("<h3>Alerts</h3>") == 1
    assert "hf_a_secret" not in out + status + page


@pytest.mark.deep
def test_a_held_chip_stops_up_and_free_ones_pass_the_health_check(
    slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "PAUSE_SECONDS", 0.01)
    held = "cloud.faults=[{kind: chip_held, worker: 1, seconds: 600}]"
    run = (ECHO_COMMAND, "cleanup.on_success=keep", *TWO_WORKERS, "cloud.health_check=true")
    code, out, err = slipway("up", *run, held)
    assert code == 3
    [(worker, pid)] = re.findall(r"worker (\d): /dev/accel0 is held by process (\d+) of \w+ \(sleep 600\.0\)", err)
    assert worker == "1"
    assert "launched" not in out
    code, out, _ = slipway("verify", "--json", *run)
    assert code == 3
    first, second = json.loads(out)["workers"]
    assert (first["chips"], f"process {pid}" in second["chips"]) == ("ok", True)
    psutil.Process(int(pid)).kill()
    code, out, err = slipway("up", *run)
    assert code == 0, err
    assert "health check passed" in out
    assert "all-reduce over 8 devices (cpu)" in out
    assert out.index("health check passed") < out.index("launched")


@pytest.mark.deep
def test_a_pod_with_a_missing_chip_is_replaced(slipway: SlipwayCli) -> None:
    code, out, err = slipway("up", ECHO_COMMAND, *TWO_WORKERS, "cloud.faults=[{kind: chip_missing, worker: 1}]")
    assert code == 0, err
    assert "unhealthy host: worker 1 has 3 of 4 chips (/dev/accel0, /dev/accel1, /dev/accel2; 3 on its PCI bus)" in out
    assert "replacing the pod" in out
    missing = "cloud.faults=[{kind: chip_missing, times: 1}]"
    assert slipway("up", ECHO_COMMAND, missing, "program.needs_chips=false", "run.name=other")[0] == 0
