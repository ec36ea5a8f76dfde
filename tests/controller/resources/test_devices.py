"""The steps that look at the chips: are they there, free and healthy, in which order, and whom they blame."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from controller.agent.protocol import Chips, Health
from controller.context import Context
from controller.core.errors import WrongDevicesError
from controller.reconcile import ObservedResources
from controller.resources import devices
from controller.resources.devices import (
    DeviceProbe,
    FreeChips,
    health_payloads,
    lacks_libtpu,
    require_health,
    summarize,
)
from controller.resources.pod.node import Node
from controller.ssh.fleet import WorkersFailedError
from tests.fakes.context import make_context


@dataclass
class FakeFleet:
    """Answers of each command: a list with one per worker, or a function that makes it."""

    answers: dict[str, Any]
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def call_all(self, command: str, payload: Any, workers: Any = None) -> list[Any]:
        self.asked.append((str(command), payload))
        answer = self.answers[str(command)]
        return answer() if isinstance(answer, Callable) else answer

    def observe(self, who: str, payload: Any) -> list[Any]:
        return self.call_all("observe", payload)

    def fleet(self, context: Context) -> "FakeFleet":
        """As the pod that it is the fleet of."""
        return self


HOLDER: Any = {"pid": 7, "user": "anna", "command": "python notebook.py", "paths": ["/dev/vfio/0", "/dev/vfio/1"]}


def having(count: int, on_pci: int | None = None, *holders: Any) -> Chips:
    paths = [f"/dev/vfio/{number}" for number in range(count)]
    return {"paths": paths, "on_pci": count if on_pci is None else on_pci, "holders": [*holders]}


def look_and_apply(*looks: list[Chips], expected: int = 4) -> list[tuple[str, Any]]:
    """Observe, and apply if there is a difference; each look is what the workers have then."""
    fleet = FakeFleet({"observe": iter([[{"chips": chips} for chips in look] for look in looks]).__next__})
    step = FreeChips(expected=expected, state=("free",) * len(looks[0]), node="node/pod", name="pod")
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
        look_and_apply(found, found)
    assert said in str(error.value)
    assert "program.needs_chips=false" in str(error.value)
    assert error.value.faulty == faulty
    assert error.value.devices == tuple(f"{len(chips['paths'])} chips" for chips in found)
    assert error.value.exit_code == 3


def test_a_held_chip_names_its_holder() -> None:
    held = [having(4), having(4, 4, HOLDER)]
    with pytest.raises(WrongDevicesError) as error:
        look_and_apply(*[held] * 4)
    said = (
        "worker 1: /dev/vfio/0, /dev/vfio/1 are held by process 7 of anna (python notebook.py). End it (`slipway exec"
    )
    assert str(error.value).startswith(said)
    assert (error.value.devices, error.value.faulty) == ((), ()), "no hardware is to blame"


def test_a_program_that_is_about_to_end_is_waited_for() -> None:
    held, free = [having(4, 4, HOLDER)], [having(4)]
    assert len(look_and_apply(held, held, free)) == 3
    assert look_and_apply(free, free) == [("observe", {"chips": True})]


def passed(process: int, *faults: tuple[int, int, str], **more: Any) -> Health:
    found: Any = {"boot_id": "b", "stage": "done", "problem": "", "backend": "tpu", "local_devices": 4, "devices": 8}
    found |= {"kind": "TPU v4", "process": process, "tflops": 200.0, "hbm_gb": 26.0, "seconds": 9.4}
    return found | {"faults": [dict(zip(("process", "device", "message"), f, strict=True)) for f in faults]} | more


def stopped(stage: str, problem: str = "did not finish within 120 s") -> Health:
    return passed(0, stage=stage, problem=problem, devices=0)


def test_what_has_passed_is_summarized() -> None:
    answers = [passed(0), passed(1, tflops=181.26, seconds=12.0)]
    require_health(answers)
    assert summarize(answers) == (
        "health check passed in 12 s: 181 to 200 TFLOP/s per device, 26 GB of memory tested per device, "
        "all-reduce over 8 devices (TPU v4)"
    )


@pytest.mark.parametrize(
    ("answers", "per_chip", "said", "faulty"),
    [
        # JAX's process 1 may be worker 0
        ([passed(1), passed(0, (0, 2, "its result is wrong"))], 1, "worker 1, chip 2: its result", 1),
        ([passed(0, (1, 3, "it is missing")), passed(1, (1, 3, "it is missing"))], 1, "worker 1, chip 3", 1),
        ([passed(0, (0, 3, "HBM: 2 words"))], 2, "worker 0, chip 1: HBM", 0),  # two devices may be one chip
    ],
)
def test_a_fault_names_worker_and_chip_once(answers: list[Health], per_chip: int, said: str, faulty: int) -> None:
    with pytest.raises(WrongDevicesError, match="faulty chips: ") as error:
        require_health(answers, devices_per_chip=per_chip)
    assert str(error.value).count(said) == 1
    assert (error.value.faulty, error.value.exit_code, error.value.devices) == ((faulty,), 3, ())


NO_NUMPY = stopped("importing JAX", "ModuleNotFoundError: no numpy")


@pytest.mark.parametrize(
    ("answers", "said", "faulty"),
    [
        ([stopped("all-reduce"), stopped("HBM")], "first on worker 1 at 'HBM': did not finish within 120 s", (1,)),
        ([passed(0), stopped("all-reduce", "core dumped")], "worker 1 at 'all-reduce'", (1,)),
        ([stopped("all-reduce"), stopped("all-reduce")], "worker 0 at 'all-reduce'", None),
        (
            [stopped("joining the other workers"), NO_NUMPY],
            "worker 1 at 'importing JAX': ModuleNotFoundError: no numpy",
            None,
        ),
    ],
    ids=["one hangs earlier", "one crashes", "all hang", "a broken installation"],
)
def test_a_check_that_stops(answers: list[Health], said: str, faulty: Any) -> None:
    kind = WorkersFailedError if faulty is None else WrongDevicesError
    with pytest.raises(kind) as error:
        require_health(answers)
    assert type(error.value) is kind
    assert said in str(error.value)
    assert "cloud.health_check=false" in str(error.value)
    assert getattr(error.value, "faulty", None) == faulty


STEP = DeviceProbe(
    name="pod", node="node/pod", venv="f1", backend="tpu", probe_devices=False, health_check=True, needs_libtpu=True,
    devices=(4, 4), reach_worker_0=(True, True), healthy=(True, True), libtpu=(True, True),
)  # fmt: skip
JAX, TORCH = {"jax": "0.10.2", "libtpu": "0.0.42"}, {"torch-xla": "2.9.0", "libtpu": "0.0.21"}
REACHED = {"reachable": True, "detail": ""}


@pytest.fixture(autouse=True)
def no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "peer_payloads", lambda _: [])
    monkeypatch.setattr(devices, "health_payloads", lambda *_: [])


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


@pytest.mark.parametrize("count", [1, 2, 16])
def test_the_chips_of_all_workers_are_checked_by_processes_that_are_told_who_they_are(count: int) -> None:
    endpoints = [SimpleNamespace(internal=f"10.0.0.{2 + worker}") for worker in range(count)]
    node: Any = Mock(spec=Node, status=SimpleNamespace(endpoints=endpoints))
    shared = {"venv": "f1", "processes": count, "coordinator": "10.0.0.2:8482"}
    assert health_payloads("f1", node) == [{**shared, "index": worker} for worker in range(count)]


def test_a_check_on_the_wrong_devices_fails() -> None:
    answers = [passed(0), passed(1, backend="cpu", local_devices=1)]
    with pytest.raises(WrongDevicesError, match="worker 0: 4 tpu; worker 1: 1 cpu") as error:
        settle(STEP, seen(JAX), seen(JAX), check_health=answers)
    assert error.value.devices == ("4 tpu", "1 cpu")
    cut_off = {"reachable": False, "detail": "worker 0 does not answer"}
    with pytest.raises(WorkersFailedError, match="worker 1: worker 0 does not answer"):  # and nothing is checked
        settle(STEP, seen(JAX), seen(JAX), probe_peers=[REACHED, cut_off])
