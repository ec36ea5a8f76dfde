"""The step `verified`: which programs have the chips checked, in which order, and what is asked of their Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller.core.errors import WrongDevicesError
from controller.reconcile.resource import ObservedResources
from controller.resources.workers import verified
from controller.resources.workers.verified import DeviceProbe, lacks_libtpu
from controller.ssh.fleet import WorkersFailedError
from tests.controller.resources.workers.fakes import FakeFleet
from tests.controller.resources.workers.test_health import passed
from tests.fakes.context import make_context

STEP = DeviceProbe(
    name="pod", node="node/pod", venv="f1", backend="tpu", probe_devices=False, health_check=True, needs_libtpu=True,
    devices=(4, 4), reach_worker_0=(True, True), healthy=(True, True), libtpu=(True, True),
)  # fmt: skip
JAX, TORCH = {"jax": "0.10.2", "libtpu": "0.0.42"}, {"torch-xla": "2.9.0", "libtpu": "0.0.21"}
REACHED = {"reachable": True, "detail": ""}


@pytest.fixture(autouse=True)
def no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "peer_payloads", lambda _: [])


def seen(versions: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"venv": {"versions": versions}, "devices": None, "peers": None, "health": None, "active": None} | more


def settle(step: DeviceProbe, *rows: dict[str, Any], **answers: Any) -> tuple[list[str], list[str]]:
    """Observe, and apply if there is a difference; return the commands after the first look, and the notes."""
    notes: list[str] = []
    fleet = FakeFleet({"observe": [*rows], "probe_peers": [REACHED, REACHED], **answers})
    observed: ObservedResources = {"node/pod": fleet}
    context = make_context(None, notes=notes)
    if diff := step.diff(step.observe(context, observed)):
        step.apply(context, observed, diff)
    return [command for command, _ in fleet.asked if command != "observe"], notes


def test_a_program_with_jax_has_its_chips_checked_after_the_network_by_one_start_of_jax() -> None:
    asked, notes = settle(STEP, seen(JAX), seen(JAX), check_health=[passed(0), passed(1)])
    assert asked == ["probe_peers", "check_health"]
    assert [note.partition(" in ")[0] for note in notes] == ["health check passed"]
    trainer = replace(STEP, probe_devices=True)
    assert settle(trainer, seen(JAX), seen(JAX), check_health=[passed(0), passed(1)])[0][1:] == ["check_health"]
    alone = replace(trainer, health_check=False)
    assert settle(alone, seen(JAX), seen(JAX), probe_devices=[passed(0), passed(1)])[0][1:] == ["probe_devices"]


def test_chips_that_have_passed_in_this_boot_cost_nothing() -> None:
    known = {"devices": passed(0), "peers": REACHED, "health": passed(0)}
    assert settle(STEP, seen(JAX, **known), seen(JAX, **known)) == ([], [])
    rebooted = seen(JAX, **known | {"health": None, "devices": None})
    asked, _ = settle(STEP, seen(JAX, **known), rebooted, check_health=[passed(0), passed(1)])
    assert asked == ["probe_peers", "check_health"], "all workers together"
    busy = seen(JAX, peers=REACHED, active={"run_id": "run-1", "attempt": 1})
    assert settle(STEP, busy, busy) == ([], []), "a running program is left alone"


@pytest.mark.parametrize("versions", [TORCH, {}])
def test_the_check_is_skipped_without_jax_and_says_so(versions: dict[str, str]) -> None:
    asked, notes = settle(STEP, seen(versions), seen(versions))
    assert asked == ["probe_peers"]
    assert notes == ["the health check of the chips is skipped: the program's Python has no JAX"]
    assert settle(replace(STEP, health_check=False), seen(versions), seen(versions)) == (["probe_peers"], [])


def test_jax_without_libtpu_is_an_error() -> None:
    with pytest.raises(WrongDevicesError, match=r"worker 1: the program's Python has JAX, but not libtpu") as error:
        settle(STEP, seen(JAX), seen({"jax": "0.10.2"}))
    assert error.value.exit_code == 3
    lenient = replace(STEP, needs_libtpu=False)
    assert settle(lenient, seen({"jax": "1"}), seen({"jax": "1"}))[0] == ["probe_peers"]


@pytest.mark.parametrize(
    ("names", "lacks"),
    [("jax", True), ("jax libtpu", False), ("jax libtpu-nightly", False), ("jax torch-xla", False), ("numpy", False)],
)
def test_who_lacks_libtpu(names: str, lacks: bool) -> None:
    assert lacks_libtpu(dict.fromkeys(names.split(), "1")) == lacks


def test_a_check_on_the_wrong_devices_fails() -> None:
    answers = [passed(0), passed(1, backend="cpu", local_devices=1)]
    with pytest.raises(WrongDevicesError, match="worker 0: 4 tpu; worker 1: 1 cpu") as error:
        settle(STEP, seen(JAX), seen(JAX), check_health=answers)
    assert error.value.devices == ("4 tpu", "1 cpu")
    cut_off = {"reachable": False, "detail": "worker 0 does not answer"}
    with pytest.raises(WorkersFailedError, match="worker 1: worker 0 does not answer"):  # and nothing is checked
        settle(STEP, seen(JAX), seen(JAX), probe_peers=[REACHED, cut_off])
