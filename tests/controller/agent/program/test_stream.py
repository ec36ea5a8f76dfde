import json
import os
import signal

import pytest

from controller.agent.program import stream as module
from controller.agent.program.stream import watch
from tests.controller.agent.conftest import ProgramRun, wait_for

TALK = """
import os, json
for step in range(3):
    print(f"step {step} ☃")
    with open(os.environ["SLIPWAY_RUN_DIR"] + "/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "loss": float("nan")}) + "\\n")
"""


def text(lines: list[dict]) -> str:
    return "".join(line["log"] for line in lines if "log" in line)


def steps(lines: list[dict]) -> list[int]:
    return [line["metrics"]["step"] for line in lines if "metrics" in line]


def test_a_program_that_has_ended_is_told_from_any_place(run: ProgramRun) -> None:
    run.start(TALK)
    whole = "step 0 ☃\nstep 1 ☃\nstep 2 ☃\n"
    lines = run.worker.watch(run_id="run-1", attempt=1)  # while it runs
    assert (text(lines), steps(lines)) == (whole, [0, 1, 2])
    assert lines[-1]["end"] == run.wait_ended()
    first = next(line for line in lines if "metrics" in line)
    for offset, told in ((0, whole), (11, whole.encode()[11:].decode()), (len(whole.encode()), "")):
        again = run.worker.watch(run_id="run-1", log_offset=offset, metrics_offset=first["offset"])
        assert (text(again), steps(again)) == (told, [1, 2])
    for offset, told in ((-1, "step 2 ☃\n"), (-14, "step 1 ☃\nstep 2 ☃\n"), (-1000, whole)):  # from the end
        lines = run.worker.watch(run_id="run-1", log_offset=offset, metrics_offset=-1)
        assert (text(lines), steps(lines)) == (told, [2])
    metrics = run.folder / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    assert steps(run.worker.watch(run_id="run-1", metrics_offset=5000)) == [1], "they were written anew"
    metrics.write_text('{"step": 1}\nnonsense\n[1]\n' + "[" * 500 + "\n{")
    lines = run.worker.watch(run_id="run-1")
    assert steps(lines) == [1]
    warnings = [line["warning"] for line in lines if "warning" in line]
    assert [w.rpartition(" ")[2].strip() for w in warnings] == ["nonsense", "[1]", "[" * 200]
    assert "no attempt-4" in run.worker.call_error("watch", run_id="run-1", attempt=4)["error"]


def test_it_tells_what_is_there_while_the_program_goes_on(run: ProgramRun) -> None:
    script = "import os, time\nprint('one', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\nprint('two')"
    run.start(script)
    wait_for(lambda: run.state()["log_size"])
    lines = run.worker.watch(run_id="run-1", follow=False)
    assert text(lines) == "one\n"
    assert lines[-1]["end"]["state"] == "running"
    watching = run.worker.start_command("watch", run_id="run-1", log_offset=lines[0]["offset"])
    (run.folder / "work/go").write_text("")
    code, lines = run.worker.finish_command(watching)
    assert (code, text(lines), lines[-1]["end"]["code"]) == (0, "two\n", 0)


def test_who_watches_is_not_told_half_a_character(run: ProgramRun) -> None:
    script = (
        "import os, sys, time\n"
        "for byte in 'é☃🙂'.encode():\n"
        "    os.write(1, bytes([byte]))\n"
        "    time.sleep(0.05)\n"
        "os.write(1, b'\\xf0\\x9f')"
    )
    run.start(script)
    assert text(run.worker.watch(run_id="run-1")) == "é☃🙂\N{REPLACEMENT CHARACTER}"


def test_a_lost_supervisor_ends_the_watch(run: ProgramRun) -> None:
    run.start("import time; time.sleep(600)")
    watching = run.worker.start_command("watch", run_id="run-1")
    for who in ("supervisor", "program"):
        os.kill(json.loads((run.folder / "attempt-1/pid.json").read_bytes())[who]["pid"], signal.SIGKILL)
    code, lines = run.worker.finish_command(watching)
    assert (code, lines[-1]["end"]["error"]) == (0, "supervisor lost")


def test_a_watch_ends_with_who_watches(run: ProgramRun) -> None:
    run.start("import time\nwhile True: print('x' * 10000, flush=True); time.sleep(0.02)")
    watching = run.worker.start_command("watch", run_id="run-1")
    assert watching.stdout
    watching.stdout.read(1)
    watching.stdout.close()
    watching.stdout = None
    assert watching.communicate()[1] == b""
    assert watching.returncode == 0


def test_it_gives_a_sign_of_life(
    run: ProgramRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(run.worker.home))
    monkeypatch.setenv("SLIPWAY_BOOT_ID", run.worker.boot_id)
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.0)
    run.start("import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)")

    def beats(seconds: float) -> None:
        if "heartbeat" in capsys.readouterr().out:
            (run.folder / "work/go").write_text("")

    monkeypatch.setattr(module.time, "sleep", beats)
    watch("run-1")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["end"]["code"] == 0


def test_a_long_log_comes_in_short_lines_and_whole(run: ProgramRun) -> None:
    """A controller holds some lines of every worker in its memory."""
    run.start("print('x' * 99 + chr(0x2603))\nprint('y' * 400_000)")
    run.wait_ended()
    lines = [line["log"] for line in run.worker.watch(run_id="run-1") if "log" in line]
    assert "".join(lines) == "x" * 99 + "☃\n" + "y" * 400_000 + "\n"
    assert max(len(line.encode()) for line in lines) <= 128 << 10
