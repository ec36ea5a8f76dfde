"""`cancel` ends whoever drives a run and whatever runs of it, and says what it has found at the end."""

import json
from argparse import Namespace
from collections.abc import Iterable, Set
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.cli.main import Command
from controller.cli.verbs import down
from controller.core.errors import CloudError
from controller.gcp.answers import LABEL
from controller.gcp.google_errors import GoogleError
from controller.reconcile import Absent
from controller.resources.bastion_vm import RUN_LABEL, Bastion
from controller.run import cancel
from tests.fakes.clock import ManualClock

TEXTS = ("zone", "machine_type", "network", "subnetwork", "account", "labels")
BASTION = Bastion(name="bastion", external_ip=False, run_id="mine", **cast(Any, dict.fromkeys(TEXTS, "")))


class Scene:
    """A run with what each look finds.

    Attributes:
        seen: what was done, in order.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        runs: Iterable[Set[str]] = (frozenset(),),
        holders: Iterable[str | None] = (),
        starting: bool = False,
        result: object = None,
        pod: object = "a node",
        bastion: str = "",
        driver: str = "",
    ) -> None:
        """Prepare the scene.

        Args:
            monkeypatch: of the test.
            runs: those on the pod, look by look.
            holders: of the run's lease, look by look; then nobody.
            starting: whether a controller of this machine has no lease yet.
            result: that of the run at the end.
            pod: what is there at the end.
            bastion: run and state of the bastion that is there.
            driver: what held the run's lease last.
        """
        self.seen: list[str] = []
        looks, held = iter(runs), iter(holders)
        self.clock = ManualClock()
        lease = SimpleNamespace(
            current_other=lambda: next(held, None),
            await_release=lambda why, tell: self.seen.append(f"asked: {why}"),
            read=lambda: SimpleNamespace(record=SimpleNamespace(driver=driver)) if driver else None,
        )
        config = SimpleNamespace(cloud=SimpleNamespace(kind="gcp"))
        self.session: Any = SimpleNamespace(
            plan=SimpleNamespace(run_id="mine", bucket="b", config=config, resources=[BASTION]),
            context=SimpleNamespace(google=None, clock=self.clock, poll_seconds=5.0, state_dir=Path("state")),
            ledger=SimpleNamespace(result=lambda: result),
            fleet=lambda: "workers",
            node=lambda: pod,
        )
        run, _, state = bastion.partition(" ")
        machine = {"status": state, "labels": {**LABEL, RUN_LABEL: run}} if bastion else None
        monkeypatch.setattr(Bastion, "_get", lambda bastion, context: machine)
        monkeypatch.setattr(Bastion, "destroy", lambda bastion, context: self.seen.append("delete the bastion"))
        monkeypatch.setattr(cancel, "run_lease", lambda plan, context: lease)
        monkeypatch.setattr(cancel, "end_starting", lambda context, lease, file, run_id, why: starting)
        monkeypatch.setattr(cancel, "running_runs", lambda fleet: set(next(looks)))
        monkeypatch.setattr(cancel, "record_cancellations", lambda context, bucket, ids: self.seen.extend(ids) or [])
        monkeypatch.setattr(cancel, "stop", lambda fleet, run_id: self.seen.append(f"stop {run_id}"))
        monkeypatch.setattr(down, "open_session", lambda options, ends: nullcontext(self.session))
        monkeypatch.setattr(down, "end_pods", lambda plan, context, why: [])

    def command(self, *, as_json: bool) -> Command:
        options = SimpleNamespace(showing=lambda what: nullcontext(lambda text: None))
        return cast(Command, SimpleNamespace(options=options, flags=Namespace(json=as_json)))


@pytest.mark.parametrize(
    ("scene", "seen", "says"),
    [
        ({}, [], "mine is not running"),
        ({"runs": [{"other"}]}, [], "mine is not running; running on the pod: other"),
        ({"runs": [{"mine"}]}, ["mine", "stop mine"], "mine is cancelled; the pod stays, `slipway down` deletes it;"),
        ({"runs": [{"mine"}], "pod": Absent()}, ["mine", "stop mine"], "mine is cancelled; `slipway up` resumes"),
        ({"runs": [{"mine"}], "result": "done"}, ["mine", "stop mine"], "mine has finished: nothing was cancelled"),
        ({"runs": [{}, {}], "holders": ["anna"]}, ["asked: cancelled"], "mine is cancelled"),
        (
            {"runs": [{}, {}], "holders": ["anna"], "result": "done"},
            ["asked: cancelled"],
            "mine has finished: nothing was cancelled",
        ),
        (
            {"runs": [{}, {"mine"}], "holders": ["anna", "ben"]},
            ["asked: cancelled", "asked: cancelled", "mine", "stop mine"],
            "mine is cancelled",
        ),
        ({"runs": [{}, {}], "starting": True, "pod": Absent()}, [], "mine is cancelled; `slipway up` resumes"),
        ({"runs": [{}, {}], "bastion": "mine STAGING"}, ["delete the bastion"], "mine is cancelled"),
        (
            {"runs": [{}, {}], "bastion": "mine RUNNING", "driver": "laptop", "starting": True},
            ["delete the bastion"],
            "mine is cancelled",
        ),
        (
            {"runs": [{}, {}], "bastion": "mine RUNNING", "driver": "laptop", "holders": ["anna"]},
            ["asked: cancelled", "delete the bastion"],
            "mine is cancelled",
        ),
        ({"bastion": "mine RUNNING", "driver": "bastion"}, [], "mine is not running"),
        ({"bastion": "mine STOPPING"}, [], "mine is not running"),
        ({"bastion": "other RUNNING"}, [], "mine is not running"),
    ],
)
def test_it_says_what_it_found_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scene: dict[str, Any],
    seen: list[str],
    says: str,
) -> None:
    made = Scene(monkeypatch, **scene)
    assert down.run_cancel(made.command(as_json=False)) == 0
    assert made.seen == seen
    assert " ".join(capsys.readouterr().out.split()).startswith(says)


@pytest.mark.parametrize("started", [{"mine", "other"}, {"other"}])
def test_a_program_that_its_controller_starts_meanwhile_is_ended_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], started: set[str]
) -> None:
    made = Scene(monkeypatch, runs=[set(), started], holders=["anna"])
    assert down.run_cancel(made.command(as_json=True)) == 0
    assert made.seen == ["asked: cancelled", *(["mine", "stop mine"] if "mine" in started else [])]
    assert json.loads(capsys.readouterr().out) == {"run": "mine", "cancelled": True, "running": sorted(started)}


@pytest.mark.parametrize(("lasts", "asked"), [(3, []), (100, ["asked: cancelled"])])
def test_a_controller_ends_by_the_record_or_is_asked(
    monkeypatch: pytest.MonkeyPatch, lasts: int, asked: list[str]
) -> None:
    """By the record it also writes down how the run has ended."""
    made = Scene(monkeypatch, runs=[{"mine"}, set()], holders=[*["anna"] * min(lasts, 21)])
    assert cancel.cancel_run(made.session, lambda text: None).cancelled
    assert [act for act in made.seen if act.startswith("asked")] == asked
    assert made.clock.elapsed <= cancel.RECORD_SECONDS + 1


def test_a_controller_that_cannot_be_told_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Scene(monkeypatch)

    def refuse(plan: Any, context: Any) -> Any:
        raise GoogleError("get", 503, "UNAVAILABLE", "an outage")

    monkeypatch.setattr(cancel, "run_lease", refuse)
    with pytest.raises(CloudError, match="a controller that drives mine goes on with it, for it was not told"):
        down.run_cancel(made.command(as_json=False))
    assert capsys.readouterr().out == "mine is not running\n"
