"""The clock of a controller goes on evenly, whatever becomes of this machine's, and Google's answers correct it."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.core import this_process
from controller.core.this_process import TOLERANCE_SECONDS, Clock
from controller.gcp.folder_store import FolderClient
from controller.lease import Lease
from controller.lease_store import BucketLeaseStore, Identity
from controller.records.spending import Account, Spending
from tests.controller.records.test_ledger import budgeted

START = 1_700_000_000.0
OFF: dict[str, Callable[[float], float]] = {
    "right": lambda now: 0.0,
    "set forward": lambda now: 7200.0 if now > 60 else 0.0,
    "set back": lambda now: -7200.0 if now > 60 else 0.0,
    "set back and forward": lambda now: (-86400.0, 86400.0)[int(now / 300) % 2],
    "slewing": lambda now: -now / 2,
    "running fast": lambda now: now,
    "stopped": lambda now: -now,
}
"""How far this machine's time of day is off, by the seconds since the start."""


class Machine:
    """This machine, whose time passes as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, off: Callable[[float], float]) -> None:
        self.elapsed = 0.0
        monkeypatch.setattr(this_process, "boot_time", lambda: 500.0 + self.elapsed)
        monkeypatch.setattr(time, "time", lambda: START + self.elapsed + off(self.elapsed))


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch, OFF[request.param])


@pytest.mark.parametrize("machine", OFF, indirect=True)
def test_a_budget_ends_when_its_time_is_over(machine: Machine, tmp_path: Path) -> None:
    """An hour is an hour; the pod was created, by Google's clock, when the controller began."""
    clock = Clock()
    clock.correct(START)
    account = Spending(FolderClient(clock), clock, str(tmp_path), "r-1", budgeted("budget.max_hours=1"), Account())
    status = SimpleNamespace(uid="u", billed_since=START, spec=SimpleNamespace(accelerator_type="v6e-1"))
    node: Any = SimpleNamespace(name="pod", status=status, place=SimpleNamespace(zone="us-east5-b", capacity="spot"))
    account.open_billing(node)
    for minutes in range(0, 130, 5):
        machine.elapsed = 60.0 * minutes
        assert account.usage().hours == pytest.approx(minutes / 60, abs=0.01)
        assert bool(account.budget_exceeded()) == (minutes >= 60), minutes


@pytest.mark.parametrize("machine", OFF, indirect=True)
@pytest.mark.parametrize("off", [7200.0, -7200.0, 1e9, -1e9])
def test_the_next_controller_counts_from_the_same_time(machine: Machine, off: float, tmp_path: Path) -> None:
    """Its machine's clock is wrong from the beginning; the first answer of Google corrects that."""
    machine.elapsed = 30.0
    clock = Clock()
    clock._booted += off
    clock.correct(START + 30.0)
    assert abs(clock.now() - START - 30.0) <= TOLERANCE_SECONDS
    machine.elapsed = 5000.0
    assert abs(clock.now() - START - 5000.0) <= TOLERANCE_SECONDS


@pytest.mark.parametrize("off", [7200.0, -7200.0])
def test_a_lease_of_this_machine_outlives_a_new_time_of_day(
    off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `cloud=here` this machine is the server, too."""
    clock = Clock()
    store = BucketLeaseStore(FolderClient(clock), str(tmp_path), "run-1", "runs")

    def lease(name: str) -> Lease:
        return Lease(store, clock, Identity("laptop", "run-1", id=name, process=""), 60.0, 60.0, lambda: None)

    holder = lease("anna")
    holder.ensure()
    really = time.time
    monkeypatch.setattr(time, "time", lambda: really() + off)
    assert lease("ben").current_other() is not None
    later = this_process.boot_time() + 61.0
    monkeypatch.setattr("controller.gcp.folder_store.boot_time", lambda: later)
    assert lease("ben").current_other() is None
    holder.release()
