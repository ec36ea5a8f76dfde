"""What the answers of all workers to the health check mean, and whom they blame."""

from __future__ import annotations

from typing import Any

import pytest

from controller.agent.protocol import Health
from controller.core.errors import WrongDevicesError
from controller.resources.workers.health import require_health, summarize
from controller.ssh.fleet import WorkersFailedError


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
