"""Seeded schedules of misfortune for the emulated cloud: the same seed means the same faults at the same moments.

Everything that a run is to survive may come, several things at once. What Google refuses for good (no permission, no
quota anywhere, a node of the wrong size) is not among it: nothing goes on from there, as documented.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
HOW_MANY = (1, 1, 2, 2, 2, 3, 3, 4)
REQUESTS = 90
"""About as many requests does an undisturbed run make of few steps."""
UPLOADS = "POST /upload/"
KILLS = ("controller_killed",)
REPLACES = ("preempted", "maintenance", "unhealthy", "stockout", "failure")


@dataclass(frozen=True)
class Stage:
    """What a schedule is for. `objects`: parts of names of objects that the program writes, in their order; `seconds`:
    about how long it runs; `blink`: how long what passes by itself may last at most."""

    workers: int
    objects: Sequence[str]
    seconds: float
    blink: float
    kills_controller: bool = False
    adopted: bool = False
    """May the pod not be replaced? Then it is not taken away either."""


def schedule(seed: int, stage: Stage) -> tuple[Spec, ...]:
    """The faults of a seed, as `cloud.faults` takes them."""
    draw = random.Random(f"slipway chaos {seed}")  # noqa: S311 - the same for the same seed
    out = (() if stage.kills_controller else KILLS) + (REPLACES if stage.adopted else ())
    kinds = [kind for kind in KINDS if kind not in out]
    drawn = draw.choices(kinds, [KINDS[kind][0] for kind in kinds], k=draw.choice(HOW_MANY))
    return tuple({"kind": kind, **KINDS[kind][1](draw, stage), "seed": draw.randrange(1000)} for kind in drawn)


def _while_it_runs(draw: random.Random, stage: Stage) -> Spec:
    """A moment at which there is a program, as a rule."""
    if stage.objects and draw.random() < 0.7:
        return {"after_object": draw.choice(stage.objects), "delay_seconds": round(draw.uniform(0, 0.3), 3)}
    return {"within_seconds": stage.seconds}


def _at_any_time(draw: random.Random, stage: Stage) -> Spec:
    if draw.random() < 0.5:
        return {"after_requests": draw.randrange(REQUESTS)}
    return _while_it_runs(draw, stage)


def _lasting(draw: random.Random, stage: Stage) -> Spec:
    return {"seconds": round(draw.uniform(0.1, 1.0) * stage.blink, 3), **_at_any_time(draw, stage)}


def _of_worker(draw: random.Random, stage: Stage) -> Spec:
    """One worker, or all of them."""
    return {"worker": draw.choice([None, *range(stage.workers)])}


def _of_program(draw: random.Random, stage: Stage) -> Spec:
    return {**_while_it_runs(draw, stage), **_of_worker(draw, stage)}


def _refused(draw: random.Random, stage: Stage) -> Spec:
    spec = {"times": draw.randint(1, 3), "at": draw.choice(["request", "operation"])}
    return spec if draw.random() < 0.7 else {**spec, **_at_any_time(draw, stage)}


def _answer(draw: random.Random, stage: Stage) -> Spec:
    what = draw.choice(["GET ", "POST ", "PATCH ", "tpu/v2", "storage/", "compute/"])
    status = draw.choice([429, 500, 502, 503, 504])
    return {"match": what, "status": status, "times": draw.randint(1, 4), **_at_any_time(draw, stage)}


def _cut(draw: random.Random, stage: Stage) -> Spec:
    at = draw.choice(["request", "answer", "answer", "upload"])
    what = draw.choice([UPLOADS, UPLOADS, "POST /tpu", "DELETE ", "POST ", "GET "])
    return {"match": UPLOADS if at == "upload" else what, "at": at, "times": draw.randint(1, 3),
            **_at_any_time(draw, stage)}  # fmt: skip


def _brownout(draw: random.Random, stage: Stage) -> Spec:
    client = draw.choice([None, "laptop", "workers"])
    return {**_lasting(draw, stage), "share": round(draw.uniform(0.1, 0.7), 2), "client": client}


def _ssh(draw: random.Random, stage: Stage) -> Spec:
    return {**_lasting(draw, stage), **_of_worker(draw, stage)}


def _noticed(draw: random.Random, stage: Stage) -> Spec:
    """Google announces it, or does not."""
    return {**_while_it_runs(draw, stage), "notice_seconds": draw.choice([None, None, round(stage.blink / 3, 3)])}


KINDS: dict[str, tuple[int, Callable[[random.Random, Stage], Spec]]] = {
    "preempted": (6, _noticed),
    "maintenance": (2, lambda d, s: {"seconds": round(d.uniform(0.1, 1.0) * s.blink, 3), **_noticed(d, s)}),
    "unhealthy": (1, lambda d, s: {**_while_it_runs(d, s), "symptom": d.choice([None, "MESH_BUILD_FAIL"])}),
    "killed": (4, _of_program),
    "frozen": (1, _of_program),
    "controller_killed": (5, _at_any_time),
    "worker_clock": (2, lambda d, s: {**_of_program(d, s), "seconds": d.choice([-3600.0, 3600.0, 86400.0])}),
    "disk_full": (2, lambda d, s: {"seconds": round(d.uniform(0.1, 1.0) * s.blink, 3), **_of_program(d, s)}),
    "stockout": (4, _refused),
    "failure": (1, _refused),
    "http": (3, _answer),
    "cut": (5, _cut),
    "brownout": (3, _brownout),
    "partition": (2, lambda d, s: {**_lasting(d, s), "client": d.choice(["laptop", "laptop", "workers"])}),
    "ssh_refused": (2, _ssh),
    "ssh_frozen": (2, _ssh),
}
"""How often each kind is drawn among the others, and with which keys."""
