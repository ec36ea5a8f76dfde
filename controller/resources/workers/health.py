"""Meaning of all workers' answers to the health check: pure."""

from collections.abc import Sequence

from controller.agent.commands.health import DONE, STAGES
from controller.agent.protocol import Health
from controller.core.errors import WrongDevicesError
from controller.core.text import plural
from controller.ssh.fleet import WorkersFailedError

SWITCH = "cloud.health_check=false skips this check"


def require_health(answers: Sequence[Health], devices_per_chip: int = 1) -> None:
    """Raise an error that names worker and chip of every fault, unless the check has passed everywhere.

    Raises:
        WrongDevicesError: chips are faulty, or the check stopped on some workers before the others: theirs are suspect.
        WorkersFailedError: the check stopped everywhere at the same stage.
    """
    worker_of = {answer["process"]: worker for worker, answer in enumerate(answers) if answer["stage"] == DONE}
    faults = {
        (worker_of.get(f["process"], f["process"]), f["device"] // devices_per_chip, f["message"])
        for answer in answers
        for f in answer["faults"]
    }
    stopped = [worker for worker, answer in enumerate(answers) if answer["stage"] != DONE]
    if faults:
        listed = "; ".join(f"worker {worker}, chip {chip}: {message}" for worker, chip, message in sorted(faults))
        raise WrongDevicesError(
            f"the health check found faulty chips: {listed}. `slipway down` and `up` get other hardware; {SWITCH}",
            faulty=sorted({worker for worker, _, _ in faults}),
        )
    if not stopped:
        return
    reached = [len(STAGES) if a["stage"] == DONE else STAGES.index(a["stage"]) for a in answers]
    first = [worker for worker, stage in enumerate(reached) if stage == min(reached)]
    listed = "; ".join(f"worker {i} at {answers[i]['stage']!r}: {answers[i]['problem']}" for i in first)
    message = f"the health check of the chips stopped, first on {listed}. {SWITCH}"
    # Import errors and the network are no fault of a chip.
    if len(first) == len(answers) or min(reached) < STAGES.index("finding the devices"):
        raise WorkersFailedError(message)
    raise WrongDevicesError(message, faulty=first)


def summarize(answers: Sequence[Health]) -> str:
    """Return the measurements of a check that has passed."""
    rates = sorted(answer["tflops"] for answer in answers)
    span = f"{rates[0]:.3g}" if rates[0] == rates[-1] else f"{rates[0]:.3g} to {rates[-1]:.3g}"
    first = answers[0]
    return (
        f"health check passed in {max(a['seconds'] for a in answers):.0f} s: {span} TFLOP/s per device, "
        f"{min(a['hbm_gb'] for a in answers):.3g} GB of memory tested per device, all-reduce over "
        f"{plural(first['devices'], 'device')} ({first['kind']})"
    )
