"""What is done about a verdict: budgets, progress, crash loops, and what is possible."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from conf.schema.run.lifecycle import Recovery
from controller.recovery.diagnosis import TRAINER_EXIT_CODES, diagnose
from controller.recovery.policy import Decision, Incident, PodCapabilities, decide
from controller.recovery.verdict import Observation, Verdict, VerdictKind, WorkerStatus
from controller.resources.pod.provisioner import PodStatus
from tests.groups import CONF

BUDGETS = {"max_preemptions": 20, "max_program_failures": 0, "max_without_progress": 3}


def recovery(policy: dict[str, str] | None = None, **given: Any) -> Recovery:
    raw = yaml.safe_load((CONF / "config.yaml").read_text())["recovery"]
    return Recovery(**{**raw, **given, "policy": raw["policy"] | (policy or {})})


def ends(*kinds: str, progress: int | None = None, response: str = "restart_program") -> list[Incident]:
    return [Incident(i + 1, kind, "", response, progress, 0.0) for i, kind in enumerate(kinds)]


def done(kind: VerdictKind, past: list[Incident] | None = None, progress: int | None = None, **given: Any) -> Decision:
    possible = given.pop("possible", PodCapabilities())
    verdict = Verdict(kind, ("x",), **given.pop("verdict", {}))
    return decide(verdict, past or [], progress, recovery(**given), possible)


@pytest.mark.parametrize(
    ("kind", "response"),
    [
        (VerdictKind.PREEMPTED, "replace_node"),
        (VerdictKind.MAINTENANCE, "wait"),
        (VerdictKind.WORKER_LOST, "restart_program"),
        (VerdictKind.HUNG, "restart_program"),
        (VerdictKind.PROGRAM_ERROR, "give_up"),
    ],
)
def test_by_default(kind: VerdictKind, response: str) -> None:
    assert done(kind) == Decision(response)


def test_program_errors_are_tried_again_where_that_is_wanted_and_progress_resets_them() -> None:
    def tried(past: list[Incident], progress: int | None = None) -> Decision:
        return done(VerdictKind.PROGRAM_ERROR, past, progress, max_program_failures=1)

    assert tried([]).response == "restart_program"
    again = tried(ends("program_error"))
    assert (again.response, again.reason) == ("give_up", "recovery.max_program_failures is 1")
    past = ends("program_error", progress=100)
    assert [tried(past, step).response for step in (100, 200)] == ["give_up", "restart_program"]
    assert tried(ends("program_error"), 100).response == "restart_program"


def test_a_crash_loop_stops_early() -> None:
    past = ends("worker_lost", "hung", progress=100)
    assert "3 times in a row without a newer checkpoint" in done(VerdictKind.HUNG, past, 100).reason
    assert done(VerdictKind.HUNG, past, 110).response == "restart_program"
    assert done(VerdictKind.HUNG, past, 100, max_without_progress=4).response == "restart_program"


def test_faulty_chips_on_one_pod_after_the_other_are_given_up() -> None:
    past = ends("unhealthy_host", "unhealthy_host", response="replace_node")
    assert done(VerdictKind.UNHEALTHY_HOST, past[:1]) == Decision("replace_node")
    ended = done(VerdictKind.UNHEALTHY_HOST, past)
    assert (ended.response, ended.retries_exhausted) == ("give_up", False)
    assert "recovery.max_without_progress" in ended.reason


def test_preemptions_are_no_crash_loop_and_no_failure() -> None:
    past = ends("preempted", "preempted", "preempted", "preempted", response="replace_node")
    assert done(VerdictKind.PREEMPTED, past) == Decision("replace_node")
    assert done(VerdictKind.PROGRAM_ERROR, past, max_program_failures=1).response == "restart_program"


def test_losses_have_a_budget_of_their_own() -> None:
    past = ends("preempted", "program_error", "preempted", response="replace_node")
    spent = done(VerdictKind.PREEMPTED, past, max_preemptions=2)
    assert spent.retries_exhausted
    assert "more than 2 times; raise recovery.max_preemptions" in spent.reason
    assert done(VerdictKind.PREEMPTED, past, max_preemptions=3).response == "replace_node"


def test_who_starts_a_run_again_that_was_given_up_gives_it_new_budgets() -> None:
    past = [*ends("preempted", "preempted"), *ends("preempted", response="give_up")]
    assert done(VerdictKind.PREEMPTED, past, max_preemptions=2).response == "replace_node"


LOST, TAKEN = VerdictKind.WORKER_LOST, VerdictKind.PREEMPTED
AWAY = {"worker": 1, "unreachable": (1,)}
ALL = {"worker": 0, "unreachable": (0, 1), "whole_pod": True}
ALONE = {"worker": 0, "unreachable": (0,), "whole_pod": True}
MOVES = {"preempted": "move_zone"}


@pytest.mark.parametrize(
    ("kind", "given", "response"),
    [
        (LOST, {"verdict": AWAY}, "replace_node"),
        (LOST, {"verdict": AWAY, "possible": PodCapabilities(restartable=True)}, "restart_worker"),
        (LOST, {"verdict": AWAY, "possible": PodCapabilities(replaceable=False)}, "give_up"),
        (LOST, {"verdict": ALL}, "restart_program"),
        (LOST, {"verdict": ALL, "past": ends("worker_lost")}, "replace_node"),
        (LOST, {"verdict": ALL, "past": ends("worker_lost", progress=1), "progress": 2}, "restart_program"),
        (LOST, {"verdict": ALONE}, "restart_program"),
        (LOST, {"policy": {"worker_lost": "restart_worker"}}, "restart_program"),
        (TAKEN, {"policy": MOVES}, "replace_node"),
        (TAKEN, {"policy": MOVES, "possible": PodCapabilities(places=2)}, "move_zone"),
    ],
)
def test_what_cannot_be_done_is_escalated(kind: VerdictKind, given: dict[str, Any], response: str) -> None:
    assert done(kind, **given).response == response


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
        ("hardware fault: worker 1: a\nhardware fault: worker 2: b", None, ("worker 1: a", "worker 2: b")),
        ("hardware fault: some worker: update 7", None, ("some worker: update 7",)),
        ("an own program says it by its code alone", 0,
         ("worker 0: its program exited with code 5", "an own program says it by its code alone")),
    ],
)  # fmt: skip
def test_the_worker_that_the_program_names_is_to_blame(log: str, worker: int | None, words: tuple[str, ...]) -> None:
    ends = tuple(WorkerStatus(ended=True, code=5, ended_at=10.0, log_tail=f"step 12\n{log}\n") for _ in range(3))
    found = diagnose(Observation(PodStatus(), ends, exit_codes=TRAINER_EXIT_CODES))
    assert (found.kind, found.worker, found.evidence) == (VerdictKind.CORRUPTION, worker, words)


def corrupted(worker: int | None, response: str = "restart_program") -> Incident:
    return Incident(1, "corruption", "", response, None, 0.0, (), worker)


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
def test_a_worker_that_corrupts_twice_on_one_pod_has_it_replaced(
    past: list[Incident], worker: int | None, response: str
) -> None:
    given = {"max_without_progress": 9, "verdict": {"worker": worker}}
    assert done(VerdictKind.CORRUPTION, past, **given) == Decision(response)


def test_incidents_of_before_the_worker_was_recorded_are_read() -> None:
    body = {name: value for name, value in corrupted(3).to_json().items() if name != "worker"}
    assert Incident.from_json(body) == corrupted(None)
