"""What recovery makes of what workers say: where they are, and their last words."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.core.errors import ProgramFailedError, WrongDevicesError
from controller.recovery.policy import GIVE_UP, AttemptOutcome, Decision, Verdict, VerdictKind
from controller.recovery.recover import RecoveryExecutor, innermost_frame
from controller.resources.pod.provisioner import PodStatus
from controller.ssh.connect import WorkerError
from controller.ssh.fleet import DiskFullError, WorkersFailedError

DUMP = """step 3
Thread 0x1 (most recent call first):
  File "/home/me/.slipway/runs/r/work/loader.py", line 4 in read
Thread 0x2 (most recent call first):
  File "/home/me/.slipway/runs/r/work/train.py", line 9 in all_reduce
  File "/home/me/.slipway/runs/r/work/train.py", line 20 in <module>
"""


def process(state: str = "S (sleeping)", name: str = "python") -> dict[str, object]:
    return {"pid": 1, "name": name, "state": state, "waits_in": "", "signal": None}


def test_where_a_program_is() -> None:
    def where(text: str, *processes: Any) -> str:
        return innermost_frame({"processes": [*processes], "text": text})

    assert where(DUMP, process()) == "in all_reduce (work/train.py:9)", "the main thread is the last of a dump"
    assert where("", process("T (stopped)")) == "stopped by a signal"
    assert where(DUMP, process("T (stopped)")) == "stopped by a signal, in all_reduce (work/train.py:9)"
    assert (where("", process(name="train")), where("")) == ("train: S (sleeping)", "no program")


def executor() -> RecoveryExecutor:
    """What recovers a pod of two workers that Google calls healthy."""
    node = SimpleNamespace(spec=SimpleNamespace(workers=2), pod_seen=lambda _: PodStatus("READY"))
    config = SimpleNamespace(cleanup=SimpleNamespace(on_failure="keep"))
    plan = SimpleNamespace(node=node, config=config, run_id="run-1", bucket="b")
    none = cast(Any, None)
    return RecoveryExecutor(cast(Any, plan), none, none, none, 0.0, none)


FULL = "venv: install_venv failed: worker 1: No space left on device: /home/me/.slipway/venvs"
TOO_FULL = "env.min_free_gb: worker 1 has 0.3 GB free"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            WorkersFailedError(
                FULL, [WorkerError(1, "10.0.0.3", "agent", "No space left", "Traceback …\nOSError: [Errno 28]")]
            ),
            rf"^disk full: {FULL}; to fix: delete.*env\.min_free_gb.*$",
        ),
        (DiskFullError(TOO_FULL, [WorkerError(1, "", "agent", "0.3 GB free")]), f"^{TOO_FULL}$"),
    ],
)
def test_a_full_disk_is_one_line_with_worker_folder_and_key(error: WorkersFailedError, message: str) -> None:
    verdict = executor().diagnose_setup(error)
    assert (verdict.kind, verdict.worker) == (VerdictKind.DISK_FULL, 1)
    with pytest.raises(DiskFullError, match=message) as ended:
        executor()._give_up(AttemptOutcome(verdict), Decision(GIVE_UP), error)
    assert ("\n" in str(ended.value), ended.value.exit_code) == (False, 1)


def test_a_hang_that_is_given_up_says_where_and_leaves_no_program_running(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, dict[str, object]]] = []
    fleet = SimpleNamespace(call_all=lambda command, payload: told.append((command, payload)))
    monkeypatch.setattr(RecoveryExecutor, "_fleet", lambda _: fleet)
    giving_up = executor()
    giving_up.ledger = cast(Any, SimpleNamespace(prefix="runs/run-1"))
    places = ["worker 0: in all_reduce (work/train.py:9)", "worker 1: in read (work/loader.py:4)"]
    verdict = Verdict(VerdictKind.HUNG, ("no step and no output for 900 s",))
    with pytest.raises(ProgramFailedError) as ended:
        giving_up._give_up(AttemptOutcome(verdict), Decision(GIVE_UP), None, places)
    assert str(ended.value).splitlines()[:3] == ["hung: no step and no output for 900 s", *places]
    assert told == [("stop", {"run_id": "run-1", "grace_seconds": 5.0})]


def test_bad_chips_are_told_from_a_wrong_plan() -> None:
    for error, kind, worker in (
        (WrongDevicesError("worker 1, chip 2: HBM", faulty=[1]), VerdictKind.UNHEALTHY_HOST, 1),
        (WrongDevicesError("worker 1 has 3 chips", ["4 chips", "3 chips"], [1]), VerdictKind.UNHEALTHY_HOST, 1),
        (WrongDevicesError("expected 4", ["8 tpu", "8 tpu"]), VerdictKind.DEVICE_MISMATCH, None),
        (WrongDevicesError("process 7 holds a chip"), VerdictKind.DEVICE_MISMATCH, None),
    ):
        verdict = executor().diagnose_setup(error)
        assert (verdict.kind, verdict.worker) == (kind, worker)
        with pytest.raises(WrongDevicesError) as ended:
            executor()._give_up(AttemptOutcome(Verdict(kind)), Decision(GIVE_UP), error)
        assert (ended.value, ended.value.exit_code) == (error, 3)
