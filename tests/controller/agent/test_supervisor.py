"""Starting, watching over and stopping a program, whatever happens in between."""

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from controller.agent import supervisor
from controller.agent.fs import AgentError, agent_root, tree_hash
from controller.agent.supervisor import (
    VARIABLE,
    keep_heartbeat,
    lock_devices,
    release_devices,
)
from controller.agent.worker_processes import is_alive, start_time
from controller.cli.verbs.on_workers import shell_command
from tests.conftest import deep
from tests.controller.agent.conftest import ProgramRun, wait_for

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
HOSTILE = [
    "; rm -rf ~",
    "$(touch ~/evil)",
    "`touch ~/evil`",
    "two\nlines",
    "'quo\"tes'",
    "-c",
    "",
    "é ☃",
    "~",
    "*",
    "$HOME",
]
SAY = """
import json, os, sys
seen = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "stdin": sys.stdin.read()}
seen["umask"] = os.umask(0)
json.dump(seen, open(os.path.join(os.environ["SLIPWAY_RUN_DIR"], "seen"), "w"))
print("said")
sys.exit(3)
"""
COUNT = "import os; open(os.environ['SLIPWAY_RUN_DIR'] + '/count', 'a').write('x')"


def up(run: ProgramRun, attempt: int = 1) -> dict:
    """What is on record of the attempt, once its program has printed something."""
    folder = run.folder / f"attempt-{attempt}"
    wait_for(lambda: (folder / "log").exists() and (folder / "log").stat().st_size)
    return json.loads((folder / "pid.json").read_bytes())


def kill(process: dict) -> None:
    os.kill(process["pid"], signal.SIGKILL)
    wait_for(lambda: not is_alive(process))


def test_words_and_variables_arrive_as_they_are(run: ProgramRun) -> None:
    files = {f"V{i}": text for i, text in enumerate(HOSTILE)}
    payload = {f"P{i}": text for i, text in enumerate(HOSTILE)}
    run.worker.call("write_config", run_id="run-1", text="", env={**files, "BOTH": "file", "SLIPWAY_RUN_ID": "other"})
    run.start(SAY, *HOSTILE, env={**payload, "BOTH": "payload"}, successor="runs/run-1/launches/0002.json")
    end = run.wait_ended()
    told = {"state": "exited", "code": 3, "signal": None, "error": None, "log_tail": "said\n"}
    assert end.items() >= told.items()
    assert end["started"] <= end["ended"]
    seen = json.loads((run.folder / "seen").read_text())
    [venv] = (run.worker.root / "venv").iterdir()
    place = {
        "SLIPWAY_RUN_DIR": str(run.folder),
        "SLIPWAY_RUN_ID": "run-1",
        "SLIPWAY_ATTEMPT": "1",
        "SLIPWAY_SUCCESSOR": "runs/run-1/launches/0002.json",
        "SLIPWAY_CODE_SHA256": run.code,
        "VIRTUAL_ENV": str(venv),
    }
    assert seen["env"].items() >= (files | payload | place | {"BOTH": "payload"}).items()
    assert seen["env"]["PATH"].startswith(f"{venv}/bin:")
    assert (seen["argv"], seen["cwd"]) == (HOSTILE, str(run.folder / "work"))
    assert "exit_hook" not in seen["env"].get("PYTHONPATH", "")
    assert (seen["stdin"], seen["umask"]) == ("", 0o022)
    assert not (run.worker.home / "evil").exists()
    run.start(SAY, exit_hook=True, attempt=2)
    run.wait_ended(2)
    path = json.loads((run.folder / "seen").read_text())["env"]["PYTHONPATH"]
    assert path.partition(":")[0].endswith("/exit_hook")


def test_what_a_program_writes_beside_its_code_does_not_alter_the_code(run: ProgramRun) -> None:
    run.start("open('package/module.py', 'w').write('x = 2'); open('out', 'w').write('')")
    assert run.wait_ended()["code"] == 0
    assert run.worker.call("observe", code=run.code)["code"] == run.code
    run.start("import package.module as m; print(m.x)", attempt=2)
    assert run.wait_ended(2)["log_tail"] == "1\n", "each attempt begins with the code that was shipped"
    assert (run.folder / "work/out").exists(), "and finds what earlier attempts of the run have written"


