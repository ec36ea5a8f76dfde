"""What is done once on a worker before the program: in venv and code, by hash, with its output when it fails."""

from typing import Any

from tests.controller.agent.conftest import AgentWorker, ProgramRun

COUNT = ["sh", "-c", 'echo x >> "$SLIPWAY_RUN_DIR/count"; echo made > built.txt']


def setup(run: ProgramRun, *commands: list[str], key: str = "k1", **payload: Any) -> dict[str, Any]:
    order = {"run_id": run.run_id, "key": key, "commands": commands, "code": run.code, "venv": "image", **payload}
    return run.worker.call("run_setup", **order)


def times(run: ProgramRun) -> int:
    return len((run.folder / "count").read_text().split())


def test_it_runs_once_and_again_when_its_key_changes(run: ProgramRun) -> None:
    assert run.worker.call("observe", run_id=run.run_id, venv="image")["setup"] is None
    assert setup(run, COUNT) == {"changed": True}
    assert setup(run, COUNT) == {"changed": False}
    assert run.worker.call("observe", run_id=run.run_id, venv="image")["setup"] == "k1"
    assert setup(run, COUNT, key="k2") == {"changed": True}
    assert times(run) == 2


def test_the_program_finds_what_it_made_and_its_packages_stay(run: ProgramRun) -> None:
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    install = ["sh", "-c", f'mkdir "$(python -c "{site}")/tiny_thing-1.dist-info"']
    setup(run, COUNT, install)
    seen = run.worker.call("observe", venv="image")["venv"]
    assert (seen["ok"], seen["versions"]["tiny-thing"]) == (True, "1")
    assert "tiny-thing" not in seen["installed"]
    run.start("print(open('built.txt').read())")
    assert run.wait_ended()["log_tail"].strip() == "made"


def test_a_failure_shows_the_end_of_what_it_printed_and_is_tried_again(run: ProgramRun) -> None:
    order = {"run_id": run.run_id, "key": "k", "code": run.code, "venv": "image"}
    said = run.worker.call_error("run_setup", commands=[["sh", "-c", "echo boom; exit 3"]], **order)
    assert said["error"] == "setup command `sh -c 'echo boom; exit 3'` ended with code 3"
    assert "boom" in said["detail"]
    said = run.worker.call_error("run_setup", commands=[["no-such-tool"]], **order)
    assert "cannot start" in said["error"]
    assert setup(run, COUNT, key="k") == {"changed": True}


def test_a_venv_made_anew_is_set_up_anew(run: ProgramRun) -> None:
    setup(run, COUNT)
    [mark] = (run.worker.root / "venv").glob("*/slipway.json")
    mark.unlink()
    run.worker.call("install_venv", packages="image", fingerprint="image")
    assert run.worker.call("observe", run_id=run.run_id, venv="image")["setup"] is None
    assert setup(run, COUNT) == {"changed": True}


def test_variables_arrive_and_the_venv_is_wanted(run: ProgramRun, worker: AgentWorker) -> None:
    """A tool that Slipway has installed is found, as uv on a TPU VM, whose image has none."""
    own = run.worker.root / "uv" / "bin" / "our-own-uv"
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text("#!/bin/sh\necho installed > installed.txt\n")
    own.chmod(0o755)
    show = ["sh", "-c", 'echo "$TOKEN" > seen; which python >> seen']
    setup(run, ["our-own-uv", "pip", "install"], show, secrets={"TOKEN": "t"})
    assert (run.folder / "work" / "installed.txt").read_text() == "installed\n"
    token, python = (run.folder / "work/seen").read_text().split()
    assert token == "t"
    assert python.startswith(str(worker.root / "venv"))
    order = {"run_id": "run-9", "key": "k", "commands": [["true"]], "code": run.code, "venv": "f00"}
    assert "install it first" in worker.call_error("run_setup", **order)["error"]
