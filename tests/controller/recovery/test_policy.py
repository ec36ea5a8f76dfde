"""What is done about a verdict: budgets, progress, crash loops, and what is possible."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from conf.schema.run.lifecycle import Recovery
from controller.recovery.diagnosis import Kind, Verdict
from controller.recovery.policy import Decision, Episode, Possible, decide
from tests.groups import CONF

BUDGETS = {"max_preemptions": 20, "max_program_failures": 0, "max_without_progress": 3}


def recovery(policy: dict[str, str] | None = None, **given: Any) -> Recovery:
    raw = yaml.safe_load((CONF / "config.yaml").read_text())["recovery"]
    return Recovery(**{**raw, **given, "policy": raw["policy"] | (policy or {})})


def ends(*kinds: str, progress: int | None = None, response: str = "restart_program") -> list[Episode]:
    return [Episode(i + 1, kind, "", response, progress, 0.0) for i, kind in enumerate(kinds)]


def done(kind: Kind, past: list[Episode] | None = None, progress: int | None = None, **given: Any) -> Decision:
    possible = given.pop("possible", Possible())
    verdict = Verdict(kind, ("x",), **given.pop("verdict", {}))
    return decide(verdict, past or [], progress, recovery(**given), possible)


def test_every_verdict_that_ends_an_attempt_has_a_response() -> None:
    none = {Kind.RUNNING, Kind.FINISHED, Kind.CANCELLED, Kind.OVER_BUDGET}
    assert set(type(recovery().policy).model_fields) == {kind.value for kind in Kind} - none


@pytest.mark.parametrize(
    ("kind", "response"),
    [
        (Kind.PREEMPTED, "replace_node"),
        (Kind.MAINTENANCE, "wait"),
        (Kind.UNHEALTHY_HOST, "replace_node"),
        (Kind.WORKER_LOST, "restart_program"),
        (Kind.NETWORK_LOST, "wait"),
        (Kind.HUNG, "restart_program"),
        (Kind.PROGRAM_ERROR, "give_up"),
        (Kind.OUT_OF_HBM, "give_up"),
        (Kind.SETUP_FAILURE, "give_up"),
    ],
)
def test_by_default(kind: Kind, response: str) -> None:
    assert done(kind) == Decision(response)


def test_program_errors_are_tried_again_where_that_is_wanted() -> None:
    assert done(Kind.PROGRAM_ERROR, max_program_failures=1).response == "restart_program"
    again = done(Kind.PROGRAM_ERROR, ends("program_error"), max_program_failures=1)
    assert (again.response, again.why) == ("give_up", "recovery.max_program_failures is 1")


def test_progress_resets_the_failures() -> None:
    past = ends("program_error", progress=100)
    assert done(Kind.PROGRAM_ERROR, past, 100, max_program_failures=1).response == "give_up"
    assert done(Kind.PROGRAM_ERROR, past, 200, max_program_failures=1).response == "restart_program"
    assert done(Kind.PROGRAM_ERROR, ends("program_error"), 100, max_program_failures=1).response == "restart_program"


def test_a_crash_loop_stops_early() -> None:
    past = ends("worker_lost", "hung", progress=100)
    assert "3 times in a row without a newer checkpoint" in done(Kind.HUNG, past, 100).why
    assert done(Kind.HUNG, past, 110).response == "restart_program"
    assert done(Kind.HUNG, past, 100, max_without_progress=4).response == "restart_program"


def test_preemptions_are_no_crash_loop_and_no_failure() -> None:
    past = ends("preempted", "preempted", "preempted", "preempted", response="replace_node")
    assert done(Kind.PREEMPTED, past) == Decision("replace_node")
    assert done(Kind.PROGRAM_ERROR, past, max_program_failures=1).response == "restart_program"


def test_losses_have_a_budget_of_their_own() -> None:
    past = ends("preempted", "program_error", "preempted", response="replace_node")
    spent = done(Kind.PREEMPTED, past, max_preemptions=2)
    assert spent.spent
    assert "more than 2 times; raise recovery.max_preemptions" in spent.why
    assert done(Kind.PREEMPTED, past, max_preemptions=3).response == "replace_node"


def test_who_starts_a_run_again_that_was_given_up_gives_it_new_budgets() -> None:
    past = [*ends("preempted", "preempted"), *ends("preempted", response="give_up")]
    assert done(Kind.PREEMPTED, past, max_preemptions=2).response == "replace_node"


AWAY = {"worker": 1, "unreachable": (1,)}
ALL = {"worker": 0, "unreachable": (0, 1), "whole_pod": True}


@pytest.mark.parametrize(
    ("kind", "given", "response"),
    [
        (Kind.WORKER_LOST, {"verdict": AWAY}, "replace_node"),
        (Kind.WORKER_LOST, {"verdict": AWAY, "possible": Possible(restarts=True)}, "restart_worker"),
        (Kind.WORKER_LOST, {"verdict": AWAY, "possible": Possible(replaceable=False)}, "give_up"),
        (Kind.WORKER_LOST, {"verdict": ALL}, "restart_program"),
        (Kind.WORKER_LOST, {"verdict": ALL, "past": ends("worker_lost")}, "replace_node"),
        (Kind.WORKER_LOST, {"verdict": ALL, "past": ends("worker_lost", progress=1), "progress": 2}, "restart_program"),
        (Kind.WORKER_LOST, {"verdict": {"worker": 0, "unreachable": (0,), "whole_pod": True}}, "restart_program"),
        (Kind.WORKER_LOST, {"policy": {"worker_lost": "restart_worker"}}, "restart_program"),
        (Kind.PREEMPTED, {"policy": {"preempted": "move_zone"}}, "replace_node"),
        (Kind.PREEMPTED, {"policy": {"preempted": "move_zone"}, "possible": Possible(places=2)}, "move_zone"),
        (Kind.HUNG, {"verdict": {"worker": 1}}, "restart_program"),
    ],
)
def test_what_cannot_be_done_is_escalated(kind: Kind, given: dict[str, Any], response: str) -> None:
    assert done(kind, **given).response == response


def test_the_page_shows_every_verdict_and_its_response() -> None:
    table, _, rest = (CONF.parent / "docs" / "recovery.md").read_text().partition("## What you see")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")]
    verdicts = {row[0].strip("`"): row for row in rows if len(row) == 3}
    assert list(verdicts) == [kind.value for kind in Kind]
    responses = recovery().policy.model_dump()
    assert {name: row[2].strip("`") for name, row in verdicts.items() if row[2] != "–"} == responses
    seen = rest.partition("\n## ")[0]
    shown = [kind for kind in Kind if f"`{kind.value}`" in seen]
    assert shown == [kind for kind in Kind if kind not in (Kind.RUNNING, Kind.FINISHED)]
