"""The agent's commands: types, handlers and golden file say the same."""

import inspect
import json
import re
import resource
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from controller.agent import dispatch, protocol
from tests.controller.agent.conftest import AgentWorker
from tests.golden import golden

COMMANDS = [command for command in vars(protocol).values() if isinstance(command, protocol.Command)]
GOLDEN = golden("agent")


def types_of(command: protocol.Command[Any, Any]) -> tuple[Any, Any]:
    """The types of a command's request and answer."""
    return command.__orig_class__.__args__  # pyright: ignore[reportAttributeAccessIssue]


def keys_for_user(kind: Any) -> dict[str, str]:
    """The types of its keys, as they are written."""
    return {key: hint.__forward_arg__ for key, hint in kind.__annotations__.items()}


def test_every_command_has_types_and_a_golden_request_and_answer() -> None:
    by_no_controller = {"supervise", "track", "run_watchdog"}
    assert set(COMMANDS) == set(GOLDEN) == set(dispatch.COMMANDS) - by_no_controller


@pytest.mark.parametrize("command", COMMANDS)
def test_a_request_is_what_its_handler_takes(command: protocol.Command[Any, Any]) -> None:
    request = keys_for_user(types_of(command)[0])
    assert set(GOLDEN[command]["request"]) - {"format", "lease"} == set(request)
    handler = getattr(import_module(f"controller.agent.{dispatch.COMMANDS[command]}"), command)
    parameters = inspect.signature(handler).parameters
    taken = {
        name: p.annotation if p.default is p.empty else f"NotRequired[{p.annotation}]" for name, p in parameters.items()
    }
    assert taken == request


@pytest.mark.parametrize("command", COMMANDS)
def test_an_answer_has_the_keys_of_its_type(command: protocol.Command[Any, Any]) -> None:
    lines, kind = GOLDEN[command].get("lines"), types_of(command)[1]
    if lines is not None:  # each line of a stream has some of the keys
        assert set().union(*lines) == {"format", *keys_for_user(kind)}
        return
    answer = GOLDEN[command]["answer"]
    check(GOLDEN[answer]["answer"] if isinstance(answer, str) else answer, kind)


def check(body: dict[str, Any], kind: Any) -> None:
    keys = keys_for_user(kind)
    assert set(body) - {"format"} == set(keys)
    for key, hint in keys.items():
        if named := re.fullmatch(r"(?:list\[)?([A-Z]\w+)\]?(?: \| None)?", hint):
            values = body[key] if isinstance(body[key], list) else [body[key]]
            for value in values:
                if isinstance(value, dict) and named[1] != "Any":
                    check(value, getattr(protocol, named[1]))


@pytest.mark.parametrize(
    ("sent", "said"), [({"format": 2}, "has format 2"), ({}, "has no format")], ids=["another", "none"]
)
def test_an_unknown_format_is_one_clear_error(worker: AgentWorker, sent: dict[str, Any], said: str) -> None:
    asked = subprocess.run(
        [sys.executable, str(worker.agent), "observe"], input=json.dumps(sent).encode(), capture_output=True,
        env=worker.environment, check=False,
    )  # fmt: skip
    answer = json.loads(asked.stdout)
    assert (asked.returncode, answer["format"], answer["detail"]) == (1, 1, "")
    assert answer["error"].startswith(f"the `observe` request {said}; this slipway reads format 1: ")


def test_so_is_a_file_of_another_agent(worker: AgentWorker) -> None:
    file = worker.root / "runs/run-1/attempt-1/pid.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"format": 2}')
    said = f"{file} has format 2; this slipway reads format 1: update slipway"
    assert worker.call_error("state", run_id="run-1")["error"] == said
    file.unlink()


def test_a_full_disk_is_named_with_the_folder(worker: AgentWorker) -> None:
    (free := worker.home.parent / "free").write_text("0")
    worker.extra_environment["SLIPWAY_FREE_GB"] = str(free)
    worker.call("write_config", run_id="r", text="x", env={})
    limited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limited[1]))
    try:
        process = worker.start_process("write_config", run_id="r", text="y", env={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limited)
    code, [answer] = worker.finish_command(process)
    assert (code, answer["error"]) == (1, f"No space left on device: {worker.root}")
    assert "OSError: [Errno 27]" in answer["detail"]


def test_a_worker_knows_which_one_it_is_once_a_controller_has_told_it(worker: AgentWorker) -> None:
    told = worker.root / "worker.json"
    worker.call("watchdog_state")
    assert not told.exists()
    for index in (0, 3, 3, 1):
        worker.call("watchdog_state", worker=index)
        assert json.loads(told.read_text()) == {"format": 1, "index": index}
    told.unlink()
    told.mkdir()
    out, err = worker.start_command("watchdog_state", worker=1).communicate()
    assert (json.loads(out)["running"], err.startswith(b"cannot write ")) == (False, True), "no command fails"


def test_orders_with_an_older_lease_of_the_same_place_are_refused(worker: AgentWorker) -> None:
    """A bucket that was deleted, or another one, counts from the beginning."""
    for token in (3, 5, 5):
        worker.call("watchdog_state", lease={"place": "gs://b/pods/pod", "token": token})
    said = worker.call_error("watchdog_state", lease={"place": "gs://b/pods/pod", "token": 4})
    assert said["error"] == "another controller has taken over this pod (lease 5, not 4)"
    worker.call("watchdog_state", lease={"place": "gs://other/pods/pod", "token": 1})
    worker.call("watchdog_state")  # a look without a lease
    kept = json.loads((worker.home / ".slipway/lease.json").read_text())
    assert kept == {"format": 1, "place": "gs://other/pods/pod", "token": 1}


@pytest.mark.parametrize(
    "text", ["{", '{"format": 1}', '{"format": 1, "place": "gs://b/p", "token": null}', "9" * 5000,
             '{"format": 1, "place": "gs://b/p", "token": NaN}',
             '{"format": 1, "place": "gs://b/p", "token": 9, "token": 0}']
)  # fmt: skip
def test_a_damaged_lease_lets_nobody_act_and_is_named(text: str, worker: AgentWorker) -> None:
    (worker.home / ".slipway").mkdir(exist_ok=True)
    (worker.home / ".slipway/lease.json").write_text(text)
    said = worker.call_error("watchdog_state", lease={"place": "gs://b/p", "token": 4})
    assert f"{worker.home}/.slipway/lease.json is damaged" in said["error"]
