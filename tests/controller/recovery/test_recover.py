"""What recovery makes of what workers say, and what is done about a verdict: budgets, progress, crash loops."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from conf.schema.run_sections import Recovery
from controller.core.errors import ProgramFailedError, WrongDevicesError
from controller.recovery.diagnosis import TRAINER_EXIT_CODES, diagnose, workers_and
from controller.recovery.recover import RecoveryExecutor, innermost_frame
from controller.recovery.responses import (
    GIVE_UP,
    AttemptOutcome,
    Decision,
    Incident,
    Observation,
    PodCapabilities,
    Verdict,
    VerdictKind,
    WorkerStatus,
    decide,
)
from controller.resources.pod.provisioner import PodStatus
from controller.ssh.agent_link import WorkerError
from controller.ssh.fleet import DiskFullError, WorkersFailedError
from tests.groups import CONF

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


def recovery(policy: dict[str, str] | None = None, **given: Any) -> Recovery:
    raw = yaml.safe_load((CONF / "config.yaml").read_text())["recovery"]
    return Recovery(**{**raw, **given, "policy": raw["policy"] | (policy or {})})


def ends(*kinds: str, progress: int | None = None, response: str = "restart_program") -> list[Incident]:
    return [Incident(i + 1, kind, "", response, progress, 0.0) for i, kind in enumerate(kinds)]


def corrupted(worker: int | None, response: str = "restart_program") -> Incident:
    return Incident(1, "corruption", "", response, None, 0.0, (), worker)


K = VerdictKind
AGAIN = {"max_program_failures": 1}
AWAY = {"verdict": {"worker": 1, "unreachable": (1,)}}
ALL = {"verdict": {"worker": 0, "unreachable": (0, 1), "whole_pod": True}}
ALONE = {"verdict": {"worker": 0, "unreachable": (0,), "whole_pod": True}}
MOVES = {"policy": {"preempted": "move_zone"}}
FAILED = ends("program_error", progress=100)
FAULTY = ends("unhealthy_host", "unhealthy_host", response="replace_node")
STUCK = ends("worker_lost", "hung", progress=100)
TAKEN = ends("preempted", "preempted", "preempted", "preempted", response="replace_node")
BOTH = ends("preempted", "program_error", "preempted", response="replace_node")
GIVEN_UP = [*ends("preempted", "preempted"), *ends("preempted", response="give_up")]
ONCE = "recovery.max_program_failures is 1"
"""Why nothing is tried again after the second failure."""


@pytest.mark.parametrize(
    ("kind", "given", "response", "reason"),
    [
        # by default
        (K.PREEMPTED, {}, "replace_node", ""),
        (K.MAINTENANCE, {}, "wait", ""),
        (K.WORKER_LOST, {}, "restart_program", ""),
        (K.HUNG, {}, "restart_program", ""),
        (K.PROGRAM_ERROR, {}, "give_up", ""),
        # program errors are tried again where that is wanted, and progress resets them
        (K.PROGRAM_ERROR, AGAIN, "restart_program", ""),
        (K.PROGRAM_ERROR, {**AGAIN, "past": ends("program_error")}, "give_up", ONCE),
        (K.PROGRAM_ERROR, {**AGAIN, "past": ends("program_error"), "progress": 100}, "restart_program", ""),
        (K.PROGRAM_ERROR, {**AGAIN, "past": FAILED, "progress": 100}, "give_up", ONCE),
        (K.PROGRAM_ERROR, {**AGAIN, "past": FAILED, "progress": 200}, "restart_program", ""),
        # a crash loop stops early, and so do pods with faulty chips one after the other
        (K.HUNG, {"past": STUCK, "progress": 100}, "give_up", "3 times in a row without a newer checkpoint"),
        (K.HUNG, {"past": STUCK, "progress": 110}, "restart_program", ""),
        (K.HUNG, {"past": STUCK, "progress": 100, "max_without_progress": 4}, "restart_program", ""),
        (K.UNHEALTHY_HOST, {"past": FAULTY[:1]}, "replace_node", ""),
        (K.UNHEALTHY_HOST, {"past": FAULTY}, "give_up", "recovery.max_without_progress"),
        # preemptions are no crash loop and no failure, and have a budget of their own, which who starts again renews
        (K.PREEMPTED, {"past": TAKEN}, "replace_node", ""),
        (K.PROGRAM_ERROR, {**AGAIN, "past": TAKEN}, "restart_program", ""),
        (K.PREEMPTED, {"past": BOTH, "max_preemptions": 2}, "give_up", "2 times; raise recovery.max_preemptions"),
        (K.PREEMPTED, {"past": BOTH, "max_preemptions": 3}, "replace_node", ""),
        (K.PREEMPTED, {"past": GIVEN_UP, "max_preemptions": 2}, "replace_node", ""),
        # what cannot be done is escalated
        (K.WORKER_LOST, AWAY, "replace_node", ""),
        (K.WORKER_LOST, {**AWAY, "possible": PodCapabilities(restartable=True)}, "restart_worker", ""),
        (K.WORKER_LOST, {**AWAY, "possible": PodCapabilities(replaceable=False)}, "give_up", "is never replaced"),
        (K.WORKER_LOST, ALL, "restart_program", ""),
        (K.WORKER_LOST, {**ALL, "past": ends("worker_lost")}, "replace_node", ""),
        (K.WORKER_LOST, {**ALL, "past": ends("worker_lost", progress=1), "progress": 2}, "restart_program", ""),
        (K.WORKER_LOST, ALONE, "restart_program", ""),
        (K.WORKER_LOST, {"policy": {"worker_lost": "restart_worker"}}, "restart_program", ""),
        (K.PREEMPTED, MOVES, "replace_node", ""),
        (K.PREEMPTED, {**MOVES, "possible": PodCapabilities(places=2)}, "move_zone", ""),
    ],
)
def test_decision(kind: VerdictKind, given: dict[str, Any], response: str, reason: str) -> None:
    rest = dict(given)
    verdict = Verdict(kind, ("x",), **rest.pop("verdict", {}))
    past, progress = rest.pop("past", []), rest.pop("progress", None)
    possible = rest.pop("possible", PodCapabilities())
    found = decide(verdict, past, progress, recovery(**rest), possible)
    assert (found.response, bool(found.reason)) == (response, bool(reason))
    assert reason in found.reason
    assert found.retries_exhausted == ("max_preemptions" in reason)


@pytest.mark.parametrize(
    ("past", "worker", "response"),
    [
        ([corrupted(1)], 1, "replace_node"),
        ([corrupted(1)], 0, "restart_program"),
        ([corrupted(None)], 1, "replace_node"),
        ([corrupted(1)], None, "replace_node"),
        ([corrupted(1), *ends("preempted", response="replace_node")], 1, "restart_program"),
        ([corrupted(1), *ends("worker_lost")], 1, "replace_node"),
    ],
)
def test_who_corrupts_twice_on_a_pod_has_it_replaced(past: list[Incident], worker: int | None, response: str) -> None:
    verdict = Verdict(K.CORRUPTION, ("x",), worker=worker)
    assert decide(verdict, past, None, recovery(max_without_progress=9), PodCapabilities()) == Decision(response)
    body = {name: value for name, value in corrupted(3).to_json().items() if name != "worker"}
    assert Incident.from_json(body) == corrupted(None), "of before the worker was recorded"


def test_the_page_shows_every_verdict_and_its_response() -> None:
    table, _, rest = (CONF.parent / "docs" / "recovery.md").read_text().partition("## What you see")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")]
    verdicts = {row[0].strip("`"): row for row in rows if len(row) == 3}
    assert list(verdicts) == [kind.value for kind in VerdictKind]
    responses = recovery().policy.model_dump()
    assert {name: row[2].strip("`") for name, row in verdicts.items() if row[2] != "–"} == responses
    seen = rest.partition("\n## ")[0]
    shown = [kind for kind in VerdictKind if f"`{kind.value}`" in seen]
    assert shown == [kind for kind in VerdictKind if kind not in (VerdictKind.RUNNING, VerdictKind.FINISHED)]


@pytest.mark.parametrize(
    ("log", "worker", "words"),
    [
        ("hardware fault: worker 1: its copy of params.w differs", 1, ("worker 1: its copy of params.w differs",)),
        ("hardware fault: worker 0 or 1: a\nI0000 x\nhardware fault: worker 0 or 1: b", None,
         ("worker 0 or 1: a", "worker 0 or 1: b")),
        ("hardware fault: some worker: update 7", None, ("some worker: update 7",)),
        ("an own program says it by its code alone", 0,
         ("worker 0: its program exited with code 5", "an own program says it by its code alone")),
    ],
)  # fmt: skip
def test_the_worker_that_the_program_names_is_to_blame(log: str, worker: int | None, words: tuple[str, ...]) -> None:
    ends = tuple(WorkerStatus(ended=True, code=5, ended_at=10.0, log_tail=f"step 12\n{log}\n") for _ in range(3))
    found = diagnose(Observation(PodStatus(), ends, exit_codes=TRAINER_EXIT_CODES))
    assert (found.kind, found.worker, found.evidence) == (VerdictKind.CORRUPTION, worker, words)


@pytest.mark.parametrize(
    ("verb", "one", "several"),
    [
        (
            "has not responded for 30 s",
            "worker 2 has not responded for 30 s",
            "workers 0, 2 have not responded for 30 s",
        ),
        ("was lost after it", "worker 2 was lost after it", "workers 0, 2 were lost after it"),
        ("exited with code 1", "worker 2 exited with code 1", "workers 0, 2 exited with code 1"),
    ],
)
def test_one_worker_is_one_and_several_are_several(verb: str, one: str, several: str) -> None:
    assert (workers_and(verb, [2]), workers_and(verb, (0, 2))) == (one, several)
