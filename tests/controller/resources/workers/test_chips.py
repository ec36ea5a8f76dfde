"""The step `chips`: what it says of missing and held chips, and whom it blames."""

from __future__ import annotations

from typing import Any

import pytest

from controller.agent.protocol import Chips
from controller.core.errors import WrongDevicesError
from controller.resources.workers.chips import FreeChips, chips_problem
from tests.controller.resources.workers.fakes import FakeFleet
from tests.fakes.context import make_context

HOLDER: Any = {"pid": 7, "user": "anna", "command": "python notebook.py", "paths": ["/dev/vfio/0", "/dev/vfio/1"]}


def having(count: int, on_pci: int | None = None, *holders: Any) -> Chips:
    paths = [f"/dev/vfio/{number}" for number in range(count)]
    return {"paths": paths, "on_pci": count if on_pci is None else on_pci, "holders": [*holders]}


def settle(*looks: list[Chips], expected: int = 4) -> list[tuple[str, Any]]:
    """Observe, and apply if there is a difference; each look is what the workers have then."""
    fleet = FakeFleet({"observe": iter([[{"chips": chips} for chips in look] for look in looks]).__next__})
    step = FreeChips.for_workers(expected, len(looks[0]), node="node/pod", name="pod")
    observed = {"node/pod": fleet}
    context = make_context(None)
    if diff := step.diff(step.observe(context, observed)):
        step.apply(context, observed, diff)
    return fleet.asked


@pytest.mark.parametrize(
    ("found", "said", "faulty"),
    [
        (
            [having(4), having(3)],
            "worker 1 has 3 of 4 chips (/dev/vfio/0, /dev/vfio/1, /dev/vfio/2; 3 on its PCI bus); delete the pod",
            (1,),
        ),
        ([having(0, 4)], "0 of 4 chips (no device nodes in /dev; 4 on its PCI bus); the PCI bus has them all", ()),
        ([having(8), having(8)], "worker 0 has 8 of 4 chips", ()),
        ([having(1)], "is tpu.accelerator_type what this pod is?", ()),
    ],
)
def test_a_wrong_number_is_an_error_at_once(found: list[Chips], said: str, faulty: tuple[int, ...]) -> None:
    with pytest.raises(WrongDevicesError) as error:
        settle(found, found)
    assert said in str(error.value)
    assert "program.needs_chips=false" in str(error.value)
    assert error.value.faulty == faulty
    assert error.value.devices == tuple(f"{len(chips['paths'])} chips" for chips in found)
    assert error.value.exit_code == 3


def test_a_held_chip_names_its_holder() -> None:
    held = [having(4), having(4, 4, HOLDER)]
    with pytest.raises(WrongDevicesError) as error:
        settle(*[held] * 4)
    said = (
        "worker 1: /dev/vfio/0, /dev/vfio/1 are held by process 7 of anna (python notebook.py). End it (`slipway exec"
    )
    assert str(error.value).startswith(said)
    assert (error.value.devices, error.value.faulty) == ((), ()), "no hardware is to blame"


def test_a_program_that_is_about_to_end_is_waited_for() -> None:
    held, free = [having(4, 4, HOLDER)], [having(4)]
    assert len(settle(held, held, free)) == 3
    assert settle(free, free) == [("observe", {"chips": True})]


def test_a_look_on_request_says_the_same() -> None:
    assert chips_problem(having(4), 4) == ""
    assert chips_problem(having(3), 4).startswith("3 of 4 chips")
    assert "process 7 of anna" in chips_problem(having(4, 4, HOLDER), 4)
