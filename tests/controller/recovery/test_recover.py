"""What recovery makes of what workers say: where they are, and their last words."""

from __future__ import annotations

from controller.recovery.recover import innermost_frame, log_excerpt

DUMP = """step 3
Thread 0x1 (most recent call first):
  File "/home/me/.slipway/runs/r/work/loader.py", line 4 in read
Thread 0x2 (most recent call first):
  File "/home/me/.slipway/runs/r/work/train.py", line 9 in all_reduce
  File "/home/me/.slipway/runs/r/work/train.py", line 20 in <module>
"""


def process(state: str = "S (sleeping)", name: str = "python") -> dict[str, object]:
    return {"pid": 1, "name": name, "state": state, "waits_in": "", "signal": None}


def test_the_main_thread_is_the_last_of_a_dump() -> None:
    assert innermost_frame({"processes": [process()], "text": DUMP}) == "in all_reduce (work/train.py:9)"


def test_a_stopped_program_is_called_that() -> None:
    assert innermost_frame({"processes": [process("T (stopped)")], "text": ""}) == "stopped by a signal"
    assert innermost_frame({"processes": [process("T (stopped)")], "text": DUMP}).startswith(
        "stopped by a signal, in all_reduce"
    )


def test_of_a_program_without_stacks_its_processes_are_named() -> None:
    assert innermost_frame({"processes": [process(name="train")], "text": ""}) == "train: S (sleeping)"
    assert innermost_frame({"processes": [], "text": ""}) == "no program"


def test_last_words_are_those_before_the_stacks_of_an_abort() -> None:
    log = "one\nGloo: Connection reset by peer\nFatal Python error: Aborted\n\n" + "  File x\n" * 100
    assert log_excerpt(log) == "one\nGloo: Connection reset by peer\nFatal Python error: Aborted"
    assert log_excerpt("".join(f"{i}\n" for i in range(100))).splitlines()[0] == "75"
