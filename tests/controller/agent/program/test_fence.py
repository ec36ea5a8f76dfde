"""A program that a later attempt has replaced ends by itself, and saves nothing more."""

from tests.controller.agent.conftest import ProgramRun, wait_for

NEXT = "runs/run-1/launches/0002.json"
SAVES = """
import os, signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: Path(os.environ["SLIPWAY_RUN_DIR"], "saved").touch())
print("up", flush=True)
while True: time.sleep(0.05)
"""


def test_the_record_of_the_next_attempt_ends_this_one_without_a_last_save(run: ProgramRun) -> None:
    bucket = run.worker.bucket
    where = {"bucket": "b", "log_object": "log", "exit_object": "exit.json"}
    run.start(SAVES, **where, successor=NEXT, fence_seconds=0.05)
    wait_for(lambda: bucket.requests.count(f"GET {NEXT}") > 2)
    bucket.faults = [400, 400]  # a lookup that fails says nothing
    wait_for(lambda: not bucket.faults)
    assert run.state()["state"] == "running"
    bucket.objects[NEXT] = b"{}"
    end = run.wait_ended()
    assert (end["state"], end["signal"], end["error"]) == (
        "exited", "SIGKILL", "a later attempt has replaced this one",
    )  # fmt: skip
    assert not (run.folder / "saved").exists()
    assert b"a later attempt has replaced this one" in bucket.objects["exit.json"]
