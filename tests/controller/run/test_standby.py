"""While a bastion boots nobody holds the lease, and whoever ends the run reaches the machine that gave it over."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.core.errors import CloudError
from controller.lease import Lease, ReleaseRequestedError
from controller.lease_store import LeaseSnapshot
from controller.plan.build import Plan
from controller.reconcile import Absent
from controller.records.ledger import Ledger
from controller.resources.bastion_vm import Bastion
from controller.run import standby
from controller.run.standby import Handover
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context
from tests.fakes.leases import FakeFile, lease


def handover(monkeypatch: pytest.MonkeyPatch, ours: Lease, clock: ManualClock, machine: object) -> Handover:
    """Give the run over; `machine` is what is then seen of the bastion."""
    bastion = SimpleNamespace(title="bastion b", observe=lambda context, observed: machine, serial_output=lambda _: "")
    monkeypatch.setattr(standby, "reconcile", lambda resources, context: {})
    monkeypatch.setattr(standby, "replace", lambda bastion, orders: bastion)
    monkeypatch.setattr(standby, "among_themselves", lambda resources: resources)
    monkeypatch.setattr(Handover, "_orders", lambda self: {})
    plan: Any = SimpleNamespace(resources=[], run_id="run-1", get={Bastion: bastion}.__getitem__)
    ledger: Any = SimpleNamespace(write=lambda name, text: None, read=lambda name: b"its log")
    context = make_context(None, Path(), clock=clock)
    return Handover(cast(Plan, plan), context, cast(Ledger, ledger), ours, None, 5.0)


def test_it_is_reached_while_the_bastion_boots(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    file, woken = FakeFile(clock), list[str]()
    ours, other = lease(file, "anna", lambda: woken.append("woken")), lease(file, "ben")
    watches = list[object]()
    monkeypatch.setattr(ours, "_watch", watches.append)
    ours.listen()
    begun = handover(monkeypatch, ours, clock, "a machine")
    token = begun.start_bastion(dict)
    assert (token, len(watches)) == (1, 2), "it listens again after the release"
    clock.on_sleep = lambda: other.request_from_all("cancelled") and clock.elapsed > 20 and ours.obey_requests()
    with pytest.raises(ReleaseRequestedError) as asked:
        begun.wait_for_lease(token)
    assert (asked.value.ends_run, woken) == (True, ["woken"])


@pytest.mark.parametrize("asked", [True, False])
def test_a_bastion_that_is_deleted_meanwhile_was_asked_to_or_ended_early(
    monkeypatch: pytest.MonkeyPatch, *, asked: bool
) -> None:
    clock = ManualClock()
    file = FakeFile(clock)
    ours = lease(file, "anna")
    ours.listen()
    clock.elapsed = 10.0
    begun = handover(monkeypatch, ours, clock, Absent())
    token = begun.start_bastion(dict)
    if asked:
        lease(file, "ben").request_from_all("deleted")
    with pytest.raises(ReleaseRequestedError if asked else CloudError, match="deleted by" if asked else "ended early"):
        begun.wait_for_lease(token)


@pytest.mark.parametrize(("machine", "said"), [("a machine", "did not start in time"), (Absent(), "ended early")])
@pytest.mark.parametrize(("serial", "shown"), [("boot\nno disk\n", "no disk"), ("", "its log")])
def test_of_a_bastion_that_does_not_start_its_serial_port_or_its_log_is_shown(
    monkeypatch: pytest.MonkeyPatch, machine: object, said: str, serial: str, shown: str
) -> None:
    clock = ManualClock()
    begun = handover(monkeypatch, lease(FakeFile(clock), "anna"), clock, machine)
    monkeypatch.setattr(begun.bastion, "serial_output", lambda _: serial)
    with pytest.raises(CloudError, match=rf"bastion b {said}:\n(?s:.*){shown}$"):
        begun.wait_for_lease(begun.start_bastion(dict))


def test_whoever_has_the_lease_then_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    file = FakeFile(clock)
    begun = handover(monkeypatch, lease(file, "anna"), clock, "a machine")
    token = begun.start_bastion(dict)
    clock.on_sleep = lambda: lease(file, "ben").ensure()
    found = begun.wait_for_lease(token)
    assert isinstance(found, LeaseSnapshot)
    assert found.record.id == "ben"
