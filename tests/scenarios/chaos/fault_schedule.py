"""Seeded schedules of faults for the emulated cloud: the same seed means the same faults at the same moments.

They hold every fault that a run must survive, several at once. What Google refuses for good (no permission, no quota
anywhere, a node of the wrong size) is not among them: no run recovers from that, as documented.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
FAULT_COUNTS = (1, 1, 2, 2, 2, 3, 3, 4)
MAX_REQUESTS = 90
"""About as many requests does an undisturbed run make of few steps."""
UPLOADS = "POST /upload/"
API_OF_PODS = {"tpu_api": "tpu/v2", "compute_engine": "compute/.*/(instance|resourcePolicies)"}
"""What the paths of requests for pods contain."""


@dataclass(frozen=True)
class ChaosScenario:
    """The run that a schedule is for, and the plane of its pod."""

    workers: int
    objects: Sequence[str]
    """Parts of the names of objects that the program writes, in their order."""
    seconds: float
    """About how long it runs."""
    max_blip_seconds: float
    """The longest that a temporary fault lasts."""
    plane: str = "tpu_api"
    """`auto`: either of them, and the faults of both strike."""


def fault_schedule(seed: int, scenario: ChaosScenario) -> tuple[Spec, ...]:
    """Return the faults of a seed, as `cloud.faults` takes them."""
    draw = random.Random(f"slipway chaos {seed}")
    known = {**FAULT_KINDS, **FAULTS_OF_PLANE[scenario.plane]}
    kinds = list(known)
    drawn = draw.choices(kinds, [known[kind][0] for kind in kinds], k=draw.choice(FAULT_COUNTS))
    faults = [{"kind": kind, **known[kind][1](draw, scenario), "seed": draw.randrange(1000)} for kind in drawn]
    return tuple(faults if scenario.plane != "auto" else [*_shortages(draw, scenario), *faults])


def _during_program(draw: random.Random, scenario: ChaosScenario) -> Spec:
    """A moment at which there is a program, as a rule."""
    if scenario.objects and draw.random() < 0.7:
        return {"after_object": draw.choice(scenario.objects), "delay_seconds": round(draw.uniform(0, 0.3), 3)}
    return {"within_seconds": scenario.seconds}


def _at_any_time(draw: random.Random, scenario: ChaosScenario) -> Spec:
    if draw.random() < 0.5:
        return {"after_requests": draw.randrange(MAX_REQUESTS)}
    return _during_program(draw, scenario)


def _blip(draw: random.Random, scenario: ChaosScenario) -> Spec:
    return {"seconds": round(draw.uniform(0.1, 1.0) * scenario.max_blip_seconds, 3)}


def _temporary_fault(draw: random.Random, scenario: ChaosScenario) -> Spec:
    return {**_blip(draw, scenario), **_at_any_time(draw, scenario)}


def _worker_fault(draw: random.Random, scenario: ChaosScenario) -> Spec:
    """One worker, or all of them."""
    return {"worker": draw.choice([None, *range(scenario.workers)])}


def _program_fault(draw: random.Random, scenario: ChaosScenario) -> Spec:
    return {**_during_program(draw, scenario), **_worker_fault(draw, scenario)}


def _refused(draw: random.Random, scenario: ChaosScenario) -> Spec:
    spec = {"times": draw.randint(1, 3), "at": draw.choice(["request", "operation"])}
    return spec if draw.random() < 0.7 else {**spec, **_at_any_time(draw, scenario)}


def _api_of_pods(draw: random.Random, scenario: ChaosScenario) -> str:
    return API_OF_PODS.get(scenario.plane) or API_OF_PODS[draw.choice([*API_OF_PODS])]


def _answer(draw: random.Random, scenario: ChaosScenario) -> Spec:
    what = draw.choice(["GET ", "POST ", "PATCH ", _api_of_pods(draw, scenario), "storage/", "compute/"])
    status = draw.choice([429, 500, 502, 503, 504])
    return {"match": what, "status": status, "times": draw.randint(1, 4), **_at_any_time(draw, scenario)}


def _cut(draw: random.Random, scenario: ChaosScenario) -> Spec:
    at = draw.choice(["request", "answer", "answer", "upload"])
    asks = f"POST /{_api_of_pods(draw, scenario)}"
    what = draw.choice([UPLOADS, UPLOADS, asks, "DELETE ", "POST ", "GET "])
    return {"match": UPLOADS if at == "upload" else what, "at": at, "times": draw.randint(1, 3),
            **_at_any_time(draw, scenario)}  # fmt: skip


def _brownout(draw: random.Random, scenario: ChaosScenario) -> Spec:
    client = draw.choice([None, "laptop", "workers"])
    return {**_temporary_fault(draw, scenario), "share": round(draw.uniform(0.1, 0.7), 2), "client": client}


def _ssh(draw: random.Random, scenario: ChaosScenario) -> Spec:
    return {**_temporary_fault(draw, scenario), **_worker_fault(draw, scenario)}


def _with_optional_notice(draw: random.Random, scenario: ChaosScenario) -> Spec:
    """Google announces it, or does not."""
    seconds = round(scenario.max_blip_seconds / 3, 3)
    return {**_during_program(draw, scenario), "notice_seconds": draw.choice([None, None, seconds])}


def _state(draw: random.Random, scenario: ChaosScenario, *states: str) -> Spec:
    return {"state": draw.choice(states), "worker": draw.randrange(scenario.workers)}


def _shortages(draw: random.Random, scenario: ChaosScenario) -> list[Spec]:
    """Why a search for a pod of either plane asks both: one has no capacity for a while, or serves a request slowly."""
    waits = [10, 20, 40, 80]  # how often an emulated queue looks for capacity in vain, twenty times per second
    full = {"kind": "stockout", "at": "operation"}
    queue = {**full, "plane": "tpu_api", "times": draw.choice(waits)}
    other = {**full, "plane": "compute_engine", "times": draw.choice(waits) if scenario.workers > 1 else 1}
    slow = {"kind": "queued", "state": "PROVISIONING", "times": 1, "seconds": _blip(draw, scenario)["seconds"]}
    return draw.choice([[queue], [queue], [queue, other], [queue, slow], [slow], [slow, other], []])


def _outage(draw: random.Random, scenario: ChaosScenario) -> Spec:
    """One plane answers nothing but errors for longer than the client repeats a request."""
    status, times = draw.choice([500, 502, 503, 504]), draw.randint(5, 20)
    return {"kind": "http", "match": _api_of_pods(draw, scenario), "status": status, "times": times,
            **_at_any_time(draw, scenario)}  # fmt: skip


BROKEN = ("INCOMPLETE", "FAILED", "ACTIVE_DEGRADED")
FAULT_KINDS: dict[str, tuple[int, Callable[[random.Random, ChaosScenario], Spec]]] = {
    "preempted": (6, _with_optional_notice),
    # A controller that was away during the repair refuses the new host keys of rebuilt VMs.
    "maintenance": (2, lambda d, s: {**_blip(d, s), **_with_optional_notice(d, s), "new_host_keys": False}),
    "killed": (4, _program_fault),
    "frozen": (1, _program_fault),
    "controller_killed": (5, _at_any_time),
    "worker_clock": (2, lambda d, s: {**_program_fault(d, s), "seconds": d.choice([-3600.0, 3600.0, 86400.0])}),
    "disk_full": (2, lambda d, s: {**_blip(d, s), **_program_fault(d, s)}),
    "stockout": (4, _refused),
    "failure": (1, _refused),
    "http": (3, _answer),
    "cut": (5, _cut),
    "brownout": (3, _brownout),
    "partition": (2, lambda d, s: {**_temporary_fault(d, s), "client": d.choice(["laptop", "laptop", "workers"])}),
    "ssh_refused": (2, _ssh),
    "ssh_frozen": (2, _ssh),
}
"""How often each kind is drawn among the others, and with which keys."""
NODE_FAULTS: dict[str, tuple[int, Callable[[random.Random, ChaosScenario], Spec]]] = {
    "unhealthy": (1, lambda d, s: {**_during_program(d, s), "symptom": d.choice([None, "MESH_BUILD_FAIL"])}),
}
SLICE_FAULTS: dict[str, tuple[int, Callable[[random.Random, ChaosScenario], Spec]]] = {
    "slice_state": (3, lambda d, s: {**_during_program(d, s), **_state(d, s, *BROKEN, "REACTIVATING")}),
    "slice_creation": (2, lambda d, s: {"times": d.randint(1, 2), **_state(d, s, *BROKEN)}),
}
"""The same for pods of one plane only."""
EITHER_FAULTS: dict[str, tuple[int, Callable[[random.Random, ChaosScenario], Spec]]] = {
    **NODE_FAULTS,
    **SLICE_FAULTS,
    "outage": (6, _outage),
}
"""The same for pods that may come from either plane; an outage is made of answers of HTTP."""
FAULTS_OF_PLANE = {"tpu_api": NODE_FAULTS, "compute_engine": SLICE_FAULTS, "auto": EITHER_FAULTS}
