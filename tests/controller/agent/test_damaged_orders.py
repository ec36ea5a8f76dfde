"""Files of the guards of a pod that hold something else: no guard dies of it, waits for it, or allows more."""

import json
import os
from pathlib import Path

import pytest

from controller.agent import fs, watchdog
from controller.resources import dead_mans_switch
from tests.controller.agent.test_guards import CLOCKS, GUARDS, IDLE, LIMIT, SILENT, Pod, begin

NO_NUMBERS = ("1" + "0" * 400, "-1" + "0" * 400, "9" * 5000, "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "true",
              "false", '"600"', "{}", "[600]", "1e13", "")  # fmt: skip
"""What may stand in place of a number in a file, and is none that a limit can have."""


def orders(key: str, text: str) -> str:
    """The orders of `drive`, with this text as the value of a key."""
    values = {"until": LIMIT, "seconds_left": LIMIT, "idle_seconds": IDLE, "asked": 0.0, "format": 1}
    texts = {name: json.dumps(value) for name, value in values.items()}
    texts |= {"boot_id": '"boot-1"', "agent": '"agent.pyz"', "bucket": "null", "deletes": "[]", "note_object": '""'}
    return "{" + ", ".join(f'"{name}": {value}' for name, value in (texts | {key: text}).items()) + "}"


DAMAGED = {
    **{f"{key} is {text:.9}": orders(key, text) for key in ("until", "idle_seconds") for text in NO_NUMBERS},
    **{f"asked is {text:.9}": orders("asked", text) for text in ("NaN", "null", "1" + "0" * 400)},
    "a negative idle time": orders("idle_seconds", "-5"),
    "a number as boot": orders("boot_id", "7"),
    "no addresses": orders("deletes", "[1]"),
    "a key twice": orders("until", '5000, "until": null, "idle_seconds": null'),
    "another format": orders("format", "2"),
    "not UTF-8": "\xff",
    **{f"the text {text:.9}": text for text in ("", "{", "[]", "7", "null")},
}


def test_damaged_orders_end_no_guard_and_prolong_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is left ends the pod when it would have without the damage."""
    for dead in ((), ("watchdog", "supervisor"), ("switch",)):
        ended: dict[str, float] = {}
        for number, (what, text) in enumerate({"sound": orders("asked", "0.0"), **DAMAGED}.items()):
            with monkeypatch.context() as patch:
                pod = Pod(tmp_path / f"{number}-{len(dead)}", patch, CLOCKS["right"])
                begin(pod)
                pod.run(301.0)
                pod.kill("controller")
                (pod.home / ".slipway/watchdog.json").write_text(text, encoding="latin-1")
                for name in dead:
                    pod.kill(name)
                pod.run(SILENT)
                for name in GUARDS:
                    pod.kill(name)
            [(ended[what], _)] = pod.deleted
        assert {what: when for what, when in ended.items() if when != ended["sound"]} == {}, (dead, ended["sound"])


def test_a_pipe_or_a_folder_in_place_of_the_orders_holds_up_no_switch(tmp_path: Path) -> None:
    known: dict[str, tuple[float, float]] = {}
    file = tmp_path / ".slipway/watchdog.json"
    file.parent.mkdir()
    for make in (lambda: file.write_text(orders("until", "500")), lambda: os.mkfifo(file), file.mkdir, lambda: None):
        make()
        assert dead_mans_switch.read_limits([str(tmp_path)], "boot-1", 0.0, known) == (500.0, IDLE)
        file.rmdir() if file.is_dir() else file.unlink(missing_ok=True)


def test_a_disk_that_takes_no_line_ends_no_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        flush = write

    monkeypatch.setattr("sys.stderr", Full())
    monkeypatch.setenv("SLIPWAY_AGENT_ROOT", str(tmp_path))
    watchdog._note_refusal("HTTP 403")
    fs.complain("x")
    with dead_mans_switch.going_on():
        raise ValueError("x")


def test_a_damaged_record_of_a_program_ends_no_watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real look at the programs: what cannot be read does not count as one that runs."""
    monkeypatch.setenv("SLIPWAY_AGENT_ROOT", str(tmp_path))
    monkeypatch.setattr(watchdog, "ssh_sessions", lambda proc: [])
    folder = tmp_path / "runs/r/attempt-1"
    folder.mkdir(parents=True)
    for text in ("", "{", "[1]", '{"format": 1}', '{"format": 1, "boot_id": {}}', "9" * 5000):
        (folder / "pid.json").write_text(text)
        assert watchdog.in_use() is False, text[:20]


@pytest.mark.parametrize("pid", ["null", "0", "-1", "1.5", "true", "1" + "0" * 400, "NaN", '"self"', "4194305"])
def test_a_record_of_no_process_is_not_alive(pid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that ended before its start was recorded: null is not the start of a process."""
    monkeypatch.setenv("SLIPWAY_AGENT_ROOT", str(tmp_path))
    monkeypatch.setenv("SLIPWAY_BOOT_ID", "boot-1")
    text = f'{{"format": 1, "boot_id": "boot-1", "agent": "agent.pyz", "start_time": null, "pid": {pid}}}'
    (tmp_path / "watchdog-pid.json").write_text(text)
    assert watchdog._is_running("agent.pyz") is False