def test_altered_code_is_what_the_program_is_told_of(run: ProgramRun) -> None:
    source = run.worker.root / "code" / run.code
    (source / "package/module.py").write_text("x = 3\n")
    run.start("import os, package.module as m; print(m.x, os.environ['SLIPWAY_CODE_SHA256'])")
    assert run.wait_ended()["log_tail"].split() == ["3", tree_hash(source)]
    assert tree_hash(source) != run.code


def test_what_cannot_start_is_refused_and_nothing_is_spoilt(run: ProgramRun) -> None:
    refused = [({"argv": argv}, "not a command") for argv in ([], ["a\0b"], [1])]
    refused += [({missing: "0" * 64}, "install it first") for missing in ("code", "venv")]
    for change, said in refused:
        refusal = run.worker.call_error("start", **(run.start_payload(COUNT) | change))
        assert said in refusal["error"] + refusal["detail"]
        assert run.state()["state"] == "absent"
    run.start(COUNT)
    assert run.wait_ended()["code"] == 0


def test_started_by_several_at_once_and_again_it_runs_once(run: ProgramRun) -> None:
    processes = [run.worker.start_command("start", **run.start_payload(COUNT)) for _ in range(4)]
    assert {run.worker.finish_command(process)[0] for process in processes} == {0}
    run.wait_ended()
    assert run.start(COUNT)["state"] == "exited"
    assert (run.folder / "count").read_text() == "x"


@pytest.mark.parametrize("seconds", [0.03, *deep(0.01, 0.05, 0.1)])
def test_killed_at_any_moment_a_start_can_be_repeated(run: ProgramRun, seconds: float) -> None:
    """The moments differ from host to host; none of them may lose a program or start it twice."""
    starting = run.worker.start_command("start", **run.start_payload(COUNT))
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        starting.kill()
    starting.communicate()
    run.start(COUNT)
    assert run.wait_ended()["code"] == 0
    assert (run.folder / "count").read_text() == "x"


def test_a_program_outlives_the_session_that_started_it(run: ProgramRun) -> None:
    session = run.worker.start_command("start", **run.start_payload(SLEEP))
    up(run)
    for signum in (signal.SIGHUP, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(session.pid, signum)
    session.communicate()
    assert run.state()["state"] == "running"
    assert run.worker.call("observe")["active"] == {"run_id": "run-1", "attempt": 1}


def test_another_run_waits_its_turn(run: ProgramRun) -> None:
    run.start(SLEEP)
    other = ProgramRun(run.worker, run.code, "run-2")
    assert "attempt 1, is still running" in run.worker.call_error("start", **other.start_payload(COUNT))["error"]
    assert (
        "attempt 1, is still running" in run.worker.call_error("start", **run.start_payload(COUNT, attempt=2))["error"]
    )
    run.worker.call("stop", run_id="run-1", grace_seconds=30)
    assert run.worker.call("observe")["active"] is None
    other.start(COUNT)
    assert other.wait_ended()["code"] == 0


def test_a_lost_supervisor_is_told_and_its_program_can_be_stopped(run: ProgramRun) -> None:
    run.start(SLEEP, bucket="b", log_object="log", exit_object="exit.json")
    record = up(run)
    kill(record["supervisor"])
    state = run.state()
    assert (state["state"], state["error"]) == ("running", "supervisor lost; the program still runs")
    assert run.worker.call("observe")["active"] == {"run_id": "run-1", "attempt": 1}
    end = run.worker.call("stop", run_id="run-1", grace_seconds=30)
    assert (end["state"], end["code"], end["error"], end["upload"]) == ("exited", None, "supervisor lost", "done")
    assert not is_alive(record["program"])
    assert run.worker.bucket.objects["log"] == b"up\n"
    assert json.loads(run.worker.bucket.objects["exit.json"])["error"] == "supervisor lost"


def test_a_program_that_ends_without_its_supervisor_is_told_and_so_is_a_restart(run: ProgramRun) -> None:
    """A restart of the worker ends both, the supervisor without a chance to record anything."""
    run.start(SLEEP)
    record = up(run)
    kill(record["supervisor"])
    kill(record["program"])
    state = run.state()
    assert (state["state"], state["code"], state["error"]) == ("exited", None, "supervisor lost")
    run.worker.boot_id = "boot-2"
    state = run.worker.call("stop", run_id="run-1")
    assert (state["state"], state["error"]) == ("exited", "the worker was restarted")
    assert run.worker.call("observe")["active"] is None
    run.start(COUNT, attempt=2)
    assert run.wait_ended(2)["code"] == 0


def test_a_program_may_take_leave_when_it_is_stopped(run: ProgramRun) -> None:
    script = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); time.sleep(600)"
    )
    run.start(script)
    up(run)
    end = run.worker.call("stop", run_id="run-1", grace_seconds=60)
    assert (end["state"], end["code"], end["signal"]) == ("exited", 7, None)
    assert run.worker.call("stop", run_id="run-1")["code"] == 7, "stopping twice changes nothing"
    assert run.worker.call("stop", run_id="run-9")["state"] == "absent", "it never ran"


