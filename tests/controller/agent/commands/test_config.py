import hashlib
import stat

from tests.controller.agent.conftest import AgentWorker


def test_run_yaml_arrives_byte_for_byte_and_private(worker: AgentWorker) -> None:
    text = "name: 'é'\r\ncommand: $(rm -rf ~) `id` ; \\ \n"
    assert worker.call("observe", run_id="run-1")["config"] is None
    answer = worker.call("write_config", run_id="run-1", text=text, env={"TOKEN": "s3cret"})
    run = worker.root / "runs/run-1"
    assert (run / "run.yaml").read_bytes() == text.encode()
    assert answer == {"path": str(run / "run.yaml"), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    assert worker.call("observe", run_id="run-1")["config"] == answer["sha256"]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (run, run / "env", run / "run.yaml", run.parent)}
    assert modes == {"run-1": 0o700, "env": 0o600, "run.yaml": 0o600, "runs": 0o700}


def test_an_altered_byte_of_run_yaml_shows(worker: AgentWorker) -> None:
    before = worker.call("write_config", run_id="run-1", text="steps: 1\n")["sha256"]
    (worker.root / "runs/run-1/run.yaml").write_text("steps: 2\n")
    assert worker.call("observe", run_id="run-1")["config"] not in (None, before)


def test_what_cannot_be_a_variable_is_refused(worker: AgentWorker) -> None:
    for env in ({"A=B": "x"}, {"": "x"}, {"A B": "x"}, {"A": "x\0y"}, {"A": 1}):
        assert "environment variable" in worker.call_error("write_config", run_id="run-1", text="", env=env)["error"]
