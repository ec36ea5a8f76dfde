"""The health check on one worker that cannot finish it; tests/scenarios/recovery/test_recovery.py has two that can."""

import re
from pathlib import Path

import controller.agent.commands.health
from controller.agent.commands.health import STAGES
from tests.controller.agent.commands.test_probe import with_jax
from tests.controller.agent.conftest import ProgramRun

PASSES = """
import json, sys
print(json.dumps({"backend": "tpu", "local_devices": 4, "devices": 4, "kind": "TPU v4", "process": 0,
                  "faults": %s, "tflops": 200.0, "hbm_gb": 26.0, "seconds": 9.0}))
sys.exit()
"""
FAULT = {"process": 0, "device": 1, "message": "broken"}


def test_stages_are_those_of_the_program() -> None:
    source = Path(controller.agent.commands.health.__file__).with_name("chip_check.py").read_text()
    assert tuple(re.findall(r'begin\("([\w -]+)"', source)) == STAGES[1:]


def test_a_jax_that_fails_says_at_which_stage(run: ProgramRun) -> None:
    worker = with_jax(run, "raise RuntimeError('no libtpu here')").worker
    answer = worker.call("check_health", venv="image", processes=1)
    assert (answer["stage"], answer["problem"]) == ("importing JAX", "RuntimeError: no libtpu here")
    assert worker.call("observe")["health"] is None


def test_the_stage_is_known_however_much_a_crash_prints(run: ProgramRun) -> None:
    crash = (
        "import sys\nopen(sys.argv[2], 'w').write('HBM')\nsys.exit('E0000 uncorrectable error\\n' + 9000 * ' frame\\n')"
    )
    worker = with_jax(run, crash).worker
    assert worker.call("check_health", venv="image", processes=1)["stage"] == "HBM"


def test_success_counts_for_one_boot_and_a_fault_for_none(run: ProgramRun) -> None:
    worker = with_jax(run, PASSES % [FAULT]).worker
    assert worker.call("check_health", venv="image", processes=1)["faults"] == [FAULT]
    assert worker.call("observe")["health"] is None
    with_jax(run, PASSES % [])
    answer = worker.call("check_health", venv="image", processes=1)
    assert (answer["stage"], answer["boot_id"]) == ("done", "boot-1")
    seen = worker.call("observe")
    assert (seen["health"], seen["devices"]["local_devices"]) == (answer, 4)
    worker.boot_id = "boot-2"
    assert worker.call("observe")["health"] is None