@pytest.mark.skipif(sys.platform != "linux", reason="who leaves the process group is found in /proc")
def test_who_does_not_take_leave_is_killed_with_all_descendants(run: ProgramRun) -> None:
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    script = (
        "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); "
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); "
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); time.sleep(600)"
    )
    run.start(script)
    log = run.folder / "attempt-1/log"
    wait_for(lambda: log.exists() and log.read_text().count("up\n") == 2)
    program = up(run)["program"]["pid"]
    pids = [child.pid for child in psutil.Process(program).children()]
    assert len(pids) == 2
    end = run.worker.call("stop", run_id="run-1", grace_seconds=0.2)
    assert (end["state"], end["signal"]) == ("exited", "SIGKILL")
    wait_for(lambda: not any(start_time(pid) for pid in [program, *pids]))


def test_a_reused_pid_is_left_alone(run: ProgramRun) -> None:
    run.start(SLEEP)
    record = up(run)
    kill(record["supervisor"])
    kill(record["program"])
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as innocent:
        forged = {"pid": innocent.pid, "start_time": record["program"]["start_time"]}
        (run.folder / "attempt-1/pid.json").write_text(json.dumps({**record, "program": forged, "supervisor": forged}))
        end = run.worker.call("stop", run_id="run-1", grace_seconds=30)
        assert (end["state"], end["error"]) == ("exited", "supervisor lost")
        assert innocent.poll() is None
        innocent.kill()


def test_log_and_end_reach_the_bucket_though_it_fails_at_first_and_records_are_private(run: ProgramRun) -> None:
    run.worker.bucket.faults.append(503)
    run.start("print('x' * 2_000_000)", bucket="b", log_object="runs/run-1/0.log", exit_object="runs/run-1/0.json")
    assert run.worker.watch(run_id="run-1")[-1]["end"]["upload"] == "done", "who watches waits for it"
    end = run.wait_ended()
    assert (end["upload"], end["upload_error"], end["log_size"]) == ("done", None, 2_000_001)
    posts = ["POST runs/run-1/0.log", "POST runs/run-1/0.log", "POST runs/run-1/0.json"]
    assert run.worker.bucket.requests[-3:] == posts
    assert run.worker.bucket.objects["runs/run-1/0.log"] == b"x" * 2_000_000 + b"\n"
    stored = json.loads(run.worker.bucket.objects["runs/run-1/0.json"])
    assert (stored["code"], stored["upload"]) == (0, "done")
    attempt, names = run.folder / "attempt-1", ("pid.json", "exit.json", "log", "supervisor.log")
    assert {stat.S_IMODE((attempt / name).stat().st_mode) for name in names} == {0o600}
    assert stat.S_IMODE(attempt.stat().st_mode) == 0o700


def test_an_upload_that_fails_for_good_is_told_and_changes_nothing_else(run: ProgramRun) -> None:
    run.worker.bucket.faults.append(403)
    run.start("print('x'); raise SystemExit(9)", bucket="b", log_object="log", exit_object="exit.json")
    end = run.wait_ended()
    assert (end["code"], end["upload"]) == (9, "failed")
    assert "HTTP 403" in end["upload_error"]


def test_the_latest_attempt_is_meant_where_none_is_named(run: ProgramRun) -> None:
    assert run.state()["state"] == "absent"
    for attempt in (2, 10):
        run.start(f"print({attempt})", attempt=attempt)
        run.wait_ended(attempt)
    assert (run.state()["attempt"], run.state()["log_tail"]) == (10, "10\n")


def test_a_summary_comes_with_the_state(run: ProgramRun) -> None:
    run.start(
        "import os; open(os.environ['SLIPWAY_RUN_DIR'] + '/summary.json', 'w').write('{\"accuracy_after\": 0.9}')"
    )
    assert run.wait_ended()["summary"] == {"accuracy_after": 0.9}
    (run.folder / "summary.json").write_text("{half")
    assert "not JSON" in run.state()["summary"]["error"]
    for text, words in (("[1]", "JSON object"), (" " * (1 << 20) + "{}", "larger than")):
        (run.folder / "summary.json").write_text(text)
        assert words in run.state()["summary"]["error"]


