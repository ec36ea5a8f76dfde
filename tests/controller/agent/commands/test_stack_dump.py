"""Where a program is that does not go on."""

import os
import signal

from tests.controller.agent.conftest import ProgramRun, wait_for

SLEEPS = "import time\ndef wait_for_ever():\n    print('ready', flush=True)\n    time.sleep(600)\nwait_for_ever()"
LISTENS = f"import faulthandler, signal\nfaulthandler.register(signal.SIGQUIT)\n{SLEEPS}"


def ready(run: ProgramRun) -> None:
    wait_for(lambda: "ready" in run.state()["log_tail"])


def test_who_listens_tells_and_goes_on_also_when_it_is_stopped(run: ProgramRun) -> None:
    run.start(LISTENS)
    ready(run)
    told = run.worker.call("stacks", run_id="run-1")
    assert "in wait_for_ever" in told["text"]
    assert [process["signal"] for process in told["processes"]] == ["SIGQUIT"]
    assert run.state()["state"] == "running"
    os.kill(told["processes"][0]["pid"], signal.SIGSTOP)
    told = run.worker.call("stacks", run_id="run-1")
    assert told["processes"][0]["state"].startswith("T")
    assert "in wait_for_ever" in told["text"]


def test_any_python_tells_while_it_is_aborted(run: ProgramRun) -> None:
    run.start(SLEEPS)
    ready(run)
    told = run.worker.call("stacks", run_id="run-1")
    assert "in wait_for_ever" in told["text"]
    assert run.wait_ended()["signal"] == "SIGABRT"


def test_what_does_not_listen_is_left_alone(run: ProgramRun) -> None:
    assert run.worker.call("stacks", run_id="run-1") == {"processes": [], "text": ""}
    run.start("", argv=["sleep", "600"])
    told = run.worker.call("stacks", run_id="run-1")
    assert [(process["name"], process["signal"]) for process in told["processes"]] == [("sleep", None)]
    assert run.state()["state"] == "running"