def test_a_running_program_keeps_the_heartbeat_though_the_watchdog_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    ended, kept = Mock(spec=threading.Event, wait=Mock(side_effect=[False, True])), list[bool]()
    monkeypatch.setattr(supervisor, "keep_watchdog", lambda: kept.append(True))
    keep_heartbeat(ended)
    assert (agent_root() / "heartbeat").exists()
    assert kept == [True, True], "and starts it again, at the end too"
    assert [call.args for call in ended.wait.call_args_list] == [(supervisor.HEARTBEAT_SECONDS,)] * 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["no-such-program"], "no such program in the venv or on the PATH; correct program.command"),
        (["./no-such-file"], "there is no such file among the shipped files"),
        (["./package/module.py"], "the file is not executable; run `chmod +x ./package/module.py`"),
    ],
)
def test_a_program_that_cannot_start_says_why(run: ProgramRun, argv: list[str], said: str) -> None:
    run.worker.call("start", **(run.start_payload("") | {"argv": argv}))
    end = run.wait_ended()
    assert (end["code"], end["log_tail"].count("\n")) == (127, 1)
    assert f"slipway: cannot start {argv[0]!r}: {said}" in " ".join(end["log_tail"].split())


SHOW = ("sh", "-c", 'echo "$PEERS|$SLIPWAY_WORKER|$QUOTED|${TOKEN-none}|$PWD|$(command -v python)"')


def enter(run: ProgramRun, *words: str) -> str:
    line = shell_command(run.run_id, shlex.join(words))
    home = {"HOME": str(run.worker.home), "PATH": "/usr/bin:/bin"}
    return subprocess.run(["sh", "-c", line], env=home, capture_output=True, text=True, check=True).stdout.strip()


def test_a_command_runs_in_the_environment_of_the_program_without_its_secrets(run: ProgramRun) -> None:
    told = {"SLIPWAY_WORKER": "2", "QUOTED": "it's\n$HOME"}
    run.start("print(1)", env=told, defaults={"PEERS": "a,b", "QUOTED": "no"}, secrets={"TOKEN": "s3cret"})
    run.wait_ended()
    [venv] = (run.worker.root / "venv").iterdir()
    assert enter(run, *SHOW) == f"a,b|2|it's\n$HOME|none|{run.folder / 'work'}|{venv}/bin/python"
    assert "s3cret" not in (run.folder / "shell.sh").read_text()
    assert "PS1='worker 2:" in (run.folder / "shell.sh").read_text()


def test_before_a_launch_a_command_runs_in_the_home_folder_as_it_is(run: ProgramRun) -> None:
    assert enter(run, "sh", "-c", 'echo "${SLIPWAY_WORKER-none}"') == "none"


def test_without_the_variable_nothing_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert lock_devices("run-1") == []


def test_a_device_belongs_to_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [str(tmp_path / "locks" / name) for name in ("gpu-0", "gpu-1")]
    monkeypatch.setenv(VARIABLE, both[1])
    held = lock_devices("run-1")
    monkeypatch.setenv(VARIABLE, os.pathsep.join(both))
    with pytest.raises(AgentError, match=r"gpu-1 is in use by run-1: .*slipway cancel --run run-1.*cloud.devices"):
        lock_devices("run-2")
    monkeypatch.setenv(VARIABLE, both[0])
    release_devices(lock_devices("run-2"))
    release_devices(held)
    monkeypatch.setenv(VARIABLE, os.pathsep.join(both))
    release_devices(lock_devices("run-2"))


def test_the_lock_lives_as_long_as_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gpu-0"))
    held = lock_devices("run-1")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as program:
        release_devices(held)
        with pytest.raises(AgentError, match="in use by run-1"):
            lock_devices("run-2")
        program.communicate(b"\n")
    release_devices(lock_devices("run-2"))


def test_memory_that_runs_out_ends_the_program_first(run: ProgramRun) -> None:
    """Its supervisor and the watchdog have the score of other processes."""
    run.start("import time; time.sleep(600)")
    begun = json.loads((run.folder / "attempt-1" / "pid.json").read_bytes())
    scores = {
        who: int(Path(f"/proc/{begun[who]['pid']}/oom_score_adj").read_text()) for who in ("program", "supervisor")
    }
    assert scores["program"] == max(500, scores["supervisor"])
    run.worker.call("stop", run_id=run.run_id, grace_seconds=0.0)
